"""One stream between two peers in memory: two ends, two ways, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.errors import PeerGone
from protocol.identity import PeerId
from protocol.memory.link import Doom, Line, Way
from protocol.streams.transport import Stream

Struck = Callable[[PeerId, Doom], None]


class Conversation:
    """Both ends of a stream; `peers` and `lines` are the opener's and the other's. `struck` is told whom a doom has hit."""

    def __init__(self, peers: tuple[PeerId, PeerId], lines: tuple[Line, Line], draw: Callable[[], float], struck: Struck) -> None:
        self.peers = peers
        self._lines = lines
        self._struck = struck
        self.ways = (Way(lines[0], lines[1], draw), Way(lines[1], lines[0], draw))
        self.streams = (self._stream(0), self._stream(1))
        self._over: list[Callable[[], None] | None] = [None, None]
        self._silence: asyncio.TimerHandle | None = None

    def _stream(self, side: int) -> Stream:
        inbox = self.ways[1 - side].inbox

        async def write(frame: bytes) -> None:
            await self.ways[side].room()
            if inbox.ended is None:
                self.carry(side, frame)
            if inbox.ended is not None:  # the message may have been this peer's last
                raise PeerGone(inbox.ended)

        return Stream(self.peers[1 - side], "memory", inbox, write, lambda _: self.say_goodbye(side))

    def round_trip_s(self) -> float:
        """Return how long a question and its answer take, this time."""
        return self.ways[0].delay_s() + self.ways[1].delay_s()

    def on_over(self, side: int, forget: Callable[[], None]) -> None:
        """Have `forget` called once this side is closed or dead."""
        self._over[side] = forget

    def carry(self, side: int, frame: bytes) -> None:
        """Send a frame from one side, and let die whose hour it is."""
        doom = self._lines[side].doom_at_send()
        if doom is None or doom.is_delivered:
            self.ways[side].send(len(frame), lambda: self._arrive(1 - side, frame))
        if doom is not None:
            self._struck(self.peers[side], doom)

    def say_goodbye(self, side: int) -> None:
        """Tell the other side, after all that was sent, that this one has closed."""
        if self._leave(side):
            self.ways[side].send(0, lambda: self.ways[side].inbox.end("the partner closed the stream"))

    def die(self, peer_id: PeerId, *, is_delivered: bool) -> None:
        """End this peer's side without a word; the other side finds out when the line tells it."""
        side = self.peers.index(peer_id)
        self.ways[1 - side].inbox.end("this peer has died")
        self.ways[1 - side].lose()
        if not is_delivered:
            self.ways[side].lose()
        if self._leave(side):
            self.ways[side].send(0, lambda: self.ways[side].inbox.end("the partner has gone"))

    def set_cut(self, is_cut: bool) -> None:
        """Cut the line, or mend it. After the silence that keep-alive allows, both sides give up."""
        if is_cut == (self._silence is not None):
            return
        for way in self.ways:
            way.set_cut(is_cut)
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        else:
            silence_s = min(line.link.silence_s for line in self._lines)
            self._silence = asyncio.get_running_loop().call_later(silence_s, self._give_up)

    def _give_up(self) -> None:
        for way in self.ways:
            way.lose()
            way.inbox.end("nothing was heard from the partner for too long")

    def _arrive(self, side: int, frame: bytes) -> None:
        if self.ways[1 - side].inbox.ended is not None:
            return
        doom = self._lines[side].doom_at_receive()
        if doom is not None:
            self._struck(self.peers[side], doom)
        else:
            self.ways[1 - side].inbox.put(frame)

    def _leave(self, side: int) -> bool:
        forget, self._over[side] = self._over[side], None
        if forget is not None:
            forget()
        return forget is not None
