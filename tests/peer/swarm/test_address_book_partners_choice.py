"""The address book: the choice of partners, back-offs, and bounds that other peers cannot exceed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from gossamer.peer.swarm import address_book as partners
from gossamer.peer.swarm.address_book import (
    BACK_OFF_FAILED_S,
    BACK_OFF_REFUSED_S,
    BACK_OFF_S,
    BAN_S,
    FORGET_S,
    KEPT,
    MAX_BANS,
    MAX_ENTRIES,
    MAX_HINTS,
    SILENCE_S,
    AddressBook,
)
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.records import MemberRecord
from tests.protocol.peers import seeded
from tests.protocol.samples import NOW_S, RUN_ID

ME = seeded(1).peer_id
ADDRESS = "/ip4/203.0.113.5/tcp/4001"


def others(num: int) -> list[PeerId]:
    return [seeded(number).peer_id for number in range(2, num + 2)]


def book_of(peers: list[PeerId], now_s: float = 0.0) -> AddressBook:
    book = AddressBook(ME)
    for peer in peers:
        book.add_address(peer, ADDRESS, now_s)
    return book


def record(identity: Identity, sequence: int = 1, global_step: int = 0, *, finished: bool = False) -> MemberRecord:
    return MemberRecord(RUN_ID, identity.peer_id, (ADDRESS,), global_step, finished, sequence, NOW_S + 90).signed(identity)


def back_off_s(book: AddressBook, now_s: float) -> float:
    soonest_s = book.soonest_s(now_s)
    assert soonest_s is not None
    return soonest_s - now_s


def test_the_choice_is_uniform_over_the_ready_peers() -> None:
    peers = others(8)
    book, rng = book_of(peers), random.Random(0)
    book.note_failure(peers[0], 0.0)
    book.ban(peers[1], 0.0, "a test")
    chosen = [book.choose(0.5, rng, exclude={peers[2]}) for _ in range(5000)]
    counts = Counter(entry.peer_id for entry in chosen if entry)
    assert set(counts) == set(peers[3:])
    assert all(850 < count < 1150 for count in counts.values())  # 1000 +- 5 standard deviations


def test_the_last_partners_are_skipped_if_there_are_enough_others() -> None:
    peers, rng = others(8), random.Random(0)
    book = book_of(peers)
    for peer in peers[:4]:
        book.note_meeting(peer, 1.0, 0)
    chosen = {entry.peer_id for _ in range(500) if (entry := book.choose(2.0, rng))}
    assert chosen == {peers[0], *peers[4:]}
    pair = book_of(peers[:1])
    pair.note_meeting(peers[0], 1.0, 0)
    entry = pair.choose(2.0, rng)
    assert entry is not None and entry.peer_id == peers[0]  # there is no other peer


def test_an_empty_book_has_no_choice_and_this_peer_is_never_chosen() -> None:
    book = book_of([ME])
    book.note_call(ME, 0.0, 5)
    book.learn(record(seeded(1)), 0.0)
    assert book.choose(0.0, random.Random(0)) is None and book.soonest_s(0.0) is None


@pytest.mark.parametrize(("what", "most_s"), [("failed", BACK_OFF_FAILED_S), ("refused", BACK_OFF_REFUSED_S)])
def test_back_offs_double_up_to_a_bound_and_end_with_a_meeting(what: str, most_s: float) -> None:
    (peer,) = others(1)
    book, rests = book_of([peer]), list[float]()
    for _ in range(40):
        (book.note_failure if what == "failed" else book.note_refusal)(peer, 0.0)
        rests.append(back_off_s(book, 0.0))
    assert rests == [min(most_s, BACK_OFF_S * 2.0**number) for number in range(40)]
    assert book.choose(most_s - 0.1, random.Random(0)) is None and book.choose(most_s, random.Random(0)) is not None
    book.note_meeting(peer, 1.0, 0)
    assert back_off_s(book, 1.0) == 0.0
    book.note_failure(peer, 1.0)
    assert back_off_s(book, 1.0) == BACK_OFF_S


def test_a_call_does_not_end_a_back_off_and_new_weights_end_that_after_refusals() -> None:
    failing, refusing = others(2)
    book = book_of([failing, refusing])
    for _ in range(6):
        book.note_failure(failing, 0.0)
        book.note_refusal(refusing, 0.0)
    for peer in (failing, refusing):
        book.note_call(peer, 1.0, 0)
    assert book.choose(1.0, random.Random(0)) is None
    book.forget_refusals(2.0)
    entry = book.choose(2.0, random.Random(0))
    assert entry is not None and entry.peer_id == refusing


def test_a_ban_lasts_a_day_whatever_the_peer_announces() -> None:
    identity = seeded(2)
    book = book_of([identity.peer_id])
    book.ban(identity.peer_id, 0.0, "a test")
    book.learn(record(identity), BAN_S - 2)
    book.note_call(identity.peer_id, BAN_S - 1, 0)
    assert book.is_banned(identity.peer_id, BAN_S - 1) and book.live(BAN_S - 1) == []
    assert not book.is_banned(identity.peer_id, BAN_S) and len(book.live(BAN_S)) == 1


def test_a_silent_or_leaving_peer_is_not_live_until_it_announces_itself_again() -> None:
    identity = seeded(2)
    book = AddressBook(ME)
    book.learn(record(identity, 1), 0.0)
    assert book.live(FORGET_S - 1) and not book.live(FORGET_S)
    book.note_leaving(identity.peer_id, 1.0)
    assert not book.live(1.0)
    book.learn(record(identity, 1), 2.0)
    assert not book.live(2.0)  # the old record again
    book.learn(record(identity, 2), 3.0)
    assert book.live(3.0)


def test_only_a_newer_record_replaces_an_older_one() -> None:
    identity = seeded(2)
    book = AddressBook(ME)
    book.learn(record(identity, 5, 50), 0.0)
    for sequence in (4, 5):
        book.learn(record(identity, sequence, 99, finished=True), 1.0)
    (entry,) = book.live(1.0)
    assert (entry.global_step, entry.finished, entry.seen_s) == (50, False, 0.0)
    book.note_failure(identity.peer_id, 1.0)
    book.learn(record(identity, 6, 60, finished=True), 1.0 + SILENCE_S)
    assert (entry.global_step, entry.finished, entry.failures) == (60, True, 0)


def test_the_book_is_bounded_and_replaces_strangers_first() -> None:
    peers = others(MAX_ENTRIES + 20)
    book = book_of(peers[:1])
    book.note_meeting(peers[0], 0.0, 0)
    for peer in peers[1:]:
        book.add_address(peer, ADDRESS, 1.0)
    live = {entry.peer_id for entry in book.live(1.0)}
    assert len(live) == MAX_ENTRIES and peers[0] in live and peers[-1] in live
    for number in range(3 * MAX_HINTS):
        book.add_address(peers[0], f"/ip4/203.0.113.5/tcp/{4001 + number}", 1.0)
    assert len(book.get(peers[0]).addresses) == MAX_HINTS


def test_bans_are_bounded_and_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BANS <= 4096
    monkeypatch.setattr(partners, "MAX_BANS", 4)
    book, peers = AddressBook(ME), others(10)
    for number, peer in enumerate(peers):
        book.ban(peer, float(number), "a test")
    assert [peer for peer in peers if book.is_banned(peer, 10.0)] == peers[6:]


def test_the_best_peers_and_the_rest_of_the_bans_outlive_the_session(tmp_path: Path) -> None:
    path, peers = tmp_path / "peers.json", others(KEPT + 10)
    book = book_of(peers, 100.0)
    book.note_meeting(peers[-1], 101.0, 0)
    book.ban(peers[0], 101.0, "a test")
    path.write_bytes(book.to_bytes(111.0))
    again = AddressBook(ME)
    again.load(path, 5.0)  # another clock
    live = {entry.peer_id for entry in again.live(5.0)}
    assert len(live) == KEPT and peers[-1] in live and peers[0] not in live
    assert again.get(peers[-1]).addresses == (ADDRESS,)
    assert again.is_banned(peers[0], 5.0 + BAN_S - 11) and not again.is_banned(peers[0], 5.0 + BAN_S - 9)


@pytest.mark.parametrize("content", ["", "[]", '{"known": 7}', '{"known": [{"peer": "x", "addresses": ["y"]}], "banned": []}'])
def test_an_unreadable_file_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(content)
    book = AddressBook(ME)
    book.load(path, 0.0)
    book.load(tmp_path / "none", 0.0)
    assert book.live(0.0) == []
