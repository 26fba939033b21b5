"""Sybil groups: the weight of a hundred identities with one invite, and which peers count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.invite import Credential
from tests.peer.neighbours import ME, somebody
from tests.protocol.samples import DIGEST, ISSUER, NOW_S, RUN_ID, TERMS

OPEN = replace(TERMS, access="open")
INVITES = [Identity(bytes([60 + number]) * 32) for number in range(3)]


@pytest.fixture
def book() -> AddressBook:
    return AddressBook(ME.peer_id)


def groups_of(clocks: Sequence[int]) -> SybilGroups:
    """Strangers of an open run with these clocks."""
    book = AddressBook(ME.peer_id)
    for number, global_step in enumerate(clocks, 1):
        learn(book, somebody(number), global_step)
    book.add_address(somebody(1000).peer_id, "/ip4/192.0.2.1/tcp/1", 0.0)  # a peer without a known step
    return SybilGroups(book, OPEN)


def by_invite(who: Identity, number: int) -> Credential:
    """Return a peer's credential by one of the invites for anybody."""
    bearer = INVITES[number]
    issued = Credential(ISSUER.peer_id, None, bearer.peer_id, NOW_S + 3600, DIGEST).signed(ISSUER, RUN_ID)
    return issued.bound(bearer, RUN_ID, who.peer_id)


def learn(book: AddressBook, who: Identity, global_step: int, *, invite: int | None = None, place: int = 1, finished: bool = False) -> None:
    credential = None if invite is None else by_invite(who, invite)
    address = f"/ip4/20.{place}.0.{1 + who.peer_id.raw[-1] % 200}/tcp/4001"
    book.learn(MemberRecord(RUN_ID, who.peer_id, (address,), global_step, finished, 1, NOW_S + 90, credential).signed(who), 0.0)


def add_identities(book: AddressBook, num: int, global_step: int, invite: int) -> None:
    """Add identities with one invite, each with a network of its own."""
    for number in range(num):
        learn(book, somebody(500 + number), global_step, invite=invite, place=100 + number % 100, finished=True)


def meet_all(book: AddressBook) -> None:
    for entry in book.live(0.0):
        book.note_meeting(entry.peer_id, 0.0, entry.global_step)


@pytest.mark.parametrize(
    ("clocks", "typical"), [([], 0), ([7], 7), ([1, 9], 1), ([1, 5, 9], 5), ([1, 5, 6, 9], 5), ([0, 0, 0, 10**9], 0), ([0, 7], 7)]
)
def test_at_most_half_of_the_peers_are_behind_the_typical_clock(clocks: list[int], typical: int) -> None:
    assert groups_of(clocks).typical_global_step(0.0, 1000) == typical


def test_a_single_malicious_peer_does_not_move_the_typical_clock() -> None:
    for claimed in (1, 900, 10**9):
        assert groups_of([102, claimed]).typical_global_step(0.0, 1000, 100) in (100, 102)
    assert groups_of([900]).typical_global_step(0.0, 1000, 100) == 100, "one against one"
    assert groups_of([900, 0, 0, 0]).typical_global_step(0.0, 1000, 0) == 0, "where all are at the start"
    assert groups_of([100, 102, 104, 2**40]).typical_global_step(0.0, 2**41) == 102


def test_a_run_has_begun_if_half_of_the_announced_peers_have() -> None:
    for clocks, has_begun in (([], False), ([0], False), ([0, 7], True), ([0, 7, 0], False), ([0, 7, 0, 8], True)):
        assert groups_of(clocks).half_agree(groups_of(clocks).voters(0.0), lambda entry: entry.global_step > 0) == has_begun


def test_peers_that_send_no_record_are_grouped_by_the_invite_of_their_hello(book: AddressBook) -> None:
    """Each calls from another network, so nothing else shows that they belong together."""
    learn(book, ISSUER, 100)
    learn(book, somebody(1), 102, invite=0)
    for number in range(3):
        who = somebody(500 + number)
        book.note_call(who.peer_id, 0.0, 900)
        book.shows(who.peer_id, by_invite(who, 1))
        book.connected(who.peer_id, f"/ip4/20.{number}.0.1/tcp/4001")
    meet_all(book)
    groups = SybilGroups(book, TERMS)
    assert sorted(map(len, groups.group(groups.partners(0.0)))) == [1, 1, 3]
    assert groups.typical_global_step(0.0, 1000) == 102


@pytest.mark.parametrize("num_identities", [1, 6, 100])
@pytest.mark.parametrize("have_met", [False, True])
def test_one_invite_is_one_group_with_any_number_of_identities(book: AddressBook, num_identities: int, have_met: bool) -> None:
    learn(book, ISSUER, 100)
    learn(book, somebody(1), 102, invite=0, place=2)
    add_identities(book, num_identities, 900, invite=1)
    if have_met:
        meet_all(book)
    groups = SybilGroups(book, TERMS)
    voters = groups.voters(0.0)
    assert groups.typical_global_step(0.0, 1000, 100) == 100
    assert not groups.half_agree(voters, lambda entry: entry.finished, own=False)
    assert not groups.half_list(voters, [entry.peer_id for entry in book.live(0.0) if entry.global_step == 900], 3)


@pytest.mark.parametrize("num_identities", [2, 100])
def test_one_invite_is_one_group_also_where_its_identities_alone_are_at_the_end(book: AddressBook, num_identities: int) -> None:
    learn(book, ISSUER, 100)
    learn(book, somebody(1), 102, invite=0, place=2)
    add_identities(book, num_identities, 900, invite=1)
    meet_all(book)
    groups = SybilGroups(book, TERMS)
    at_end = [entry for entry in groups.partners(0.0) if entry.finished]
    assert len(at_end) == num_identities
    assert groups.share(at_end, lambda entry: True, own=False) == pytest.approx(1 / 2)


@pytest.mark.parametrize("num_strangers", [3, 100])
def test_strangers_have_no_vote_beside_partners_whatever_they_claim(book: AddressBook, num_strangers: int) -> None:
    for number in (1, 2, 3):
        learn(book, somebody(number), 100 + number, invite=0)
    groups = SybilGroups(book, TERMS)
    assert groups.typical_global_step(0.0, 1000) == 102 and not groups.partners(0.0), "a newcomer has met nobody"
    meet_all(book)
    for number in range(num_strangers):
        learn(book, somebody(500 + number), 900, invite=number % 3, place=1, finished=True)
    assert groups.typical_global_step(0.0, 1000, 100) == 101
    assert len(groups.voters(0.0)) == 3
    assert not groups.half_agree(groups.partners(0.0), lambda entry: entry.finished, own=False)


def test_invites_used_in_one_network_are_one_group_by_connections_not_by_claims(book: AddressBook) -> None:
    for number in (0, 1, 2):
        learn(book, somebody(number + 1), 900, invite=number, place=9)
    learn(book, ISSUER, 100)
    meet_all(book)
    groups = SybilGroups(book, TERMS)
    assert [len(group) for group in groups.group(book.live(0.0))] == [1, 1, 1, 1]
    for number in (0, 1, 2):
        book.connected(somebody(number + 1).peer_id, f"/ip4/20.9.0.{number}/tcp/1")
    assert [len(group) for group in groups.group(book.live(0.0))] == [3, 1]
    assert groups.typical_global_step(0.0, 1000, 90) == 100


def test_peers_of_one_invite_count_once_unless_we_hold_it_or_all_do(book: AddressBook) -> None:
    for number in (1, 2, 3):
        learn(book, somebody(number), 100, invite=0, place=number)
    groups, guests = SybilGroups(book, TERMS), book.live(0.0)
    assert groups.num_apart(guests, ME.peer_id, None, 1.0) == 3, "the whole run has one invite"
    learn(book, ISSUER, 100)
    issuer = book.get(ISSUER.peer_id)
    assert groups.num_apart(guests, ME.peer_id, None, 1.0) == 1
    assert groups.num_apart([*guests, issuer], ME.peer_id, None, 1.0) == 2
    bound = by_invite(ME, 0)
    assert groups.num_apart(guests, ME.peer_id, bound, 1.0) == 3, "they are as we are"
    assert groups.num_apart([*guests, issuer], ME.peer_id, bound, 1.0) == 2
    assert groups.num_apart([], ME.peer_id, bound, 1.0) == 0


@pytest.mark.parametrize(("num_here", "num_there", "is_more"), [(3, 5, False), (8, 10, False), (4, 4, False), (5, 3, True), (3, 1, True)])
def test_peers_of_our_invite_are_no_more_than_a_larger_stage_with_another_group(
    book: AddressBook, num_here: int, num_there: int, is_more: bool
) -> None:
    """All in sight have our invite, but for one of those: these are counted as peers, and those as two groups."""
    for number in range(1, num_here + num_there):
        learn(book, somebody(number), 100, invite=0, place=number)
    guests = book.live(0.0)
    learn(book, ISSUER, 100)
    issuer = book.get(ISSUER.peer_id)
    assert issuer is not None
    bound = by_invite(ME, 0)
    here, there = guests[:num_here], [*guests[num_here:], issuer]
    assert len(there) == num_there
    assert SybilGroups(book, TERMS).are_more(here, there, ME.peer_id, bound, 1.0) is is_more


def test_an_invite_used_in_the_networks_of_others_joins_no_two_of_them(book: AddressBook) -> None:
    for number in (0, 1):
        learn(book, somebody(number + 1), 100, invite=number, place=1 + number)
        book.connected(somebody(number + 1).peer_id, f"/ip4/20.{1 + number}.0.1/tcp/1")
    for number in (0, 1):
        learn(book, somebody(8 + number), 900, invite=2, place=1 + number)
        book.connected(somebody(8 + number).peer_id, f"/ip4/20.{1 + number}.0.9/tcp/1")
    meet_all(book)
    groups = SybilGroups(book, TERMS)
    assert len(groups.group(book.live(0.0))) == 3
    assert groups.typical_global_step(0.0, 1000) == 100


def test_in_an_open_run_each_network_of_partners_is_a_group(book: AddressBook) -> None:
    for number in range(1, 8):
        learn(book, somebody(number), 900, place=number)
        book.connected(somebody(number).peer_id, f"/ip4/20.40.0.{number}/tcp/1")
    for number, place in ((20, 21), (30, 31)):
        learn(book, somebody(number), 100, place=place)
        book.connected(somebody(number).peer_id, f"/ip4/20.{place}.0.1/tcp/1")
    meet_all(book)
    assert SybilGroups(book, OPEN).typical_global_step(0.0, 1000, 90) == 100


def test_a_restarted_peer_knows_whom_it_has_met(book: AddressBook, tmp_path: Path) -> None:
    again = AddressBook(ME.peer_id)
    for number in (1, 2):
        learn(book, somebody(number), 100, invite=0)
    book.note_meeting(somebody(1).peer_id, 0.0, 100)
    (tmp_path / "peers.json").write_bytes(book.to_bytes(0.0))
    again.load(tmp_path / "peers.json", 0.0)
    for number in (1, 2):
        learn(again, somebody(number), 100 * number, invite=0)
    assert [entry.peer_id for entry in SybilGroups(again, TERMS).voters(0.0)] == [somebody(1).peer_id]


def test_the_first_order_of_writers_begins_with_the_peers_of_the_manifest() -> None:
    groups = SybilGroups(AddressBook(ME.peer_id), replace(TERMS, members=frozenset({somebody(1).peer_id})))
    named, guests = [ISSUER, somebody(1)], [somebody(number) for number in range(2, 200)]

    def order(number: int) -> list[Identity]:
        return sorted([*guests, *named], key=lambda who: groups.writing_place(who.peer_id, None, number))

    assert set(order(0)[:2]) == set(named)
    assert set(order(1)[:2]) != set(named), "one whose result most refuse would write each time"
    assert order(1) != order(2)
