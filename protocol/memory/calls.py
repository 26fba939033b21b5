"""In-memory substitute for the part of hivemind's P2P that the directory uses: unary calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.hivemind_imports import P2PDaemonError, P2PHandlerError, PeerID
from gossamer.protocol.memory.conversation import FRAMING_BYTES, crossing_s
from gossamer.protocol.memory.network import CallHandler, MemoryNetwork, MemoryPeer


class MemoryP2P:
    """The unary calls of one MemoryPeer. It has the interface of AttachedP2P and of Dialer."""

    def __init__(self, network: MemoryNetwork, peer: MemoryPeer) -> None:
        self.peer_id = PeerID(peer.peer_id.raw)
        self._network = network
        self._peer = peer

    @property
    def is_broken(self) -> bool:
        """Whether this peer is down."""
        return not self._peer.is_up

    async def add_protobuf_handler(self, name: str, handler: CallHandler, input_type: Any, **_: object) -> None:
        """Register the handler of calls with this name."""
        self._peer.calls[name] = handler, input_type

    async def call_protobuf_handler(self, peer: PeerID, name: str, request: Any, output_type: Any) -> Any:
        """Call a peer and return its parsed reply. Raises P2PDaemonError and P2PHandlerError, as hivemind does."""
        partner, data = PeerId(peer.to_bytes()), request.SerializeToString()
        try:
            relay = await self._network.dial(self._peer.peer_id, partner)
        except Unreachable as error:
            raise P2PDaemonError(str(error)) from None
        host = self._network.peers[partner]
        await self._cross(self._peer, host, len(data), relay)
        if name not in host.calls:
            raise P2PDaemonError("protocol not supported")
        handler, input_type = host.calls[name]
        failure = None
        try:
            reply = (await handler(input_type.FromString(data), SimpleNamespace(remote_id=self.peer_id))).SerializeToString()
        except Exception as error:  # hivemind sends any exception of a handler to the caller
            reply = failure = repr(error).encode()
        await self._cross(host, self._peer, len(reply), relay)
        if failure is not None:
            raise P2PHandlerError(failure.decode())
        return output_type.FromString(reply)

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial a peer unless already connected. Raises Unreachable."""
        await self._network.dial(self._peer.peer_id, partner, addresses)

    async def connected(self) -> dict[PeerId, str]:
        """Return the connected peers, each with its multiaddr."""
        return {peer: self._network.places.get(peer, "") for peer in self._network.connected(self._peer.peer_id)}

    async def _cross(self, sender: MemoryPeer, receiver: MemoryPeer, num_bytes: int, relay: PeerId | None) -> None:
        """Wait for as long as a message takes. Raises P2PDaemonError if one of the two peers is down by then, or partitioned."""
        num_bytes += FRAMING_BYTES
        sender.line.num_sent += num_bytes
        rate = min(sender.line.link.bytes_per_s, receiver.line.link.bytes_per_s)
        crossings_s = (crossing_s(sender.line.link, receiver.line.link, self._network.draw) for _ in range(2 if relay else 1))
        await asyncio.sleep(num_bytes / rate + sum(crossings_s))
        if not sender.is_up or not receiver.is_up or self._network.is_cut(sender.peer_id, receiver.peer_id):
            raise P2PDaemonError("stream reset")
        receiver.line.num_received += num_bytes
