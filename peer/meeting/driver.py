"""The driver of one meeting: it feeds the machine events of the stream, the trainer, the disk and the clock, and carries out its commands.

One writer task sends frames and bulk parts in the order of the commands. One reader task receives frames, at most FRAMES_AHEAD ahead of the
machine: a fast partner is slowed down and cannot fill our memory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from gossamer.peer.link.messages import Drop, File, MeetingRequest, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.meeting import commands, events
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.meeting.line import Exchange, Line
from gossamer.peer.meeting.machine import Meeting
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Commit, Committed, Message, Outcome, Part, Resolve, chunks
from gossamer.protocol.streams.transport import Purpose, Stream, Transport
from gossamer.protocol.tasks import cancel, loop_s

FRAMES_AHEAD = 16  # received frames that the machine has not handled yet: 4 MiB at most
TRY_S = 5.0  # for one Resolve and its Outcome
PAUSE_S = 0.5  # between two of them
FLUSH_S = 2.0  # time for the last frames to leave before the stream is closed

_OWN_FILES = {Part.SKETCH: File.OWN_SKETCH, Part.PAYLOAD: File.OWN_PAYLOAD}
_PARTNER_FILES = {Part.SKETCH: File.PARTNER_SKETCH, Part.PAYLOAD: File.PARTNER_PAYLOAD}


@dataclass(frozen=True, slots=True)
class OwnSide:
    """What a meeting uses on this side: the trainer's link, the folder shared with it, the journal, the line."""

    link: NodeEnd
    payloads: PayloadFolder
    journal: Journal
    line: Line = field(default_factory=Line)


@dataclass(frozen=True, slots=True)
class Caller:
    """Opens streams to partners in one run: for a meeting, or to ask for a decision."""

    transport: Transport
    book: AddressBook
    run_id: bytes

    async def connect(self, partner: PeerId) -> Stream:
        """Open a stream. Raises TransportError."""
        return await self.transport.connect(partner, self.book.get(partner).addresses, Purpose.MEET)

    async def ask(self, partner: PeerId, meeting_id: bytes) -> Outcome:
        """Ask for the outcome of a meeting until the partner answers. The caller bounds it by cancellation."""
        while True:
            try:
                async with asyncio.timeout(TRY_S):
                    return await self._ask_once(partner, Resolve(self.run_id, meeting_id))
            except (TransportError, PeerMisbehaved, Refused, TimeoutError):
                await asyncio.sleep(PAUSE_S)

    async def _ask_once(self, partner: PeerId, question: Resolve) -> Outcome:
        stream = await self.connect(partner)
        try:
            await stream.send(question)
            answer = await stream.receive()
        finally:
            stream.close()
        if not isinstance(answer, Outcome) or answer.meeting_id != question.meeting_id:
            raise BadMessage(f"asked for an outcome, got {type(answer).__name__}")
        return answer


class Driver:
    """Runs one meeting: make one per meeting, call `run` once. `stream` is the responder's; None on the initiator's side."""

    def __init__(self, meeting: Meeting, stream: Stream | None, own: OwnSide, caller: Caller) -> None:
        self.meeting = meeting
        self.stream = stream  # on the initiator's side: once it is open
        self.written = asyncio.Event()  # the decision is on disk, or could not be written
        self.over = asyncio.Event()  # `run` has ended
        self._received_s = loop_s()  # when the partner last sent a frame, or we began to connect to it
        self.round_trip_s = math.nan  # from our Commit to the partner's Committed: both directions and its disk
        self._committed_s = math.nan
        self._own = own
        self._caller = caller
        self._events: asyncio.Queue[events.Event | BaseException] = asyncio.Queue()
        self._outgoing: asyncio.Queue[Message | Part | None] = asyncio.Queue()
        self._frames_ahead = asyncio.Semaphore(FRAMES_AHEAD)
        self._writing: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = events.DeadlinePassed()  # of the timer that is running
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def silent_s(self) -> float:
        """How long the partner has sent nothing."""
        return loop_s() - self._received_s

    def stop(self, reason: str, code: RefusalCode) -> None:
        """End the meeting and send the partner `code`. A meeting that may already count ends by itself instead."""
        self._events.put_nowait(events.Stopped(reason, code))

    async def run(self) -> commands.Finish:
        """Run the meeting to its end, close the stream, and return how it ended.

        Cancel-safe: an undecided meeting is dropped on this side, a decided one is applied; the stream is closed. Raises only our own bugs.
        """
        try:
            if self.stream is not None:
                self._start_streaming(self.stream)
            self._events.put_nowait(events.Started())
            finish = await self._until_finish()
            self._outgoing.put_nowait(None)
            if self._writing is not None:
                await asyncio.wait([self._writing], timeout=FLUSH_S)
            return finish
        finally:
            self._release()
            await self._clean_up()

    async def _until_finish(self) -> commands.Finish:
        while True:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, events.DeadlinePassed) and event is not self._deadline:
                continue  # a timer that expired just before the event in front of it set another
            if isinstance(event, events.PartnerSent):
                self._received_s = loop_s()
                if isinstance(event.message, Committed):
                    self.round_trip_s = loop_s() - self._committed_s
                self._frames_ahead.release()
                if self._exchange is not None:
                    self._exchange.received(event.message)
            if (finish := await self._handle(event)) is not None:
                return finish

    async def _handle(self, event: events.Event) -> commands.Finish | None:
        for command in self.meeting.handle(event):
            if isinstance(command, commands.Finish):
                return command
            await self._carry_out(command)
        return None

    async def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.Connect():
                self._spawn(self._connect())
            case commands.Send(message):
                if isinstance(message, Commit):
                    self._committed_s = loop_s()
                self._outgoing.put_nowait(message)
            case commands.SendPart(part):
                if part is Part.PAYLOAD:
                    self._exchange = Exchange(self._own.line, self.meeting.greeting.fragment_terms.payload_bytes)
                self._outgoing.put_nowait(part)
            case commands.Store(part, data):
                self._store(part, data)
            case commands.AskTrainer(request):
                self._spawn(self._ask_trainer(request))
                await asyncio.sleep(0)  # the request must be sent before a later Drop, and Apply before Commit
            case commands.WriteJournal(meeting_id, failed_blocks):
                await self._write_down(meeting_id, failed_blocks)
            case commands.SetTimer(seconds):
                self._allow(seconds)
            case commands.AskDecision(meeting_id):
                self._spawn(self._ask_again(meeting_id))
            case commands.DropMeeting():
                self._own.link.notify(Drop(self.meeting.number))

    def _store(self, part: Part, data: bytes) -> None:
        try:
            self._own.payloads.append(payload_name(self.meeting.number, _PARTNER_FILES[part]), data)
        except OSError as error:
            self.stop(f"cannot store the partner's payload: {error.strerror}", RefusalCode.NOT_READY)

    async def _write_down(self, meeting_id: bytes, failed_blocks: bytes) -> None:
        """Write the decision. A cancellation is delayed until the disk is done and Apply is sent: a written decision counts."""
        writing = asyncio.create_task(self._own.journal.commit(meeting_id, failed_blocks))
        cancelled: asyncio.CancelledError | None = None
        while not writing.done():
            try:
                await asyncio.wait([writing])
            except asyncio.CancelledError as error:
                cancelled = error
        self.written.set()
        try:
            writing.result()
            event: events.Event = events.Journaled()
        except OSError as error:
            event = events.NotJournaled(error.strerror or str(error))
        if cancelled is None:
            self._events.put_nowait(event)
            return
        await self._handle(event)
        raise cancelled

    def _allow(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = events.DeadlinePassed()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._events.put_nowait, self._deadline)

    # ------------------------------------------------------------------ tasks

    async def _ask_trainer(self, request: MeetingRequest) -> None:
        try:
            self._events.put_nowait(events.TrainerAnswered(await self._own.link.request(request)))
        except LinkLost:
            self._events.put_nowait(events.TrainerGone())

    async def _ask_again(self, meeting_id: bytes) -> None:
        self._events.put_nowait(events.Resolved(await self._caller.ask(self.meeting.partner, meeting_id)))

    async def _connect(self) -> None:
        self._received_s = loop_s()
        try:
            self.stream = await self._caller.connect(self.meeting.partner)
        except TransportError:
            self._events.put_nowait(events.PartnerGone())
        else:
            self._received_s = loop_s()
            self._events.put_nowait(events.Connected())
            self._start_streaming(self.stream)

    def _start_streaming(self, stream: Stream) -> None:
        self._spawn(self._read(stream))
        self._writing = self._spawn(self._write(stream))

    async def _read(self, stream: Stream) -> None:
        try:
            while True:
                await self._frames_ahead.acquire()
                self._events.put_nowait(events.PartnerSent(await stream.receive()))
        except (TransportError, Refused):  # Refused: a kind of message that we do not know
            self._events.put_nowait(events.PartnerGone())
        except PeerMisbehaved as error:
            self._events.put_nowait(events.PartnerMalformed(error))

    async def _write(self, stream: Stream) -> None:
        try:
            while (item := await self._outgoing.get()) is not None:
                if isinstance(item, Part):
                    await self._write_part(stream, item)
                else:
                    await stream.send(item)
        except TransportError:
            return  # the reader reports it

    async def _write_part(self, stream: Stream, part: Part) -> None:
        data = self._own.payloads.read(payload_name(self.meeting.number, _OWN_FILES[part]))
        for chunk in chunks(part, data):
            if self.meeting.finish is not None:
                return  # what follows is a Refusal
            await stream.send(chunk)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._events.put_nowait(bug)

    # ------------------------------------------------------------------ ending

    def _release(self) -> None:
        """Release what needs no waiting, so that it is done even if the rest of the cleanup fails."""
        if self._timer is not None:
            self._timer.cancel()
        if self._exchange is not None:
            self._exchange.end()
        if self.meeting.finish is None:
            self._own.link.notify(Drop(self.meeting.number))
        self._own.payloads.remove_meeting(self.meeting.number)

    async def _clean_up(self) -> None:
        try:
            await cancel(*self._tasks)
        finally:
            if self.stream is not None:
                self.stream.close()
            self.over.set()
