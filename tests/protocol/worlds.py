"""Two environments for the same tests: real p2pd processes on loopback, and in-memory peers under virtual time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.outbound import Outbound
from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings
from gossamer.protocol.libp2p.splice import CarriedBytes
from gossamer.protocol.libp2p.tunnel import tunnel_transport
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.streams.admission import Admission, StreamCaps
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler, Transport
from tests.protocol.peers import nobody, seeded


@dataclass(frozen=True, slots=True)
class Peer:
    peer_id: PeerId
    transport: Transport
    addresses: tuple[str, ...] = ()

    async def connect(self, partner: Peer, purpose: Purpose = Purpose.MEET) -> Stream:
        return await self.transport.connect(partner.peer_id, partner.addresses, purpose)


Banned = Callable[[PeerId], bool]


def nobody_is_banned(partner: PeerId) -> bool:
    return False


class World(Protocol):
    async def peer(self, handler: StreamHandler, caps: StreamCaps | None = None, is_banned: Banned = nobody_is_banned) -> Peer: ...

    async def kill(self, peer: Peer) -> None: ...


async def stream_to(world: World, handler: StreamHandler, purpose: Purpose = Purpose.MEET) -> Stream:
    """Open a stream of one new peer to another, which handles it so."""
    a, b = await world.peer(nobody), await world.peer(handler)
    return await a.connect(b, purpose)


class MemoryWorld:
    def __init__(self) -> None:
        self._network = MemoryNetwork(seed=1, link=Link(latency_s=0.02, jitter_s=0.01, bytes_per_s=1e7))
        self._num_peers = 0

    async def __aenter__(self) -> MemoryWorld:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._network.close()

    async def peer(self, handler: StreamHandler, caps: StreamCaps | None = None, is_banned: Banned = nobody_is_banned) -> Peer:
        self._num_peers += 1
        peer_id = seeded(self._num_peers).peer_id
        return Peer(peer_id, self._network.start_peer(peer_id, handler, caps=caps, is_banned=is_banned))

    async def kill(self, peer: Peer) -> None:
        self._network.kill(peer.peer_id)


LOCAL = DaemonSettings(Path(), Path(), "127.0.0.1")


async def start_daemon(stack: AsyncExitStack, home: Path, settings: DaemonSettings = LOCAL) -> Daemon:
    """Start the p2pd of a peer with a key of its own in `home`."""
    Identity.load_or_create(home / "key")
    return await stack.enter_async_context(Daemon(replace(settings, identity_file=home / "key", folder=home / "run")))


async def open_tunnel(
    stack: AsyncExitStack, home: Path, handler: StreamHandler, admission: Admission | None = None, carried: CarriedBytes | None = None
) -> tuple[Daemon, Outbound]:
    """Start a peer's p2pd, and the tunnel over it."""
    daemon = await start_daemon(stack, home)
    tunnel = tunnel_transport(daemon.control, home / "run", handler, admission or Admission(), carried or CarriedBytes())
    return daemon, await stack.enter_async_context(tunnel)


class TunnelWorld:
    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._daemons: dict[PeerId, Daemon] = {}

    async def __aenter__(self) -> TunnelWorld:
        self._root = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def peer(self, handler: StreamHandler, caps: StreamCaps | None = None, is_banned: Banned = nobody_is_banned) -> Peer:
        home = self._root / str(len(self._daemons))
        daemon, transport = await open_tunnel(self._stack, home, handler, Admission(caps, is_banned))
        self._daemons[daemon.peer_id] = daemon
        return Peer(daemon.peer_id, transport, daemon.addresses)

    async def kill(self, peer: Peer) -> None:
        self._daemons[peer.peer_id].kill()
