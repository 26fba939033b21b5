"""Two meeting machines without I/O: each receives what the other sends, in the order that the test chooses.

Each seat has a scripted trainer, a disk, and a line to the other seat that can be cut.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from dataclasses import dataclass, field

from gossamer.peer.link.messages import (
    Applied,
    Apply,
    Check,
    Checked,
    Encode,
    Open,
    Opened,
    PayloadReady,
    Prepare,
    Reply,
    Request,
    SketchReady,
)
from gossamer.peer.meeting.commands import (
    AskDecision,
    AskTrainer,
    Command,
    Connect,
    DropMeeting,
    Finish,
    Send,
    SendPart,
    SetTimer,
    Store,
    WriteJournal,
)
from gossamer.peer.meeting.events import (
    Connected,
    Event,
    Journaled,
    NotJournaled,
    PartnerGone,
    PartnerSent,
    Started,
    Stopped,
    TrainerAnswered,
    TrainerGone,
)
from gossamer.peer.meeting.interface import Greeting, MeetingOutcome, MeetingState
from gossamer.peer.meeting.machine import Meeting
from gossamer.peer.swarm.membership import Membership, OwnCredential
from gossamer.peer.swarm.partner_records import Trust
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Chunk, Hello, Message, Outcome, Part, RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, RunTerms

SEEDS = (b"\x01" * 32, b"\x02" * 32)
RUN_ID = hashlib.sha256(b"the run").digest()
PLAIN, SKETCHED = 0, 1  # fragments: without a sketch state, and with one
TERMS = RunTerms(
    run_id=RUN_ID,
    codec_id=16,
    fragments=(FragmentTerms(0, 1000, 0), FragmentTerms(64, 900, 20)),
    state_bytes=800,
    access="open",
    issuers=frozenset(),
    members=frozenset(),
    max_clock_gap_steps=200,
)
CHUNK_BYTES = 400
DEADLINE_S = 30.0
NOW_S = 1_800_000_000.0


def membership(identity: Identity) -> Membership:
    return Membership(identity, TERMS, OwnCredential(), total_steps=100_000, deadline_s=DEADLINE_S, defer=False)


@dataclass
class Trainer:
    """Replies as an ordinary trainer does, except for the `replies` by type of request."""

    name: bytes
    fragment: int
    tokens: int = 640
    global_step: int = 100
    phase: RunPhase = RunPhase.TRAIN
    failed_blocks: str = ""
    replies: dict[type, Reply] = field(default_factory=dict)
    asked: list[Request] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)

    def payload(self, part: Part) -> bytes:
        sizes = TERMS.fragments[self.fragment]
        num_bytes = sizes.sketch_bytes if part is Part.SKETCH else sizes.payload_bytes
        return (self.name * num_bytes)[:num_bytes]

    def reply(self, request: Request) -> Reply:
        self.asked.append(request)
        if type(request) in self.replies:
            return self.replies[type(request)]
        match request:
            case Open(number):
                return Opened(number, self.tokens, self.global_step, self.phase)
            case Prepare(number) if TERMS.fragments[self.fragment].sketch_bytes:
                return SketchReady(number, hashlib.sha256(self.payload(Part.SKETCH)).hexdigest())
            case Prepare(number) | Encode(number):
                return PayloadReady(number, hashlib.sha256(self.payload(Part.PAYLOAD)).hexdigest())
            case Check(number):
                return Checked(number, True, "", self.failed_blocks)
            case Apply(number, meeting_id):
                self.applied.append(meeting_id)
                return Applied(number)
        raise AssertionError(request)


class Seat:
    """One side: the machine, its trainer, its disk, the events that wait for it, and its commands."""

    def __init__(self, number: int, greeting: Greeting, trainer: Trainer) -> None:
        self.meeting = Meeting(number, greeting)
        self.trainer = trainer
        self.trainer_is_there = True
        self.disk_is_full = False
        self.waiting: deque[Event] = deque([Started()])  # own events that have not been fed yet
        self.incoming: deque[Message] = deque()  # what the line has not delivered yet
        self.line_is_cut = False
        self.other: Seat | None = None
        self.journal: dict[bytes, bytes] = {}
        self.stored: dict[Part, bytes] = {Part.SKETCH: b"", Part.PAYLOAD: b""}
        self.sent: list[Message] = []
        self.commands: list[Command] = []
        self.asks_again = False
        self.num_drops = 0
        self.finish: Finish | None = None

    def feed(self, event: Event) -> list[Command]:
        """Feed the machine one event and carry out its commands."""
        commands = self.meeting.handle(event)
        self.commands += commands
        for command in commands:
            assert self.finish is None, "a command after the end"
            self._carry_out(command)
        return commands

    def deliver(self) -> None:
        """Deliver the next message from the partner."""
        self.feed(PartnerSent(self.incoming.popleft()))

    def _carry_out(self, command: Command) -> None:
        match command:
            case AskTrainer(request):
                answer = TrainerAnswered(self.trainer.reply(request)) if self.trainer_is_there else TrainerGone()
                self.waiting.append(answer)
            case Connect():
                self.waiting.append(Connected())
            case Send(message):
                self._send(message)
            case SendPart(part):
                data = self.trainer.payload(part)
                for offset in range(0, len(data), CHUNK_BYTES):
                    self._send(Chunk(part, offset, data[offset : offset + CHUNK_BYTES]))
            case Store(part, data):
                self.stored[part] += data
            case WriteJournal(meeting_id, failed_blocks):
                if self.disk_is_full:
                    self.waiting.append(NotJournaled("no space left"))
                else:
                    self.journal[meeting_id] = failed_blocks
                    self.waiting.append(Journaled())
            case AskDecision():
                self.asks_again = True
            case DropMeeting():
                self.num_drops += 1
            case Finish():
                self.finish = command
            case SetTimer(seconds):
                assert seconds > 0

    def _send(self, message: Message) -> None:
        self.sent.append(message)
        if self.other is not None and not self.line_is_cut:
            self.other.incoming.append(message)

    def outcome(self, meeting_id: bytes) -> Outcome:
        """Answer Resolve as a node does."""
        if self.meeting.pairing.meeting_id == meeting_id and not self.meeting.is_decided and self.finish is None:
            self.feed(Stopped("the partner lost the stream", RefusalCode.TOO_SLOW))
        failed_blocks = self.journal.get(meeting_id)
        if failed_blocks is None:
            return Outcome(meeting_id, False)
        return Outcome(meeting_id, True, failed_blocks)

    @property
    def over(self) -> MeetingOutcome:
        assert self.finish is not None
        return self.finish.outcome

    @property
    def state(self) -> MeetingState:
        return self.meeting.state


class Table:
    """Both seats. The responder's machine exists once the initiator's Hello has arrived."""

    def __init__(
        self,
        fragment: int = PLAIN,
        *,
        trainers: tuple[Trainer, Trainer] | None = None,
        timeout_s: float = math.inf,
        trust: tuple[Trust, Trust] = (Trust(), Trust()),
    ) -> None:
        self.fragment = fragment
        self.timeout_s = timeout_s
        self.trust = trust
        self.identities = (Identity(SEEDS[0]), Identity(SEEDS[1]))
        self.trainers = trainers or (Trainer(b"a", fragment), Trainer(b"b", fragment))
        them = self.identities[1].peer_id
        greeting = Greeting(membership(self.identities[0]), them, fragment, b"n" * 16, NOW_S, timeout_s=timeout_s, trust=trust[0])
        self.initiator = Seat(1, greeting, self.trainers[0])
        self.responder: Seat | None = None

    def greet(self) -> Seat:
        """Run the initiator up to its Hello, and seat the responder with it."""
        while not self.initiator.sent:
            self.initiator.feed(self.initiator.waiting.popleft())
        hello = self.initiator.sent[0]
        assert isinstance(hello, Hello)
        me, partner = self.identities[1], self.identities[0].peer_id
        timeout_s, trust = self.timeout_s, self.trust[1]
        greeting = Greeting(membership(me), partner, self.fragment, b"p" * 16, NOW_S, hello, timeout_s=timeout_s, trust=trust)
        self.responder = Seat(2, greeting, self.trainers[1])
        self.initiator.other, self.responder.other = self.responder, self.initiator
        return self.responder

    def seats(self) -> tuple[Seat, Seat]:
        return self.initiator, self.responder or self.greet()

    def run(self, *, until: MeetingState | None = None) -> tuple[Seat, Seat]:
        """Alternate between both sides until nothing is left to do, or the responder is in this state."""
        seats = self.seats()
        while any(seat.waiting or seat.incoming for seat in seats):
            for seat in seats:
                if until is not None and seats[1].state is until:
                    return seats
                if seat.waiting:
                    seat.feed(seat.waiting.popleft())
                elif seat.incoming:
                    seat.deliver()
        return seats


def alone(
    state: MeetingState, fragment: int = SKETCHED, *, initiates: bool = True, timeout_s: float = math.inf, failed_blocks: str = ""
) -> Seat:
    """Return one side of a meeting in this state, disconnected from its partner: the test is the partner now.

    `failed_blocks`: the bitmap, in hex, that both trainers report.
    """
    trainers = Trainer(b"a", fragment, failed_blocks=failed_blocks), Trainer(b"b", fragment, failed_blocks=failed_blocks)
    table = Table(fragment, trainers=trainers, timeout_s=timeout_s)
    if initiates and state in (MeetingState.OPENING, MeetingState.CONNECTING, MeetingState.GREETING):
        while table.initiator.state is not state:
            table.initiator.feed(table.initiator.waiting.popleft())
        return table.initiator
    table.greet()
    seat = table.seats()[0 if initiates else 1]
    _walk(table, seat, state)
    seat.waiting.clear()
    seat.incoming.clear()
    seat.other = None
    seat.sent.clear()
    return seat


def _walk(table: Table, seat: Seat, state: MeetingState) -> None:
    """Let the seat go as far as it can before the other one moves, so that it passes through every state."""
    other = table.seats()[1] if seat is table.initiator else table.initiator
    for _ in range(1000):
        if seat.state is state:
            return
        if seat.state is MeetingState.AWAITING_DECISION and state is MeetingState.IN_DOUBT:
            seat.feed(PartnerGone())
        elif seat.waiting:
            seat.feed(seat.waiting.popleft())
        elif seat.incoming:
            seat.deliver()
        elif other.waiting:
            other.feed(other.waiting.popleft())
        elif other.incoming:
            other.deliver()
    raise AssertionError(f"never in {state}")
