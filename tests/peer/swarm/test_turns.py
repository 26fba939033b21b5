"""Turns: after a long meeting the others go first, and the slow peers of the partner's invite or network wait with it."""

from __future__ import annotations

import pytest

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.turns import LONG_S, MOST_TURNS
from gossamer.protocol.identity import PeerId
from gossamer.protocol.run.invite import Credential
from tests.peer.neighbours import ME, book_of, somebody

HONEST_S, LONG_MEETING_S = 0.5, 9.0
INVITE, OTHER_INVITE = 900, 901


def met(network: int = 0, invite: int = 0, took_s: float = HONEST_S) -> tuple[PeerId, int, int, float]:
    """Describe a partner: where it is, by which invite it joined, and how long its last meeting took; 0: of its own."""
    who = next(NUMBERS)
    return somebody(who).peer_id, network or who, invite, took_s


NUMBERS = iter(range(1, 500))


def book_with(*partners: tuple[PeerId, int, int, float]) -> AddressBook:
    book = AddressBook(ME.peer_id)
    for peer, network, invite, took_s in partners:
        book.add_address(peer, f"/ip4/20.{network}.0.1/tcp/4001", 0.0)
        book.connected(peer, f"/ip4/20.{network}.0.1/tcp/4001")
        if invite:
            book.shows(peer, Credential(ME.peer_id, None, somebody(invite).peer_id, 2_000_000_000, bytes(32), bytes(64), bytes(64)))
        book.note_meeting(peer, 0.0, 0, took_s=took_s)
    return book


def waits_s(book: AddressBook, peer: PeerId) -> float:
    """Return for how long a peer is neither called nor answered, to a tenth of a second."""
    waiting = [tenth / 10 for tenth in range(2000) if not book.is_welcome(peer, tenth / 10)]
    others = {entry.peer_id for entry in book.live(0.0)} - {peer}
    assert book.soonest_s(0.0, others) == pytest.approx(len(waiting) / 10)
    return len(waiting) / 10


@pytest.mark.parametrize(
    ("num_met", "took_s", "expected_s"), [(4, 20.0, 60.0), (4, 1.0, 0.0), (1, 20.0, 0.0), (30, 20.0, 20.0 * MOST_TURNS)]
)
def test_after_a_long_meeting_the_others_come_first(num_met: int, took_s: float, expected_s: float) -> None:
    """A partner that answers slowly on purpose holds a fragment, and keeps us from the others, for its share of the time alone."""
    slow, *others = (met() for _ in range(num_met))
    book = book_with(slow, *others)
    book.note_held(slow[0], 0.0, took_s)
    assert waits_s(book, slow[0]) == expected_s
    assert all(waits_s(book, other[0]) == 0.0 for other in others)


@pytest.mark.parametrize("place", [{"network": 77}, {"invite": INVITE}], ids=["one network", "one invite"])
def test_a_group_of_slow_peers_waits_as_one(place: dict[str, int]) -> None:
    group = [met(**place, took_s=LONG_MEETING_S) for _ in range(3)]
    book = book_with(*group, met(), met(invite=OTHER_INVITE))
    book.note_held(group[0][0], 0.0, LONG_MEETING_S)
    assert [waits_s(book, mate[0]) for mate in group[1:]] == [2 * LONG_MEETING_S] * 2  # both others go first


def test_a_stranger_in_the_network_of_the_group_waits_too() -> None:
    slow = met(network=77, took_s=LONG_MEETING_S)
    book = book_with(slow, met(), met())
    book.note_held(slow[0], 0.0, LONG_MEETING_S)
    fresh = somebody(700).peer_id
    book.note_call(fresh, 0.0, 0)
    assert book.is_welcome(fresh, 0.0)
    book.connected(fresh, "/ip4/20.77.0.9/tcp/4001")
    assert not book.is_welcome(fresh, 2 * LONG_MEETING_S - 0.1) and book.is_welcome(fresh, 2 * LONG_MEETING_S)


def test_a_stranger_of_the_groups_invite_does_not_wait_before_its_first_long_meeting() -> None:
    """Else a group could keep newcomers with its invite from all others."""
    slow, fresh = met(invite=INVITE, took_s=LONG_MEETING_S), met(invite=INVITE)
    book = book_with(slow, met(), met(), met(), fresh)
    book.get(fresh[0]).meetings, book.get(fresh[0]).typical_s = 0, 0.0
    book.note_held(slow[0], 0.0, LONG_MEETING_S)
    assert waits_s(book, fresh[0]) == 0.0
    book.note_held(fresh[0], 0.0, LONG_S)  # it has broken off, and is no partner yet
    book.note_held(slow[0], 100.0, LONG_MEETING_S)
    assert not book.is_welcome(fresh[0], 101.0)


def test_a_peer_whose_meetings_are_short_does_not_wait_for_its_neighbours() -> None:
    slow, quick = met(network=77, took_s=LONG_MEETING_S), met(network=77)
    book = book_with(slow, quick, met(), met())
    book.note_held(slow[0], 0.0, LONG_MEETING_S)
    assert waits_s(book, quick[0]) == 0.0 < waits_s(book, slow[0])


def test_where_all_meetings_are_long_nobody_waits() -> None:
    """On slow lines a long meeting is no sign of anything."""
    slow, mate = met(network=77, took_s=LONG_MEETING_S), met(network=77, took_s=LONG_MEETING_S)
    book = book_with(slow, mate, met(took_s=0.6 * LONG_MEETING_S), met(took_s=0.7 * LONG_MEETING_S))
    book.note_held(slow[0], 0.0, LONG_MEETING_S)
    assert waits_s(book, slow[0]) == waits_s(book, mate[0]) == 0.0
    book.note_held(slow[0], 0.0, 2 * LONG_MEETING_S)
    assert waits_s(book, slow[0]) > 0.0 < waits_s(book, mate[0])


def test_the_invite_of_nearly_all_is_no_group() -> None:
    members = [met(invite=INVITE, took_s=LONG_MEETING_S) for _ in range(5)]
    book = book_with(*members, met(), met())
    book.note_held(members[0][0], 0.0, LONG_MEETING_S)
    assert all(waits_s(book, member[0]) == 0.0 for member in members[1:])


def test_many_identities_of_one_network_count_as_one_that_goes_first() -> None:
    """Else a group would put off an honest peer with a slow line for as long as it has identities."""
    slow = met(took_s=LONG_MEETING_S)
    book = book_with(slow, met(), *(met(network=77) for _ in range(6)))
    book.note_held(slow[0], 0.0, LONG_MEETING_S)
    assert waits_s(book, slow[0]) == 2 * LONG_MEETING_S


def test_a_turn_outlives_a_new_record_and_a_failed_call() -> None:
    slow = met(took_s=LONG_MEETING_S)
    book = book_with(slow, met(), met())
    book.note_held(slow[0], 0.0, LONG_MEETING_S)
    book.note_failure(slow[0], 1.0)
    book.note_answer(slow[0], 2.0)
    assert not book.is_welcome(slow[0], 2 * LONG_MEETING_S - 0.1) and book.is_welcome(slow[0], 2 * LONG_MEETING_S)


def test_a_stranger_that_is_in_no_book_has_no_turn() -> None:
    book = book_of(somebody(1))
    book.note_held(somebody(2).peer_id, 0.0, 100 * LONG_S)
    assert len(book) == 1 and book.is_welcome(somebody(2).peer_id, 0.0)


def test_a_caller_that_breaks_off_goes_behind_the_others_until_it_completes_a_meeting() -> None:
    """A short meeting is no sign of anything; one that it breaks off costs others a place, and itself nothing but a message."""
    group = [met(invite=INVITE) for _ in range(2)]
    book = book_with(*group, *(met() for _ in range(4)))
    short_s = HONEST_S / 5
    book.note_held(group[0][0], 0.0, short_s)
    assert waits_s(book, group[0][0]) == 0.0
    for peer, *_ in group:
        book.note_held(peer, 0.0, short_s, breaks_off=True)
    assert waits_s(book, group[0][0]) == waits_s(book, group[1][0]) == pytest.approx(5 * short_s)
    book.note_meeting(group[1][0], 10.0, 0, took_s=HONEST_S)
    book.note_held(group[0][0], 10.0, short_s, breaks_off=True)
    assert book.is_welcome(group[1][0], 10.4), "who completes its meetings pays for nobody"
    assert not book.is_welcome(group[0][0], 10.4)
