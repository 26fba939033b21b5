"""From a record into the book: only what its peer has signed, for this run, in force, by somebody who may take part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from peer.hearsay import LAST_WORD_S, Hearsay
from peer.partners import AddressBook, Entry
from protocol.records import MemberRecord
from protocol.virtual_time import run
from tests.protocol.samples import ALICE, BOB, MALLORY, NOW_S, OTHER_RUN_ID, RECORD, TERMS


def live_after(tell: Callable[[Hearsay], None]) -> list[Entry]:
    """Return who is live in Bob's book once he has heard all that."""

    async def main() -> list[Entry]:
        hearsay = Hearsay(TERMS, AddressBook(BOB.peer_id), lambda: NOW_S)
        tell(hearsay)
        return hearsay.book.live(asyncio.get_running_loop().time())

    return run(main(), start_s=1000.0)


def signed(**changes: object) -> MemberRecord:
    return replace(RECORD, signature=b"", **changes).signed(ALICE)  # type: ignore[arg-type]


def test_a_true_record_is_believed_from_whoever_brings_it() -> None:
    for tell in (lambda hearsay: hearsay.take(RECORD), lambda hearsay: hearsay.take_bytes(RECORD.to_bytes())):
        (entry,) = live_after(tell)
        assert (entry.peer_id, entry.clock_steps, entry.record) == (ALICE.peer_id, RECORD.clock_steps, RECORD)
        assert entry.addresses == RECORD.addresses


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RECORD, clock_steps=77),  # not what was signed
        replace(RECORD, signature=b"").signed(MALLORY),
        signed(run_id=OTHER_RUN_ID),
        signed(expires_s=NOW_S),
        signed(expires_s=NOW_S + 10**6),
        signed(credential=None),  # the run is by invitation
    ],
)
def test_nothing_else_is_and_it_does_not_hide_the_truth(wrong: MemberRecord) -> None:
    assert live_after(lambda hearsay: hearsay.take(wrong)) == []
    later = replace(wrong, sequence=RECORD.sequence + 1)

    def both(hearsay: Hearsay) -> None:
        hearsay.take(later)
        hearsay.take(RECORD)
        hearsay.take(later)

    (entry,) = live_after(both)
    assert entry.record == RECORD


@pytest.mark.parametrize("raw", [b"", b"\xff" * 60, b"x" * 5000, RECORD.to_bytes()[:-1]])
def test_noise_is_passed_over(raw: bytes) -> None:
    assert live_after(lambda hearsay: hearsay.take_bytes(raw)) == []


def test_we_are_not_told_about_ourselves() -> None:
    about_bob = replace(RECORD, peer_id=BOB.peer_id, signature=b"").signed(BOB)
    assert live_after(lambda hearsay: hearsay.take(about_bob)) == []


def test_a_record_that_ends_at_once_is_a_farewell() -> None:
    farewell = signed(sequence=RECORD.sequence + 1, expires_s=int(NOW_S + LAST_WORD_S) - 1)

    def leave(hearsay: Hearsay) -> None:
        hearsay.take(RECORD)
        hearsay.take(farewell)

    assert live_after(leave) == []

    def come_back(hearsay: Hearsay) -> None:
        leave(hearsay)
        hearsay.take(RECORD)  # an old word, which does not bring it back
        assert hearsay.book.live(1000.0) == []
        hearsay.take(signed(sequence=RECORD.sequence + 2))

    assert [entry.peer_id for entry in live_after(come_back)] == [ALICE.peer_id]
