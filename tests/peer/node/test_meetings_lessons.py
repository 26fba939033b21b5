from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.peer.meeting.commands import Finish
from gossamer.peer.meeting.events import PartnerSent
from gossamer.peer.meeting.interface import MeetingOutcome, MeetingState
from gossamer.peer.node.meetings import learn_from, meeting_done
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Refusal, RunPhase
from tests.peer.neighbours import book_of
from tests.peer.two_sides import PLAIN, Table, alone

NOT_READY, WRONG_PHASE = RefusalCode.NOT_READY, RefusalCode.WRONG_PHASE
TABLE = Table(PLAIN)
MEETING = TABLE.run()[0].meeting
PARTNER = TABLE.identities[1]


class StubStream:
    """What the lessons ask of a stream."""

    partner: PeerId = PARTNER.peer_id
    route = "memory"
    bytes_sent = 10
    bytes_received = 20


def after(over: MeetingOutcome, refusal: RefusalCode | None = None) -> AddressBook:
    book = book_of(PARTNER)
    learn_from(book, MEETING, Finish(over, "", refusal), 0.0, 1.0, 0.0)
    return book


def rest_s(book: AddressBook) -> float | None:
    return book.soonest_s(0.0)


def test_a_meeting_that_counts() -> None:
    book = after(MeetingOutcome.COMPLETED)
    assert rest_s(book) == 0.0 and book.live(0.0)[0].global_step == 100 and book.live(0.0)[0].meetings == 1


@pytest.mark.parametrize("over", [MeetingOutcome.BUSY, MeetingOutcome.ABANDONED])
def test_own_troubles_and_a_busy_partner_teach_nothing(over: MeetingOutcome) -> None:
    assert rest_s(after(over)) == 0.0


def test_a_partner_that_broke_the_rules_is_banned() -> None:
    assert after(MeetingOutcome.MISBEHAVED).is_banned(PARTNER.peer_id, 1.0)


def test_a_partner_that_leaves_is_forgotten() -> None:
    assert not after(MeetingOutcome.REFUSED, RefusalCode.LEAVING).live(0.0)


@pytest.mark.parametrize("code", [NOT_READY, WRONG_PHASE])
def test_a_partner_that_is_not_ready_rests_without_a_mark(code: RefusalCode) -> None:
    entry = after(MeetingOutcome.REFUSED, code).live(0.0)[0]
    assert entry.backs_off_until_s > 0.0 and not entry.failures and not entry.refusals


def test_a_partner_that_refuses_the_training_phase_is_at_the_end() -> None:
    greeted, answered, phase = MeetingState.GREETING, MeetingState.PREPARING, RunPhase.FINISH
    for state, ours, code, has_ended in (
        (greeted, {}, WRONG_PHASE, True),
        (greeted, {}, NOT_READY, False),
        (answered, {}, WRONG_PHASE, False),
        (greeted, {"phase": phase}, WRONG_PHASE, False),
        (greeted, {"global_step": 10**9}, WRONG_PHASE, False),
    ):
        book, meeting = book_of(PARTNER), alone(state, PLAIN, initiates=state is greeted).meeting
        meeting.own_hello = meeting.own_hello and replace(meeting.own_hello, **ours)
        meeting.handle(PartnerSent(Refusal(code)))
        assert meeting.finish is not None
        learn_from(book, meeting, meeting.finish, 0.0, 1.0, 0.0)
        assert book.live(0.0)[0].finished == has_ended


@pytest.mark.parametrize(
    ("over", "failures", "refusals"), [(MeetingOutcome.FAILED, 1, 0), (MeetingOutcome.GATED, 0, 1), (MeetingOutcome.REFUSED, 0, 1)]
)
def test_marks(over: MeetingOutcome, failures: int, refusals: int) -> None:
    entry = after(over, RefusalCode.STEP_TOO_FAR if over is MeetingOutcome.REFUSED else None).live(0.0)[0]
    assert (entry.failures, entry.refusals) == (failures, refusals)


def test_the_event() -> None:
    done = meeting_done(MEETING, Finish(MeetingOutcome.GATED, "too far"), StubStream(), 1.5, 0.25)  # type: ignore[arg-type]
    assert (done.outcome, done.reason, done.route, done.bytes_sent, done.bytes_received, done.seconds) == (
        "gated",
        "too far",
        "memory",
        10,
        20,
        1.5,
    )
    assert done.partner == str(PARTNER.peer_id)
