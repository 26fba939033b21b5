"""hivemind's P2P in memory, as far as the directory uses it: calls of one request and one answer, with delay, bytes and deaths."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from protocol.errors import Unreachable
from protocol.identity import PeerId
from protocol.libp2p.hivemind_imports import P2PDaemonError, P2PHandlerError, PeerID

FRAMING_BYTES = 80  # of each message: libp2p's headers, the name of the handler, TCP
DIAL_S = 5.0  # until nobody has answered


@dataclass
class UnaryP2P:
    """One peer's end. `sent` and `received` count bytes; `is_open`: who is not has to call first."""

    network: UnaryNetwork
    id: PeerId
    address: str
    is_open: bool = True
    is_up: bool = True
    sent: int = 0
    received: int = 0
    is_broken: bool = False
    handlers: dict[str, tuple[Callable[..., Awaitable[Any]], Any]] = field(default_factory=dict)

    @property
    def peer_id(self) -> PeerID:
        return PeerID(self.id.raw)

    async def add_protobuf_handler(self, name: str, handler: Any, input_type: Any, **_: object) -> None:
        self.handlers[name] = handler, input_type

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Any, output_type: Any) -> Any:
        data = await self.network.call(self, PeerId(peer.to_bytes()), name, request.SerializeToString())
        return output_type.FromString(data)

    async def close(self) -> None:
        self.is_up = False

    async def connect(self, partner: PeerId, addresses: object) -> None:
        await self.network.dial(self.id, partner)

    async def connected(self) -> dict[PeerId, str]:
        return self.network.connected(self.id)


class UnaryNetwork:
    """All peers. A call takes `latency_s` there and back; one to a peer that is down or cannot be called takes DIAL_S and fails."""

    def __init__(self, seed: int = 0, latency_s: float = 0.05) -> None:
        self.peers: dict[PeerId, UnaryP2P] = {}
        self.calls = 0
        self._latency_s = latency_s
        self._draw = random.Random(seed).random
        self._links: dict[PeerId, set[PeerId]] = {}

    def join(self, peer_id: PeerId, address: str, *, is_open: bool = True) -> UnaryP2P:
        self.peers[peer_id] = p2p = UnaryP2P(self, peer_id, address, is_open)
        return p2p

    async def dial(self, caller: PeerId, partner: PeerId) -> None:
        """Connect two peers. Raises Unreachable."""
        links, host = self._links.setdefault(caller, set()), self.peers.get(partner)
        if host is None or not host.is_up or not (host.is_open or partner in links):
            await asyncio.sleep(DIAL_S)
            raise Unreachable(f"no answer from {partner.short()}")
        if partner not in links:
            await asyncio.sleep(2 * self._latency_s)
            links.add(partner)
            self._links.setdefault(partner, set()).add(caller)

    def connected(self, peer_id: PeerId) -> dict[PeerId, str]:
        """Return to whom a connection is open, and from where it comes."""
        return {peer: self.peers[peer].address for peer in self._links.get(peer_id, ()) if self.peers[peer].is_up}

    async def call(self, caller: UnaryP2P, partner: PeerId, name: str, request: bytes) -> bytes:
        self.calls += 1
        try:
            await self.dial(caller.id, partner)
        except Unreachable as error:
            raise P2PDaemonError(str(error)) from None
        host = self.peers[partner]
        caller.sent += len(request) + FRAMING_BYTES
        await asyncio.sleep(self._latency_s * (0.5 + self._draw()))
        host.received += len(request) + FRAMING_BYTES
        handler, input_type = host.handlers[name]
        try:
            answer = (await handler(input_type.FromString(request), SimpleNamespace(remote_id=caller.peer_id))).SerializeToString()
            problem = None
        except Exception as error:
            answer, problem = repr(error).encode(), error
        host.sent += len(answer) + FRAMING_BYTES
        await asyncio.sleep(self._latency_s * (0.5 + self._draw()))
        caller.received += len(answer) + FRAMING_BYTES
        if problem is not None:
            raise P2PHandlerError(answer.decode())
        if not host.is_up:
            raise P2PDaemonError("stream reset")
        return bytes(answer)
