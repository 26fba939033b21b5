"""The meetings of one node: at most one per fragment at a time, started by either side; each updates the address book."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from gossamer.peer.machine.events import Event, MeetingDone
from gossamer.peer.meeting.commands import Finish
from gossamer.peer.meeting.driver import Caller, Driver, OwnSide
from gossamer.peer.meeting.interface import Greeting, MeetingOutcome, MeetingState, has_ended
from gossamer.peer.meeting.machine import SILENCE_SHARE, Meeting
from gossamer.peer.node.partner_file import shunned
from gossamer.peer.swarm.address_book import BACK_OFF_FAILED_S, AddressBook
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.partner_records import PartnerRecords
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Hello, Outcome, Refusal, Resolve, RunPhase
from gossamer.protocol.messages.terms import check_global_step, check_hello
from gossamer.protocol.streams.transport import Stream
from gossamer.protocol.tasks import Changes, loop_s

SEND_LAST_S = 2.0  # for a refusal to be sent
FIRST_TYPICAL_S = 0.3
LINE_UP_S = 2.0  # at most, that a caller waits for the end of another meeting: its own fragment is blocked meanwhile
MAX_INBOUND = 2  # at once; of one partner: 1
MAX_OUTBOUND = 2
RECHECK_S = 1.0  # at most, that a search waits before it looks for new partners
_NOT_YET = frozenset({RefusalCode.WRONG_PHASE, RefusalCode.NOT_READY})


@dataclass(slots=True)
class Meetings:
    """Run meetings while the lifecycle state allows them, and answer inbound ones. `on_done` gets each meeting that has ended."""

    membership: Membership
    lifecycle: Lifecycle
    caller: Caller
    peer_exchange: PeerExchange
    own: OwnSide
    rng: random.Random
    on_done: Callable[[Meeting, MeetingDone], None]
    records: PartnerRecords
    emit: Callable[[Event], None]
    _numbers: itertools.count[int] = field(init=False)  # an earlier node of the same trainer used other numbers
    active: dict[int, Driver] = field(default_factory=dict)  # by fragment
    completed: Counter[int] = field(default_factory=Counter)  # meetings so far, by fragment
    typical_s: float = FIRST_TYPICAL_S  # typical duration of a completed meeting
    _next: set[int] = field(default_factory=set)  # fragments for which a caller waits already
    _changes: Changes = field(default_factory=Changes)  # notified at the end of each meeting

    def __post_init__(self) -> None:
        self._numbers = itertools.count(self.rng.getrandbits(48))

    @asynccontextmanager
    async def set_aside(self) -> AsyncIterator[None]:
        """End all meetings, and start none while the body runs: it replaces the weights that they are about."""
        self.lifecycle.begin_takeover()
        try:
            await self._end("taking over newer weights", RefusalCode.NOT_READY)
            yield
            self.records.forget_rejections()
        finally:
            self.lifecycle.end_takeover()

    async def leave(self, grace_s: float) -> None:
        """Start nothing any more, and finish or drop the meetings in progress within `grace_s`."""
        self.lifecycle.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._end("leaving", RefusalCode.LEAVING)

    async def until_quiet(self) -> None:
        """Wait for the end of the meetings in progress."""
        for active in list(self.active.values()):
            await active.over.wait()

    async def _end(self, reason: str, code: RefusalCode) -> None:
        """Drop the meetings in progress that are not decided yet, and wait for the end of all."""
        for active in list(self.active.values()):
            active.stop(reason, code)
        await self.until_quiet()

    async def try_next(self, fragment: int, tried: set[PeerId]) -> Finish | None:
        """Choose a partner that is not in `tried`, add it there, and meet it; None when there is nobody to call, or no call may begin."""
        if not self._may_call(fragment):
            return None
        partner = self.peer_exchange.book.choose(loop_s(), self.rng, tried | self._partners(called=True))
        if partner is None:
            tried.clear()
            return None
        tried.add(partner.peer_id)
        return await self._run_meeting(partner.peer_id, None, fragment, None)

    async def until_callable(self, pause_s: float, until_s: float) -> None:
        """Wait until a partner can be called, `pause_s` at least, or for the end of one of our meetings; RECHECK_S at most."""
        now_s = loop_s()
        soonest_s = self.peer_exchange.book.soonest_s(now_s, self._partners(called=True))
        callable_s = math.inf if soonest_s is None or not self._has_room else max(soonest_s, now_s + pause_s)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(callable_s, until_s, now_s + RECHECK_S)):
                await self._changes.wait()

    def _may_call(self, fragment: int) -> bool:
        is_free = fragment not in self.active and fragment not in self.lifecycle.stale
        return is_free and self.lifecycle.may_meet and self._has_room

    def _partners(self, *, called: bool) -> set[PeerId]:
        """Return the partners of the meetings that we have begun, or that they have."""
        return {active.meeting.partner for active in self.active.values() if active.meeting.initiates is called}

    @property
    def _has_room(self) -> bool:
        return len(self._partners(called=True)) < MAX_OUTBOUND and not self._is_full

    @property
    def _is_full(self) -> bool:
        """Whether another meeting would exceed the operator's rate limits."""
        return len(self.active) + 1 > self.own.line.max_meetings

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Meet` stream: a meeting or a Resolve. Raises Refused and PeerMisbehaved for the partner, TransportError."""
        match first := await stream.receive():
            case Hello():
                await self._answer_hello(stream, first)
            case Resolve():
                await send_last(stream, await self._outcome(first, stream.partner))
            case Refusal():
                return  # the partner has cancelled its call
            case _:
                raise BadMessage(f"a meeting begins with a Hello, not with a {type(first).__name__}")

    async def _answer_hello(self, stream: Stream, hello: Hello) -> None:
        partner = stream.partner
        self._need_fit(hello, stream)
        while (active := self.active.get(hello.fragment)) is not None:
            await self._wait_behind(active, partner)
            self._need_fit(hello, stream)  # the state may have changed meanwhile
        inbound = self._partners(called=False)
        if len(inbound) >= MAX_INBOUND or partner in inbound or self._is_full:
            raise Refused(RefusalCode.BUSY, "in as many meetings as I allow")
        await self._run_meeting(partner, stream, hello.fragment, hello)

    def _need_fit(self, hello: Hello, stream: Stream) -> None:
        """Raise Refused, or PeerMisbehaved, unless we may meet the sender of this Hello."""
        membership, lifecycle, partner = self.membership, self.lifecycle, stream.partner
        check_hello(hello, membership.terms, membership.identity.peer_id, partner, self.peer_exchange.time.now_s())
        self.peer_exchange.book.note_call(partner, loop_s(), hello.global_step, finished=has_ended(hello, membership))
        self.peer_exchange.book.shows(partner, hello.opening.credential)
        self.peer_exchange.book.connected(partner, stream.observed)
        if (code := lifecycle.refusal) is not None:
            is_over = code is RefusalCode.NOT_READY and lifecycle.has_agreed and not has_ended(hello, membership)
            raise Refused(RefusalCode.WRONG_PHASE, "the run has ended here") if is_over else Refused(code)
        if hello.fragment in lifecycle.stale:
            raise Refused(RefusalCode.NOT_READY, "the weights of this fragment are too old here")
        check_global_step(hello.global_step, lifecycle.global_step, membership.terms)
        if hello.phase is RunPhase.FINISH and lifecycle.phase is RunPhase.TRAIN:
            raise Refused(RefusalCode.WRONG_PHASE, "still training")
        if not self.peer_exchange.book.is_welcome(partner, loop_s()):
            raise Refused(RefusalCode.BUSY, "not yet again, after a failed or a long meeting with you")
        if self.records.is_shunned(partner, now_s := self.peer_exchange.time.local_s()):
            raise Refused(RefusalCode.GATE, self.records.why_shunned(partner, now_s))

    async def _wait_behind(self, active: Driver, partner: PeerId) -> None:
        """Wait for the end of the meeting on the fragment that a partner calls about. Raises Refused.

        An incoming request pre-empts a call of ours that is not sent yet. If two peers call each other at once, the call of the smaller id
        stands. A peer whose own call waits for an answer lets no caller wait behind it. So a caller waits only for a meeting in which both
        sides are at work, never for a peer that waits itself.
        """
        meeting = active.meeting
        is_greeting = meeting.initiates and meeting.state is MeetingState.GREETING
        if meeting.is_unannounced or (is_greeting and meeting.partner == partner and partner < self.membership.identity.peer_id):
            active.stop("both peers called at the same moment; the other call stands", RefusalCode.BUSY)
            await active.over.wait()
        elif not is_greeting:
            await self._wait_for_fragment(active)
        else:
            raise Refused(RefusalCode.BUSY, "calling another on this fragment")

    async def _wait_for_fragment(self, active: Driver) -> None:
        """Let one caller wait for the end of the meeting on its fragment, which takes less time than calling again later."""
        fragment = active.meeting.fragment
        if fragment in self._next:
            raise Refused(RefusalCode.BUSY, "in a meeting on this fragment, and another one is next")
        self._next.add(fragment)
        try:
            async with asyncio.timeout(min(LINE_UP_S, SILENCE_SHARE * self.membership.deadline_s / 2)):
                await active.over.wait()
        except TimeoutError:
            raise Refused(RefusalCode.BUSY, "in a long meeting on this fragment") from None
        finally:
            self._next.discard(fragment)

    async def _outcome(self, resolve: Resolve, partner: PeerId) -> Outcome:
        """Return our decision. A meeting that is undecided yet is dropped: the asker could not learn of a later decision."""
        if resolve.run_id != self.membership.terms.run_id:
            raise Refused(RefusalCode.WRONG_RUN)
        for active in list(self.active.values()):
            if active.meeting.pairing.meeting_id != resolve.meeting_id or active.meeting.partner != partner:
                continue
            if active.meeting.is_decided:
                await active.written.wait()
            else:
                active.stop("the partner lost the stream", RefusalCode.TOO_SLOW)
                await active.over.wait()
        failed_blocks = self.own.journal.failed_blocks(resolve.meeting_id)
        if failed_blocks is None:
            return Outcome(resolve.meeting_id, is_committed=False)
        return Outcome(resolve.meeting_id, True, failed_blocks)

    async def _run_meeting(self, partner: PeerId, stream: Stream | None, fragment: int, hello: Hello | None) -> Finish:
        """Hold a meeting, as caller or for an inbound Hello. A call that reaches nobody causes a back-off, and is not reported."""
        entry = self.peer_exchange.book.get(partner)
        greeting = Greeting(
            membership=self.membership,
            partner=partner,
            fragment=fragment,
            nonce=self.rng.randbytes(16),
            now_s=self.peer_exchange.time.now_s(),
            partner_hello=hello,
            records=self.peer_exchange.records_for(partner),
            timeout_s=entry.timeout_s,
            trust=self.records.trust(partner),
            place=str(entry.place),
        )
        meeting = Meeting(next(self._numbers), greeting)
        driver = self.active[fragment] = Driver(meeting, stream, self.own, self.caller)
        started_s = loop_s()
        try:
            finish = await driver.run()
            took_s = loop_s() - started_s
            if finish.outcome is MeetingOutcome.COMPLETED:
                self.completed[fragment] += 1
                self.typical_s += 0.2 * (took_s - self.typical_s)
        finally:
            del self.active[fragment]
            self._changes.notify()
        if driver.stream is None:
            if finish.outcome is MeetingOutcome.FAILED:
                self.peer_exchange.book.note_failure(partner, loop_s(), driver.silent_s)
            return finish
        self.peer_exchange.take_all(meeting.partner_hello.opening.records if meeting.partner_hello else ())
        if hello is None:  # an inbound connection was noted with its Hello
            self.peer_exchange.book.connected(partner, driver.stream.observed)
        learn_from(self.peer_exchange.book, meeting, finish, loop_s(), took_s, driver.silent_s)
        self.on_done(meeting, meeting_done(meeting, finish, driver.stream, took_s, driver.round_trip_s))
        self._record(meeting, finish)
        return finish

    def _record(self, meeting: Meeting, finish: Finish) -> None:
        """Update the partner's record, and report a message that was refused as harmful."""
        records, partner, now_s = self.records, meeting.partner, self.peer_exchange.time.local_s()
        checked, is_gated = meeting.checked, finish.outcome is MeetingOutcome.GATED
        if (hello := meeting.partner_hello) is not None:
            self.peer_exchange.book.shows(partner, hello.opening.credential)
            if checked is not None and meeting.own_hello is not None:
                records.counted_steps(partner, hello.own_steps, meeting.own_hello.own_steps)
        if finish.outcome is MeetingOutcome.COMPLETED and checked is not None:
            if records.merged(partner, now_s, checked.gain, checked.deviation):
                self._shun(partner, "its latest messages together helped far less than those of others", now_s)
        elif is_gated and checked is not None and checked.is_harmful:
            records.harmful(partner, now_s)
            self._shun(partner, f"{checked.reason}; it was not merged", now_s)
        elif is_gated or (finish.refusal is not None and meeting.has_commitment(finish)):  # a partner that breaks off may fear the probe
            records.rejected(partner, now_s)

    def _shun(self, partner: PeerId, evidence: str, now_s: float) -> None:
        """Report that a partner rests."""
        text = f"{partner.short()} sent a harmful message, its number {self.records.get(partner).refused}: {evidence}"
        self.emit(shunned(partner, text, now_s, self.records.rests_until_s(partner) - now_s))


async def send_last(stream: Stream, message: Refusal | Outcome) -> None:
    """Send a last message; ignore a partner that does not take it."""
    with suppress(TransportError, TimeoutError):
        async with asyncio.timeout(SEND_LAST_S):
            await stream.send(message)


def learn_from(book: AddressBook, meeting: Meeting, finish: Finish, now_s: float, took_s: float, silent_s: float) -> None:
    """Update the address book after a meeting: `took_s` is its duration, `silent_s` how long the partner was silent at its end.

    A meeting that our side abandoned changes nothing. Nor does a busy partner, unless it is the caller, or keeps us waiting for its answer.
    """
    partner, hello = meeting.partner, meeting.partner_hello
    match finish:
        case Finish(outcome=MeetingOutcome.COMPLETED) if hello is not None:
            book.note_meeting(partner, now_s, hello.global_step, took_s=took_s, finished=partner_has_ended(meeting, finish))
        case Finish(outcome=MeetingOutcome.MISBEHAVED, reason=reason):
            book.ban(partner, now_s, reason)
        case Finish(refusal=RefusalCode.LEAVING):
            book.note_leaving(partner, now_s)
        case Finish(refusal=code) if code in _NOT_YET:
            book.note_not_ready(partner, now_s, finished=partner_has_ended(meeting, finish))
        case Finish(outcome=MeetingOutcome.GATED):
            book.note_refusal(partner, now_s, BACK_OFF_FAILED_S)
        case Finish(outcome=MeetingOutcome.REFUSED):
            book.note_refusal(partner, now_s)
        case Finish(outcome=MeetingOutcome.FAILED):
            book.note_broken_meeting(partner, now_s, silent_s)
    if finish.outcome is not MeetingOutcome.ABANDONED:
        is_refused = finish.refusal is not None and not meeting.has_commitment(finish)  # after it, the partner's record tells
        breaks_off = hello is not None and (is_refused or finish.outcome is MeetingOutcome.FAILED)
        book.note_held(partner, now_s, took_s if hello is not None else took_s - LINE_UP_S, breaks_off=breaks_off)


def partner_has_ended(meeting: Meeting, finish: Finish) -> bool:
    """Return whether a partner has reached the end of the run: by its Hello, or because it refuses partners that have not."""
    membership, own, theirs = meeting.greeting.membership, meeting.own_hello, meeting.partner_hello
    refuses = meeting.initiates and finish.refusal is RefusalCode.WRONG_PHASE and own is not None and not has_ended(own, membership)
    return refuses or (theirs is not None and has_ended(theirs, membership))


def meeting_done(meeting: Meeting, finish: Finish, stream: Stream, seconds: float, round_trip_s: float) -> MeetingDone:
    """Describe a meeting for the event log."""
    return MeetingDone(
        partner=str(stream.partner),
        fragment=meeting.fragment,
        outcome=finish.outcome.name.lower(),
        reason=finish.reason,
        route=stream.route,
        bytes_sent=stream.bytes_sent,
        bytes_received=stream.bytes_received,
        seconds=seconds,
        round_trip_s=round_trip_s,
    )
