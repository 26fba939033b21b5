"""The driver of one holder's hops: it feeds the carrier events of the lanes, the trainer and the clock, and carries out its commands.

Each lane has one reader task and one writer task. The carrier handles a message before the next one is read, so a fast partner is slowed
down and cannot fill our memory.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.link.messages import HopRequest
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.pipeline import commands, events
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.pipeline.commands import CloseLane
from gossamer.peer.pipeline.lane import DownLane, UpLane
from gossamer.peer.pipeline.lane_writer import LaneWriter
from gossamer.protocol.errors import PeerMisbehaved, RefusalCode, Refused, TransportError
from gossamer.protocol.limits import REFUSAL_DETAIL_CHARS
from gossamer.protocol.messages.messages import HopAnswer, HopForward, Refusal
from gossamer.protocol.streams.transport import Stream
from gossamer.protocol.tasks import Changes, cancel, loop_s, spawn

FLUSH_S = 2.0  # for the last frames to leave before a stream is closed


@dataclass(slots=True)
class OpenLane:
    """A lane while its stream is open."""

    lane: UpLane | DownLane
    writer: LaneWriter
    end: asyncio.Future[CloseLane]  # set when this side ends it
    writing: asyncio.Task[None]  # ends with the stream, or when this side's last message has left


@dataclass(slots=True)
class Pipeline:
    """Carries the hops of one holder. Belongs to one event loop. `close` ends what it has started.

    `on_report` gets each hop that is over, `on_compared` what answers to one micro-batch say of partners, `on_opposed` what micro-batches
    say of their partner, `on_clock` each global step that a neighbour tells, with the lane. `changes` notifies after each event.
    """

    carrier: Carrier
    link: NodeEnd
    payloads: PayloadFolder
    on_report: Callable[[commands.HopOver], None]
    on_clock: Callable[[OpenLane, int], None]
    on_compared: Callable[[commands.AnswersCompared], None]
    on_opposed: Callable[[commands.SourceOpposed], None]
    changes: Changes = field(default_factory=Changes)
    lanes: dict[int, OpenLane] = field(default_factory=dict)
    _streams: list[Stream] = field(default_factory=list)  # of all lanes whose last message has not left
    _ended_bytes: tuple[int, int] = (0, 0)  # sent and received on other lanes
    _events: deque[events.Event] = field(default_factory=deque)
    _is_handling: bool = False
    _timer: asyncio.TimerHandle | None = None
    _due_s: float = math.inf
    _asking: set[asyncio.Task[None]] = field(default_factory=set)
    _bug: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def run(self) -> None:
        """Wait until cancelled, then end every lane. Raises our own bugs."""
        try:
            await self._bug
        finally:
            await self.close()

    async def close(self) -> None:
        """Drop every hop and lane at once."""
        for open_lane in list(self.lanes.values()):
            self.end_lane(open_lane, "leaving")
        if self._timer is not None:
            self._timer.cancel()
        await cancel(*self._asking)

    def carried_bytes(self) -> tuple[int, int]:
        """Return the bytes that were sent and received on all lanes."""
        sent, received = self._ended_bytes
        return sent + sum(one.bytes_sent for one in self._streams), received + sum(one.bytes_received for one in self._streams)

    def wake(self) -> None:
        """Look again at what may begin: the trainer or the run has changed."""
        self.handle(events.TimePassed())

    def stop(self) -> None:
        """Begin no hop and accept none any more; those under way are answered."""
        self.handle(events.HopsStopped())

    def rest(self, reason: str, *, is_over: bool = False) -> None:
        """End every hop and lane for now: neighbours look elsewhere. `is_over`: for good, at the end of the run."""
        for open_lane in list(self.lanes.values()):
            self.end_lane(open_lane, reason, is_over=is_over)
        self.handle(events.HopsStopped(is_final=False))

    def end_lane(self, open_lane: OpenLane, reason: str, *, is_over: bool = False) -> None:
        """End a lane for a reason of our own; its hops are withdrawn, or tried elsewhere."""
        self.handle(events.LaneGone(open_lane.lane.number))
        self._end(CloseLane(open_lane.lane.number, reason, is_over=is_over))

    async def carry(self, stream: Stream, lane: UpLane | DownLane) -> CloseLane:
        """Carry hops on a lane, whose sides have greeted each other, until it ends; return why. Cancel-safe. Closes the stream."""
        number = lane.number
        writer = LaneWriter(stream, self.payloads, self._on_sent, self._on_lost)
        own_end: asyncio.Future[CloseLane] = asyncio.get_running_loop().create_future()
        reading, writing = asyncio.create_task(self._read(number, stream)), asyncio.create_task(writer.run())
        self.lanes[number] = OpenLane(lane, writer, own_end, writing)
        self._streams.append(stream)
        try:
            self.handle(events.LaneOpened(lane))
            await asyncio.wait((reading, own_end), return_when=asyncio.FIRST_COMPLETED)
            if not own_end.done():
                return reading.result()
            await asyncio.wait((writing,), timeout=FLUSH_S)  # its last message says why
            return own_end.result()
        finally:
            self.lanes.pop(number, None)
            self.handle(events.LaneGone(number))
            await cancel(reading, writing)
            self._streams.remove(stream)
            sent, received = self._ended_bytes
            self._ended_bytes = sent + stream.bytes_sent, received + stream.bytes_received
            stream.close()

    async def _read(self, number: int, stream: Stream) -> CloseLane:
        try:
            while True:
                message = await stream.receive()
                if isinstance(message, Refusal):
                    return CloseLane(number, f"{message.code.name}: {message.detail}", is_over=message.code is RefusalCode.WRONG_PHASE)
                if isinstance(message, HopForward):
                    self.carrier.free_bytes = self.payloads.free_bytes()
                self.handle(events.LaneSaid(number, message))
        except (TransportError, Refused) as error:  # Refused: a kind of message that we do not know
            return CloseLane(number, str(error))
        except PeerMisbehaved as error:
            return CloseLane(number, str(error), error)

    # ------------------------------------------------------------------ events

    def handle(self, event: events.Event) -> None:
        """Take in an event now, or after the one that is being handled."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for command in self.carrier.handle(self._events.popleft(), loop_s()):
                    self._carry_out(command)
        except Exception as bug:
            if not self._bug.done():
                self._bug.set_exception(bug)
        finally:
            self._is_handling = False
        self._set_timer()
        self.changes.notify()

    def _set_timer(self) -> None:
        due_s = self.carrier.next_s
        if due_s == self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = due_s, None
        if due_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._on_time)

    def _on_time(self) -> None:
        self._due_s, self._timer = math.inf, None
        self.handle(events.TimePassed())

    def _on_sent(self, sent: commands.SendHop) -> None:
        if isinstance(sent.message, HopAnswer):
            self.handle(events.HopSent(sent.hop))

    def _on_lost(self, lost: commands.SendHop) -> None:
        self.handle(events.FileLost(lost.hop))

    # ------------------------------------------------------------------ commands

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.AskForHop(request):
                spawn(self._ask(request), self._asking, f"hop {request.hop}")
            case commands.SendHop(lane):
                if lane in self.lanes:
                    self.lanes[lane].writer.put(command)
                    self._end_if_full(lane)
            case commands.SendNotice(lane, notice):
                if lane in self.lanes:
                    self.lanes[lane].writer.notify(notice)
                    self._end_if_full(lane)
            case commands.StoreChunk():
                self._store(command)
            case commands.RemoveHop(hop):
                self.payloads.remove_hop(hop)
            case commands.CloseLane():
                self._end(command)
            case commands.HearClock(lane, global_step):
                if lane in self.lanes:
                    self.on_clock(self.lanes[lane], global_step)
            case commands.HopOver():
                self.on_report(command)
            case commands.AnswersCompared():
                self.on_compared(command)
            case commands.SourceOpposed():
                self.on_opposed(command)

    def _end_if_full(self, lane: int) -> None:
        """End a lane whose partner does not read."""
        if self.lanes[lane].writer.is_full:
            self._events.append(events.LaneGone(lane))
            self._end(CloseLane(lane, "nothing of what waits is read", silent_s=FLUSH_S))

    def _store(self, chunk: commands.StoreChunk) -> None:
        try:
            if chunk.is_first:
                self.payloads.remove(chunk.file)
            self.payloads.append(chunk.file, chunk.data)
        except OSError:  # the disk is full
            self._events.append(events.FileLost(chunk.hop))

    def _end(self, close: CloseLane) -> None:
        """Tell the partner why, and have `carry` return."""
        open_lane = self.lanes.pop(close.lane, None)
        if open_lane is None or open_lane.end.done():
            return
        code = RefusalCode.BAD_MESSAGE if close.fault else RefusalCode.TOO_SLOW if close.silent_s else RefusalCode.NOT_READY
        code = RefusalCode.WRONG_PHASE if close.is_over else code
        open_lane.writer.notify(Refusal(code, close.reason[:REFUSAL_DETAIL_CHARS]))
        open_lane.end.set_result(close)

    async def _ask(self, request: HopRequest) -> None:
        try:
            reply = await self.link.pass_hop(request)
        except LinkLost:
            self.handle(events.HopLost(request.hop))
        else:
            self.handle(events.TrainerReplied(reply))
