"""From a record into the book: only what its peer has signed, for this run, in force, by somebody who may take part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from peer.swarm.address_book import LAST_WORD_S, AddressBook, KnownPeer, RecordIntake
from protocol.limits import CLOCK_SKEW_S, RECORD_LIFETIME_S
from protocol.messages.records import MemberRecord
from protocol.messages.terms import RunTerms
from tests.memory.virtual_time import run
from tests.protocol.samples import ALICE, BOB, ISSUER, MALLORY, NOW_S, OTHER_RUN_ID, RECORD, TERMS

OF_ISSUER = replace(RECORD, peer_id=ISSUER.peer_id, credential=None, signature=b"").signed(ISSUER)  # who needs no invite


def live_after(tell: Callable[[RecordIntake], None], terms: RunTerms = TERMS) -> list[KnownPeer]:
    """Return who is live in Bob's book once he has heard all that."""

    async def main() -> list[KnownPeer]:
        intake = RecordIntake(terms, AddressBook(BOB.peer_id), lambda: NOW_S)
        tell(intake)
        return intake.book.live(asyncio.get_running_loop().time())

    return run(main(), start_s=1000.0)


def later(**changes: object) -> MemberRecord:
    """Return Alice's next word, unsigned."""
    return replace(RECORD, **{"sequence": RECORD.sequence + 1, "signature": b""} | changes)  # type: ignore[arg-type]


def test_a_true_record_is_believed_from_whoever_brings_it() -> None:
    for tell in (lambda intake: intake.take(RECORD), lambda intake: intake.take_bytes(RECORD.to_bytes())):
        (entry,) = live_after(tell)
        assert (entry.peer_id, entry.clock_steps, entry.record) == (ALICE.peer_id, RECORD.clock_steps, RECORD)
        assert entry.addresses == RECORD.addresses


@pytest.mark.parametrize(
    "wrong",
    [
        later(signature=RECORD.signature),  # not what was signed
        later().signed(MALLORY),
        later(run_id=OTHER_RUN_ID).signed(ALICE),
        later(expires_s=NOW_S).signed(ALICE),
        later(expires_s=NOW_S + RECORD_LIFETIME_S + CLOCK_SKEW_S + 1).signed(ALICE),
        later(credential=None).signed(ALICE),  # the run is by invitation
    ],
)
def test_nothing_else_is_and_it_does_not_hide_the_truth(wrong: MemberRecord) -> None:
    assert live_after(lambda intake: intake.take(wrong)) == []

    def both(intake: RecordIntake) -> None:
        intake.take(wrong)
        intake.take(RECORD)
        intake.take(wrong)

    (entry,) = live_after(both)
    assert entry.record == RECORD


def test_only_members_are_believed_where_there_is_a_list() -> None:
    by_list = replace(TERMS, access="allowlist", members=frozenset({ALICE.peer_id}))

    def tell(intake: RecordIntake) -> None:
        intake.take(RECORD)
        intake.take(OF_ISSUER)

    assert [entry.peer_id for entry in live_after(tell, by_list)] == [ALICE.peer_id]


@pytest.mark.parametrize("raw", [b"", b"\xff" * 60, b"x" * 5000, RECORD.to_bytes()[:-1], RECORD.to_bytes() * 9], ids=len)
def test_noise_is_passed_over(raw: bytes) -> None:
    assert live_after(lambda intake: intake.take_bytes(raw)) == []


def test_a_gap_in_the_checks_changes_nothing_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: MemberRecord, run_id: bytes, now_s: float) -> None:
        raise UnicodeEncodeError("ascii", "\u017f", 0, 1, "a case that nobody thought of")

    monkeypatch.setattr(MemberRecord, "check", fail)
    assert live_after(lambda intake: intake.take(RECORD)) == []
    assert live_after(lambda intake: intake.take_bytes(RECORD.to_bytes())) == []


def test_we_are_not_told_about_ourselves() -> None:
    about_bob = replace(RECORD, peer_id=BOB.peer_id, signature=b"").signed(BOB)
    assert live_after(lambda intake: intake.take(about_bob)) == []


def test_a_record_that_ends_at_once_is_a_farewell() -> None:
    farewell = later(expires_s=int(NOW_S + LAST_WORD_S) - 1).signed(ALICE)

    def leave(intake: RecordIntake) -> None:
        intake.take(RECORD)
        intake.take(OF_ISSUER)
        intake.take(farewell)
        intake.take(RECORD)  # an old word, which does not bring it back

    assert [entry.peer_id for entry in live_after(leave)] == [ISSUER.peer_id]

    def come_back(intake: RecordIntake) -> None:
        leave(intake)
        intake.take(later(sequence=RECORD.sequence + 2).signed(ALICE))

    assert {entry.peer_id for entry in live_after(come_back)} == {ALICE.peer_id, ISSUER.peer_id}
