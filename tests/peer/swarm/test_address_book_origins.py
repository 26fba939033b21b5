"""A full book stays a mixed sample of the swarm: identities of one origin replace each other, and partners stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.peer.swarm import address_book as module
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.invite import Credential
from tests.peer.neighbours import ME, record, somebody

FULL = 20


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> AddressBook:
    monkeypatch.setattr(module, "MAX_ENTRIES", FULL)
    return AddressBook(ME.peer_id)


def at(number: int, address: str, bearer: int = 0) -> MemberRecord:
    """Return a record with this address; by default with an invite of its own."""
    made = record(somebody(number))
    credential = Credential(ME.peer_id, None, somebody(bearer or 5000 + number).peer_id, made.expires_s, bytes(32), bytes(64), bytes(64))
    return replace(made, addresses=(address,), credential=credential)


def learn(book: AddressBook, records: list[MemberRecord]) -> set[MemberRecord | None]:
    for number, made in enumerate(records):
        book.learn(made, float(number) / 100)
    return {entry.record for entry in book.announced(1.0)}


HONEST = [at(number, f"/ip4/8.{number}.0.1/tcp/4001") for number in range(1, 11)]


def test_identities_of_one_network_replace_each_other(book: AddressBook) -> None:
    kept = learn(book, [*HONEST, *(at(number, f"/ip4/6.6.{number}.1/tcp/1") for number in range(100, 200))])
    assert set(HONEST) <= kept and len(kept) == FULL


def test_identities_of_one_invite_replace_each_other_whatever_networks_they_claim(book: AddressBook) -> None:
    kept = learn(book, [*HONEST, *(at(number, f"/ip4/{number}.7.0.1/tcp/1", bearer=4000) for number in range(20, 120))])
    assert set(HONEST) <= kept and len(kept) == FULL


def test_of_different_origins_the_oldest_is_replaced_unless_it_was_met(book: AddressBook) -> None:
    met = somebody(1).peer_id
    learn(book, HONEST)
    book.note_meeting(met, 0.2, 5)
    kept = {entry.peer_id for entry in book.live(1.0)}
    learn(book, [at(number, f"/ip4/9.{number}.0.1/tcp/1") for number in range(100, 100 + FULL - 1)])
    left = kept & {entry.peer_id for entry in book.live(1.0)}
    assert left == {met}


def test_a_peer_that_failed_is_replaced_first(book: AddressBook) -> None:
    learn(book, [at(number, f"/ip4/9.{number}.0.1/tcp/1") for number in range(100, 100 + FULL)])
    book.note_failure(somebody(107).peer_id, 0.5)
    learn(book, HONEST[:1])
    assert somebody(107).peer_id not in {entry.peer_id for entry in book.live(1.0)}
    assert len(book.live(1.0)) == FULL


def test_the_credential_of_a_hello_counts_before_that_of_a_record(book: AddressBook) -> None:
    shown, known = at(1, "/ip4/8.1.0.1/tcp/1", bearer=4000), at(1, "/ip4/8.1.0.1/tcp/1", bearer=4001)
    book.shows(somebody(1).peer_id, shown.credential)
    assert len(book) == 0, "a Hello alone makes no entry"
    book.note_call(somebody(1).peer_id, 0.0, 0)
    book.shows(somebody(1).peer_id, shown.credential)
    book.learn(known, 0.0)
    assert book.get(somebody(1).peer_id).origins[1] == str(somebody(4000).peer_id)
