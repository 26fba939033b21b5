"""The meetings of one node: at most one per fragment at a time, begun by us or by the partner, with what each teaches the address book.

Who is asked when a fragment is due: peer/node/partner_search.py. How a single meeting goes: peer/meeting/machine.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from peer.link import records as ask
from peer.machine.events import MeetingDone
from peer.meeting.driver import Driver, Tools
from peer.meeting.hello import Greeting
from peer.meeting.machine import Meeting
from peer.meeting.words import Finish, MeetingOutcome, MeetingState
from peer.swarm.address_book import REST_FAILED_S, AddressBook, Entry, RecordIntake, loop_s
from peer.swarm.membership import Membership
from protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused, TransportError
from protocol.identity import PeerId
from protocol.limits import ACQUAINTANCES
from protocol.messages.messages import Decision, Hello, Outcome, Refusal, Resolve, RunPhase, refusal_of
from protocol.messages.terms import check_clock, check_hello
from protocol.streams.transport import Purpose, Stream, Transport

CONNECT_S = 15.0
FIRST_FRAME_S = 10.0
SAY_S = 2.0  # for a refusal to leave
MAX_INBOUND = 2  # at once; of one partner: 1
MAX_OUTBOUND = 2
TRY_S = 5.0  # for one question and its answer
PAUSE_S = 0.5
_NOT_YET = frozenset({RefusalCode.WRONG_PHASE, RefusalCode.NOT_READY})


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What meetings take from the node around them."""

    transport: Transport
    book: AddressBook
    intake: RecordIntake
    now_s: Callable[[], float]  # Unix time
    rng: random.Random
    report: Callable[[Meeting, MeetingDone], None]


@dataclass(frozen=True, slots=True)
class Active:
    """A meeting in progress."""

    meeting: Meeting
    driver: Driver
    over: asyncio.Event


class Meetings:
    """Run meetings and answer those who ask. Every method belongs to the node's event loop."""

    def __init__(self, membership: Membership, surroundings: Surroundings, tools: Tools) -> None:
        self.clock_steps = 0  # own schedule clock, as the trainer last told
        self.phase = RunPhase.TRAIN  # likewise
        self.rng = surroundings.rng
        self.deadline_s = membership.deadline_s
        self._membership = membership
        self._around = surroundings
        self._tools = tools
        self._resolver = Resolver(surroundings.transport, surroundings.book, membership.terms.run_id)
        self._numbers = itertools.count(self.rng.getrandbits(48))  # another node's of the same trainer, before us, had others
        self._active: dict[int, Active] = {}
        self._completed: Counter[int] = Counter()
        self._num_outbound = 0
        self._inbound: set[PeerId] = set()
        self._closed: RefusalCode | None = RefusalCode.NOT_READY
        self._opened = asyncio.Event()

    # ------------------------------------------------------------------ open or not

    def open(self) -> None:
        """Meet from now on, unless we leave."""
        if self._closed is not RefusalCode.LEAVING:
            self._closed = None
            self._opened.set()

    def pause(self) -> None:
        """Begin nothing and refuse everybody until `open`; what is in progress goes on."""
        if self._closed is not RefusalCode.LEAVING:
            self._closed = RefusalCode.NOT_READY
            self._opened.clear()

    async def wait_open(self) -> None:
        """Wait until meetings may begin."""
        await self._opened.wait()

    async def end(self, reason: str, code: RefusalCode) -> None:
        """Drop what may be dropped of the meetings in progress, and wait for the end of all."""
        for active in list(self._active.values()):
            active.driver.stop(reason, code)
        for active in list(self._active.values()):
            await active.over.wait()

    async def close(self, grace_s: float) -> None:
        """Begin nothing any more, and finish or drop what is in progress within `grace_s`."""
        self._closed = RefusalCode.LEAVING
        self._opened.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.end("leaving", RefusalCode.LEAVING)

    # ------------------------------------------------------------------ what a search asks

    def num_completed(self, fragment: int) -> int:
        """Return how many meetings on a fragment have counted so far."""
        return self._completed[fragment]

    def is_decided(self, fragment: int) -> bool:
        """Tell whether a meeting on a fragment is in progress that counts already."""
        return fragment in self._active and self._active[fragment].meeting.is_decided

    async def wait_over(self, fragment: int) -> bool:
        """Wait for the end of the meeting in progress on a fragment; False at once when there is none."""
        active = self._active.get(fragment)
        if active is not None:
            await active.over.wait()
        return active is not None

    def soonest_s(self) -> float | None:
        """Return when somebody can be asked (loop time), None when nobody is known."""
        return self._around.book.soonest_s(loop_s())

    def tell_trainer(self, request: ask.Solo | ask.Defer) -> None:
        """Pass on what a search came to."""
        self._tools.link.tell(request)

    async def try_next(self, fragment: int, tried: set[PeerId]) -> Finish | None:
        """Choose a partner that is not in `tried`, add it there, and meet it; None when that did not come to a meeting."""
        if self._num_outbound >= MAX_OUTBOUND:
            return None
        partner = self._choose(tried)
        if partner is None:
            tried.clear()
            return None
        tried.add(partner.peer_id)
        self._num_outbound += 1
        try:
            return await self._initiate(partner, fragment)
        finally:
            self._num_outbound -= 1

    def _choose(self, tried: Collection[PeerId]) -> Entry | None:
        called = {active.meeting.partner for active in self._active.values() if active.meeting.initiates}
        return self._around.book.choose(loop_s(), self.rng, exclude={*tried, *called})

    async def _initiate(self, partner: Entry, fragment: int) -> Finish | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await self._around.transport.connect(partner.peer_id, partner.addresses, Purpose.MEET)
        except (TransportError, TimeoutError):
            self._around.book.failed(partner.peer_id, loop_s())
            return None
        if fragment in self._active or self._closed is not None:  # somebody called us meanwhile, or we leave
            await stream.close()
            return None
        return await self._run_meeting(stream, fragment, None)

    # ------------------------------------------------------------------ answering

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Meet` stream: a meeting or a Resolve. Closes the stream; raises nothing that the partner causes."""
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                first = await stream.receive()
            match first:
                case Hello():
                    await self._answer_hello(stream, first)
                case Resolve():
                    await say(stream, await self._outcome(first, stream.partner))
                case Refusal():
                    return  # it has changed its mind
                case _:
                    raise BadMessage(f"a meeting begins with a Hello, not with a {type(first).__name__}")
        except Refused as refusal:
            await say(stream, refusal_of(refusal))
        except PeerMisbehaved as error:
            self._around.book.ban(stream.partner, loop_s())
            await say(stream, refusal_of(error))
        except (TransportError, TimeoutError):
            return
        finally:
            await stream.close()

    async def _answer_hello(self, stream: Stream, hello: Hello) -> None:
        membership, partner = self._membership, stream.partner
        if self._around.book.is_banned(partner, loop_s()):
            raise Refused(RefusalCode.NOT_INVITED, "banned for breaking the rules")
        check_hello(hello, membership.terms, membership.identity.peer_id, partner, self._around.now_s())
        self._around.book.saw(partner, loop_s(), hello.clock_steps)
        if self._closed is not None:
            raise Refused(self._closed)
        check_clock(hello.clock_steps, self.clock_steps, membership.terms)
        if hello.phase is RunPhase.FINISH and self.phase is RunPhase.TRAIN:
            raise Refused(RefusalCode.WRONG_PHASE, "still training")
        if not self._around.book.is_welcome(partner, loop_s()):
            raise Refused(RefusalCode.BUSY, "resting after a meeting with you that came to nothing")
        await self._make_room(hello.fragment, partner)
        if len(self._inbound) >= MAX_INBOUND or partner in self._inbound:
            raise Refused(RefusalCode.BUSY, "in as many meetings as I allow")
        self._inbound.add(partner)
        try:
            await self._run_meeting(stream, hello.fragment, hello)
        finally:
            self._inbound.discard(partner)

    async def _make_room(self, fragment: int, partner: PeerId) -> None:
        """Two peers that called each other at once: the call of the smaller id stands. Anybody else finds us busy."""
        while self._closed is None and (active := self._active.get(fragment)) is not None:
            early = active.meeting.state in (MeetingState.OPENING, MeetingState.GREETING) and active.meeting.initiates
            if not early or active.meeting.partner != partner or partner > self._membership.identity.peer_id:
                raise Refused(RefusalCode.BUSY, "in another meeting on this fragment")
            active.driver.stop("our partner called at the same moment; its call stands", RefusalCode.BUSY)
            await active.over.wait()
        if self._closed is not None:
            raise Refused(self._closed)

    async def _outcome(self, resolve: Resolve, partner: PeerId) -> Outcome:
        """Say what we decided. What is not decided yet is decided by the question: its asker cannot hear of a decision that comes later."""
        if resolve.run_id != self._membership.terms.run_id:
            raise Refused(RefusalCode.WRONG_RUN)
        for active in list(self._active.values()):
            if active.meeting.pairing.meeting_id != resolve.meeting_id or active.meeting.partner != partner:
                continue
            if active.meeting.is_decided:
                await active.driver.written.wait()
            else:
                active.driver.stop("the partner lost the stream", RefusalCode.TOO_SLOW)
                await active.over.wait()
        failed_blocks = self._tools.journal.failed_blocks(resolve.meeting_id)
        if failed_blocks is None:
            return Outcome(resolve.meeting_id, Decision.DROPPED)
        return Outcome(resolve.meeting_id, Decision.COMMITTED, failed_blocks)

    # ------------------------------------------------------------------ both

    async def _run_meeting(self, stream: Stream, fragment: int, hello: Hello | None) -> Finish:
        around = self._around
        greeting = Greeting(
            membership=self._membership,
            partner=stream.partner,
            fragment=fragment,
            nonce=self.rng.randbytes(16),
            now_s=around.now_s(),
            partner_hello=hello,
            acquaintances=around.book.acquaintances(stream.partner, loop_s(), self.rng, ACQUAINTANCES),
        )
        meeting = Meeting(next(self._numbers), greeting)
        driver = Driver(meeting, stream, self._tools, self._resolver.ask)
        active = self._active[fragment] = Active(meeting, driver, asyncio.Event())
        started_s = loop_s()
        try:
            finish = await driver.run()
            self._completed[fragment] += finish.outcome is MeetingOutcome.COMPLETED
        finally:
            del self._active[fragment]
            active.over.set()
        for record in meeting.partner_hello.acquaintances if meeting.partner_hello else ():
            around.intake.take_bytes(record)
        learn_from(around.book, meeting, finish, stream, loop_s())
        around.report(meeting, meeting_done(meeting, finish, stream, loop_s() - started_s))
        return finish


async def say(stream: Stream, message: Refusal | Outcome) -> None:
    """Send a last message, if the partner takes it."""
    with suppress(TransportError, TimeoutError):
        async with asyncio.timeout(SAY_S):
            await stream.send(message)


def learn_from(book: AddressBook, meeting: Meeting, finish: Finish, stream: Stream, now_s: float) -> None:
    """Note in the book how a partner behaved. Own troubles (ABANDONED) and a busy partner say nothing about it."""
    partner, hello = stream.partner, meeting.partner_hello
    match finish:
        case Finish(outcome=MeetingOutcome.COMPLETED) if hello is not None:
            book.met(partner, now_s, hello.clock_steps, finished=hello.phase is RunPhase.FINISH)
        case Finish(outcome=MeetingOutcome.MISBEHAVED):
            book.ban(partner, now_s)
        case Finish(refusal=RefusalCode.LEAVING):
            book.leaves(partner, now_s)
        case Finish(refusal=code) if code in _NOT_YET:
            book.not_now(partner, now_s)
        case Finish(outcome=MeetingOutcome.GATED):
            book.refused(partner, now_s, REST_FAILED_S)
        case Finish(outcome=MeetingOutcome.REFUSED):
            book.refused(partner, now_s)
        case Finish(outcome=MeetingOutcome.FAILED):
            book.broke_off(partner, now_s)


def meeting_done(meeting: Meeting, finish: Finish, stream: Stream, seconds: float) -> MeetingDone:
    """Describe a meeting for the event log."""
    return MeetingDone(
        partner=str(stream.partner),
        fragment=meeting.fragment,
        outcome=finish.outcome.name.lower(),
        reason=finish.reason,
        lane=stream.transport,
        bytes_sent=stream.bytes_sent,
        bytes_received=stream.bytes_received,
        seconds=seconds,
    )


@dataclass(frozen=True, slots=True)
class Resolver:
    """Asks on behalf of one peer in one run."""

    transport: Transport
    book: AddressBook
    run_id: bytes

    async def ask(self, partner: PeerId, meeting_id: bytes) -> Outcome:
        """Ask again and again until the partner answers. Bounded by the caller's cancellation."""
        while True:
            try:
                async with asyncio.timeout(TRY_S):
                    return await self._ask_once(partner, Resolve(self.run_id, meeting_id))
            except (TransportError, PeerMisbehaved, TimeoutError):
                await asyncio.sleep(PAUSE_S)

    async def _ask_once(self, partner: PeerId, question: Resolve) -> Outcome:
        stream = await self.transport.connect(partner, self.book.addresses(partner), Purpose.MEET)
        try:
            await stream.send(question)
            answer = await stream.receive()
        finally:
            await stream.close()
        if not isinstance(answer, Outcome) or answer.meeting_id != question.meeting_id:
            raise BadMessage(f"asked for an outcome, got {type(answer).__name__}")
        return answer
