"""A network in memory that follows a test's script: a peer dies at its k-th message, refuses streams for a while, and somebody is told."""

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
    """What happens to a peer at its k-th message, counted over all its streams since it came up."""

    sent: int | None = None  # when it sends its k-th message
    received: int | None = None  # when it takes its k-th message, unread
    is_delivered: bool = False  # what it had sent still arrives; otherwise what is under way is lost, the k-th too
    how: str = "dies"  # or its line is "cut", or it "closes" that stream


@dataclass(slots=True)
class Counts:
    """The messages of one life."""

    num_sent: int = 0
    num_received: int = 0
    dooms: list[Doom] = field(default_factory=list)


class ScriptedNetwork(KnowingNetwork):
    """The network, and the script that its peers follow."""

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        super().__init__(seed, link)
        self.counts: dict[PeerId, Counts] = {}
        self.counted: frozenset[Purpose] = frozenset(Purpose)  # whose messages count
        self._refusing: set[PeerId] = set()
        self._on_death: list[Callable[[PeerId], None]] = []

    def transport(
        self,
        peer_id: PeerId,
        handler: StreamHandler,
        link: Link | None = None,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
    ) -> Any:
        def turns_away(partner: PeerId) -> bool:
            return peer_id in self._refusing or is_banned(partner)

        async def handle(purpose: Purpose, stream: Stream) -> None:
            scripted: Any = ScriptedStream(self, peer_id, purpose, stream)
            await handler(purpose, scripted)

        made = super().transport(peer_id, handle, link, caps, turns_away)
        self.counts[peer_id] = Counts()
        self._refusing.discard(peer_id)
        return ScriptedTransport(self, peer_id, made)

    def kill(self, peer_id: PeerId, *, is_delivered: bool = False) -> None:
        was_up = self.is_up(peer_id)
        super().kill(peer_id, is_delivered=is_delivered)
        for tell in self._on_death if was_up else ():
            tell(peer_id)

    def kill_at(self, peer_id: PeerId, *, sent: int | None = None, received: int | None = None, is_delivered: bool = False) -> None:
        """Kill a peer when it sends its k-th message, or takes its k-th; counted from when it came up."""
        self.condemn(peer_id, Doom(sent, received, is_delivered))

    def condemn(self, peer_id: PeerId, doom: Doom) -> None:
        """Have it happen to a peer."""
        self.counts[peer_id].dooms.append(doom)

    def on_death(self, tell: Callable[[PeerId], None]) -> None:
        """Have `tell` called when a peer is killed, before anything else of it runs: to cancel its tasks."""
        self._on_death.append(tell)

    def refuse(self, peer_id: PeerId, refuses: bool = True) -> None:
        """Have a peer turn away every new stream, or accept them again."""
        (self._refusing.add if refuses else self._refusing.discard)(peer_id)


class ScriptedTransport:
    def __init__(self, network: ScriptedNetwork, peer_id: PeerId, inner: Any) -> None:
        self._network, self._peer_id, self._inner = network, peer_id, inner

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Any:
        return ScriptedStream(self._network, self._peer_id, purpose, await self._inner.connect(partner, addresses, purpose))


class ScriptedStream:
    """A stream whose messages count."""

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
                await self._inner.close()
                raise PeerGone("this peer has closed the stream")
            case Doom():
                self._network.kill(self._peer_id, is_delivered=doom.is_delivered)
                raise PeerGone("this peer has died")
