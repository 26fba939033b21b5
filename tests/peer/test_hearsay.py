from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from peer.hearsay import Hearsay
from peer.partners import AddressBook
from protocol import virtual_time
from protocol.records import MemberRecord
from protocol.terms import RunTerms
from tests.peer.neighbours import ME, NOW_S, record, somebody
from tests.peer.two_sides import TERMS

A, B = somebody(1), somebody(2)


def heard(tell: Callable[[Hearsay], None], terms: RunTerms = TERMS) -> AddressBook:
    book = AddressBook(ME.peer_id)

    async def main() -> None:
        tell(Hearsay(terms, book, lambda: float(NOW_S)))

    virtual_time.run(main())
    return book


def names(book: AddressBook) -> set[str]:
    return {str(entry.peer_id) for entry in book.live(0.0)}


def test_a_true_record_is_believed() -> None:
    assert names(heard(lambda hearsay: hearsay.take(record(A)))) == {str(A.peer_id)}
    assert names(heard(lambda hearsay: hearsay.take_bytes(record(A).to_bytes()))) == {str(A.peer_id)}


def test_what_is_not_true_changes_nothing_and_raises_nothing() -> None:
    true = record(A)
    for lie in (
        replace(true, clock_steps=5),
        replace(true, signature=b"").signed(B),
        replace(true, run_id=b"r" * 32, signature=b"").signed(A),
        record(A, lifetime_s=-1),
        record(A, lifetime_s=4000),
    ):
        assert not names(heard(lambda hearsay, lie=lie: hearsay.take(lie)))
    for raw in (b"", b"\xff" * 50, true.to_bytes()[:-3], true.to_bytes() * 9):
        assert not names(heard(lambda hearsay, raw=raw: hearsay.take_bytes(raw)))


def test_a_gap_in_the_checks_changes_nothing_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: MemberRecord, run_id: bytes, now_s: float) -> None:
        raise UnicodeEncodeError("ascii", "\u017f", 0, 1, "a case that nobody thought of")

    monkeypatch.setattr(MemberRecord, "verify", fail)
    assert not names(heard(lambda hearsay: hearsay.take(record(A))))
    assert not names(heard(lambda hearsay: hearsay.take_bytes(record(A).to_bytes())))


def test_only_members_are_believed() -> None:
    terms = replace(TERMS, access="allowlist", members=frozenset({A.peer_id}))

    def tell(hearsay: Hearsay) -> None:
        hearsay.take(record(A))
        hearsay.take(record(B))

    assert names(heard(tell, terms)) == {str(A.peer_id)}


def test_a_farewell_ends_it() -> None:
    def tell(hearsay: Hearsay) -> None:
        hearsay.take(record(A, 1))
        hearsay.take(record(B, 1))
        hearsay.take(record(A, 2, lifetime_s=1))
        hearsay.take(record(A, 1))

    assert names(heard(tell)) == {str(B.peer_id)}
