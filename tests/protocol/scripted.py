"""An in-memory network with scripted faults: a peer crashes at its k-th message, or rejects streams for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossamer.protocol.errors import PeerGone
from gossamer.protocol.identity import PeerId
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.messages.messages import Message
from gossamer.protocol.streams.admission import StreamCaps
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler
from tests.protocol.knowing import KnowingNetwork


@dataclass(slots=True)
class Doom:
    """A fault at a peer's k-th message, counted over all its streams since its start."""

    sent: int | None = None  # when it sends its k-th message
    received: int | None = None  # when it receives its k-th message, before reading it
    is_delivered: bool = False  # frames in flight still arrive; otherwise they are lost, including the k-th message
    how: str = "dies"  # or "cut": a partition; or "closes": it closes that stream


@dataclass(slots=True)
class Counts:
    """The message counts of one peer since its start."""

    num_sent: int = 0
    num_received: int = 0
    dooms: list[Doom] = field(default_factory=list)


class ScriptedNetwork(KnowingNetwork):
    """The network and its scripted faults."""

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        super().__init__(seed, link)
        self.counts: dict[PeerId, Counts] = {}
        self.counted: frozenset[Purpose] = frozenset(Purpose)  # whose messages count
        self._refusing: set[PeerId] = set()
        self._on_death: list[Callable[[PeerId], None]] = []

    def start_peer(
        self,
        peer_id: PeerId,
        handler: StreamHandler,
        link: Link | None = None,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
        has_met: Callable[[PeerId], bool] = lambda partner: False,
    ) -> Any:
        def turns_away(partner: PeerId) -> bool:
            return peer_id in self._refusing or is_banned(partner)

        async def handle(purpose: Purpose, stream: Stream) -> None:
            scripted: Any = ScriptedStream(self, peer_id, purpose, stream)
            await handler(purpose, scripted)

        made = super().start_peer(peer_id, handle, link, caps, turns_away, has_met)
        self.counts[peer_id] = Counts()
        self._refusing.discard(peer_id)
        return ScriptedTransport(self, peer_id, made)

    def kill(self, peer_id: PeerId, *, is_delivered: bool = False) -> None:
        was_up = self.is_up(peer_id)
        super().kill(peer_id, is_delivered=is_delivered)
        for notify in self._on_death if was_up else ():
            notify(peer_id)

    def kill_at(self, peer_id: PeerId, *, sent: int | None = None, received: int | None = None, is_delivered: bool = False) -> None:
        """Kill a peer when it sends or receives its k-th message, counted since its start."""
        self.condemn(peer_id, Doom(sent, received, is_delivered))

    def condemn(self, peer_id: PeerId, doom: Doom) -> None:
        """Schedule a fault for a peer."""
        self.counts[peer_id].dooms.append(doom)

    def on_death(self, notify: Callable[[PeerId], None]) -> None:
        """Call `notify` when a peer is killed, before any of its code runs again, for example to cancel its tasks."""
        self._on_death.append(notify)

    def refuse(self, peer_id: PeerId, refuses: bool = True) -> None:
        """Make a peer reject every new stream, or accept streams again."""
        (self._refusing.add if refuses else self._refusing.discard)(peer_id)


class ScriptedTransport:
    def __init__(self, network: ScriptedNetwork, peer_id: PeerId, inner: Any) -> None:
        self._network, self._peer_id, self._inner = network, peer_id, inner

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Any:
        return ScriptedStream(self._network, self._peer_id, purpose, await self._inner.connect(partner, addresses, purpose))


class ScriptedStream:
    """A stream that counts its messages and triggers the faults."""

    def __init__(self, network: ScriptedNetwork, peer_id: PeerId, purpose: Purpose, inner: Stream) -> None:
        self._network, self._peer_id, self._inner = network, peer_id, inner
        self._counts = network.counts[peer_id] if purpose in network.counted else Counts()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, message: Message) -> None:
        self._counts.num_sent += 1
        doom = next((doom for doom in self._counts.dooms if doom.sent == self._counts.num_sent), None)
        if doom is None or doom.is_delivered:
            await self._inner.send(message)
        await self._strike(doom)

    async def receive(self) -> Message:
        message = await self._inner.receive()
        self._counts.num_received += 1
        await self._strike(next((doom for doom in self._counts.dooms if doom.received == self._counts.num_received), None))
        return message

    async def _strike(self, doom: Doom | None) -> None:
        match doom:
            case Doom(how="cut"):
                self._network.partition([self._peer_id])
            case Doom(how="closes"):
                self._inner.close()
                raise PeerGone("this peer has closed the stream")
            case Doom():
                self._network.kill(self._peer_id, is_delivered=doom.is_delivered)
                raise PeerGone("this peer has died")
