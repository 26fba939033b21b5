"""Two environments for the same tests: real p2pd processes on loopback, and in-memory peers under virtual time."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import uvloop

from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings
from gossamer.protocol.libp2p.splice import CarriedBytes
from gossamer.protocol.libp2p.tunnel import tunnel_transport
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.streams.admission import Admission, StreamCaps
from gossamer.protocol.streams.transport import StreamHandler, Transport
from tests.protocol.peers import seeded


@dataclass(frozen=True, slots=True)
class Peer:
    peer_id: PeerId
    transport: Transport
    addresses: tuple[str, ...] = ()


Scenario = Callable[["World"], Coroutine[Any, Any, None]]
Play = Callable[[Scenario], None]
Banned = Callable[[PeerId], bool]


def nobody_is_banned(partner: PeerId) -> bool:
    return False


class World(Protocol):
    async def peer(self, handler: StreamHandler, caps: StreamCaps | None = None, is_banned: Banned = nobody_is_banned) -> Peer: ...

    async def kill(self, peer: Peer) -> None: ...


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
        Identity.load_or_create(home / "key")
        daemon = await self._stack.enter_async_context(Daemon(DaemonSettings(home / "key", home / "run", "127.0.0.1")))
        assert daemon.peer_id is not None
        self._daemons[daemon.peer_id] = daemon
        transport = tunnel_transport(daemon.control, home / "run", handler, Admission(caps, is_banned), CarriedBytes())
        return Peer(daemon.peer_id, await self._stack.enter_async_context(transport), daemon.addresses)

    async def kill(self, peer: Peer) -> None:
        self._daemons[peer.peer_id].kill()


async def _inside(world: Any, test: Scenario) -> None:
    async with world:
        await test(world)
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"tasks left behind: {left}"


def in_memory(test: Scenario) -> None:
    virtual_time.run(_inside(MemoryWorld(), test))


def over_libp2p(test: Scenario) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in the node process; test_node.py uses asyncio's own loop
        runner.run(_inside(TunnelWorld(), test))
    gc.collect()  # gRPC's thread ends with its last object, and asyncio keeps some in cycles
