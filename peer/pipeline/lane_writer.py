"""What leaves on one lane: notices first, then hops in their order, as chunks. Notices come between the chunks of a hop.

Both queues are bounded: a partner that does not read cannot fill our memory. Files are mapped one hop at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.pipeline.commands import SendHop
from gossamer.protocol import limits
from gossamer.protocol.errors import TransportError
from gossamer.protocol.messages.messages import HopForward, HopNotice, NoticeKind, Part, Refusal, chunks
from gossamer.protocol.streams.transport import Stream
from gossamer.protocol.tasks import Changes

MOST_NOTICES = 256  # that wait, beside withdrawals of all hops of a lane at once: an honest partner reads them between two chunks


@dataclass(slots=True)
class LaneWriter:
    """Sends on one stream, in the task of `run`.

    `on_sent` gets each hop whose last byte has left, `on_lost` each whose files are not whole any more. `run` maps files
    when it begins to send them; then they may be removed.
    """

    stream: Stream
    payloads: PayloadFolder
    on_sent: Callable[[SendHop], None]
    on_lost: Callable[[SendHop], None]
    _hops: deque[SendHop] = field(default_factory=deque)
    _notices: deque[HopNotice | Refusal] = field(default_factory=deque)
    _current: SendHop | None = None
    _is_stopped: bool = False  # the current hop is withdrawn
    _num_withdrawn: int = 0  # of the notices that wait
    _changes: Changes = field(default_factory=Changes)

    @property
    def is_full(self) -> bool:
        """Whether more waits here than a partner that reads can cause."""
        most_notices = MOST_NOTICES + min(self._num_withdrawn, limits.WINDOW)
        return len(self._notices) > most_notices or len(self._hops) > limits.WINDOW

    def put(self, hop: SendHop) -> None:
        """Send a hop after those before it."""
        self._hops.append(hop)
        self._changes.notify()

    def notify(self, notice: HopNotice | Refusal) -> None:
        """Send a notice before the next chunk; a Refusal is the last message. A hop that is withdrawn stops here."""
        if isinstance(notice, HopNotice) and notice.notice is NoticeKind.WITHDRAWN:
            self._stop(notice.number)
            self._num_withdrawn += 1
        self._notices.append(notice)
        self._changes.notify()

    async def run(self) -> None:
        """Send until a Refusal is sent, or the stream ends."""
        try:
            while True:
                await self._changes.until(lambda: bool(self._notices or self._hops))
                if await self._send_notices():
                    return
                if self._hops:
                    self._current, self._is_stopped = self._hops.popleft(), False
                    if await self._send_hop(self._current):
                        return
                    self._current = None
        except TransportError:
            return  # the reader reports it

    def _stop(self, number: int) -> None:
        is_of = [hop for hop in self._hops if isinstance(hop.message, HopForward) and hop.message.number == number]
        for hop in is_of:
            self._hops.remove(hop)
        if self._current is not None and isinstance(self._current.message, HopForward) and self._current.message.number == number:
            self._is_stopped = True

    async def _send_hop(self, hop: SendHop) -> bool:
        """Send a hop up to its end, or to its withdrawal; return whether a Refusal ended the lane."""
        parts = self._mapped(hop)
        if parts is None:
            self.on_lost(hop)
            return False
        await self.stream.send(hop.message)
        for part, data in parts:
            for chunk in chunks(part, data):
                if await self._send_notices():
                    return True
                if self._is_stopped:
                    return False
                await self.stream.send_chunk(chunk)
        self.on_sent(hop)
        return False

    def _mapped(self, hop: SendHop) -> list[tuple[Part, memoryview]] | None:
        """Map the files of a hop; None if one has another size, was removed with its trainer, or cannot be opened."""
        try:
            parts = [(part, self.payloads.read(file)) for part, file, _ in hop.files]
        except OSError:  # too many open files, or too little memory to map
            return None
        is_whole = all(len(data) == num_bytes for (_, data), (_, _, num_bytes) in zip(parts, hop.files, strict=True))
        return parts if is_whole else None

    async def _send_notices(self) -> bool:
        """Send what is urgent; return whether a Refusal ended the lane."""
        while self._notices:
            notice = self._notices.popleft()
            self._num_withdrawn -= isinstance(notice, HopNotice) and notice.notice is NoticeKind.WITHDRAWN
            await self.stream.send(notice)
            if isinstance(notice, Refusal):
                return True
        return False
