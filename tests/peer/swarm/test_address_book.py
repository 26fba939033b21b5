"""The address book: what it knows of peers, the choice of partners, back-offs, and bounds that other peers cannot exceed."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest

from gossamer.peer.swarm import address_book as module
from gossamer.peer.swarm.address_book import (
    BACK_OFF_FAILED_S,
    BACK_OFF_REFUSED_S,
    BACK_OFF_S,
    BAN_S,
    FORGET_S,
    KEPT,
    MAX_BANS,
    MAX_HINTS,
    SILENCE_S,
    AddressBook,
)
from gossamer.peer.swarm.known_peer import TIMEOUT
from tests.peer.neighbours import ME, book_of, ids, moved, record, somebody

A, B, C, D = (somebody(number) for number in range(1, 5))
ADDRESS = "/ip4/192.0.2.1/tcp/{}"


def choices(book: AddressBook, now_s: float = 0.0, num: int = 300) -> Counter[str]:
    rng = random.Random(0)
    entries = [book.choose(now_s, rng) for _ in range(num)]
    return Counter(str(entry.peer_id) for entry in entries if entry)


# --------------------------------------------------------------------------- records


def test_only_a_newer_record_of_the_same_peer_counts() -> None:
    book = AddressBook(ME.peer_id)
    book.learn(record(A, 5, global_step=50), 0.0)
    for sequence in (4, 5):
        old = record(A, sequence, global_step=99, finished=True)
        assert not book.is_news(old)
        book.learn(old, 1.0)
    (entry,) = book.live(1.0)
    assert (entry.global_step, entry.finished, entry.seen_s) == (50, False, 0.0)
    book.note_failure(A.peer_id, 1.0)
    newer = moved(record(A, 5, global_step=60, finished=True), A, ADDRESS.format(1))
    assert book.is_news(newer)
    book.learn(newer, 1.0 + SILENCE_S)
    assert (entry.global_step, entry.finished, entry.failures, entry.addresses) == (60, True, 0, (ADDRESS.format(1),))


def test_a_silent_or_leaving_peer_is_not_live_until_it_announces_itself_again() -> None:
    book = book_of(A)
    book.learn(record(A), FORGET_S - 1)  # the old record again
    assert book.live(FORGET_S - 1) and not book.live(FORGET_S)
    book.note_leaving(A.peer_id, 1.0)
    assert not book.live(1.0)
    book.learn(record(A), 2.0)
    assert not book.live(2.0)
    book.learn(record(A, 2), 3.0)
    assert book.live(3.0)


def test_this_peer_is_in_no_book_of_its_own() -> None:
    book = AddressBook(ME.peer_id)
    book.learn(record(ME), 0.0)
    book.add_address(ME.peer_id, ADDRESS.format(1), 0.0)
    book.note_call(ME.peer_id, 0.0, 3)
    assert not book.live(0.0) and book.choose(0.0, random.Random(0)) is None and book.soonest_s(0.0) is None


def test_a_global_step_is_known_once_its_peer_has_signed_it() -> None:
    book = book_of(A)
    book.add_address(B.peer_id, "/ip4/192.0.2.1/tcp/1", 0.0)
    assert book.get(A.peer_id).global_step == 0 and not book.get(B.peer_id).has_global_step and not book.get(C.peer_id).has_global_step
    for peer in (B, C):
        book.note_global_step(peer.peer_id, 70)
    assert book.get(B.peer_id).global_step == 70 and not book.get(C.peer_id).has_global_step


# --------------------------------------------------------------------------- choice


def test_the_choice_is_uniform_over_the_ready_peers() -> None:
    failed, banned, excluded, left, *ready = (somebody(number) for number in range(1, 10))
    book = book_of(failed, banned, excluded, left, *ready)
    book.note_failure(failed.peer_id, 0.0)
    book.ban(banned.peer_id, 0.0, "a test")
    book.note_leaving(left.peer_id, 0.0)
    rng = random.Random(0)
    counts = Counter(entry.peer_id for _ in range(5000) if (entry := book.choose(0.5, rng, exclude={excluded.peer_id})))
    assert set(counts) == {*ids(*ready)}
    assert all(850 < count < 1150 for count in counts.values())  # 1000 +- 5 standard deviations
    assert book.choose(0.5, rng, exclude={excluded.peer_id, *ids(*ready)}) is None and book.choose(FORGET_S, rng) is None


def test_a_partner_at_rest_counts_as_absent() -> None:
    resting = {A.peer_id}
    book = AddressBook(ME.peer_id, resting.__contains__)
    book.learn(record(A), 0.0)
    assert book.choose(0.0, random.Random(0)) is None and book.soonest_s(0.0) is None
    book.learn(record(B), 0.0)
    book.note_meeting(A.peer_id, 0.0, 1)
    for _ in range(40):
        book.note_failure(B.peer_id, 0.0)
    assert choices(book, BACK_OFF_FAILED_S) == {str(B.peer_id): 300}, "nobody familiar is there beside the stranger"
    assert book.soonest_s(0.0) == BACK_OFF_FAILED_S
    resting.clear()
    assert book.soonest_s(0.0) == 0.0 and choices(book, BACK_OFF_FAILED_S)[str(A.peer_id)] > 200


def test_the_last_partners_are_skipped_in_a_large_swarm_only() -> None:
    few, many = book_of(A, B), book_of(*(somebody(number) for number in range(1, 9)))
    for book, met in ((few, (A, B)), (many, (D, A, B, C))):
        for peer in met:
            book.note_meeting(peer.peer_id, 0.0, 5)
    assert set(choices(few)) == {str(A.peer_id), str(B.peer_id)}, "two partners in turn are a fixed rotation"
    assert set(choices(many)) == {str(somebody(number).peer_id) for number in range(4, 9)}


@pytest.mark.parametrize(("fail", "most_s"), [("note_failure", BACK_OFF_FAILED_S), ("note_refusal", BACK_OFF_REFUSED_S)])
def test_back_offs_double_up_to_a_bound_and_end_with_a_meeting(fail: str, most_s: float) -> None:
    book, rests = book_of(A), list[float | None]()
    for _ in range(40):
        getattr(book, fail)(A.peer_id, 0.0)
        rests.append(book.soonest_s(0.0))
    assert rests == [min(most_s, BACK_OFF_S * 2.0**number) for number in range(40)]
    assert book.choose(most_s - 0.1, random.Random(0)) is None and book.choose(most_s, random.Random(0)) is not None
    book.note_meeting(A.peer_id, 1.0, 0)
    assert book.soonest_s(1.0) == 1.0
    getattr(book, fail)(A.peer_id, 1.0)
    assert book.soonest_s(1.0) == 1.0 + BACK_OFF_S


def test_a_call_does_not_end_a_back_off_and_new_weights_end_that_after_refusals() -> None:
    book = book_of(A, B)
    for _ in range(6):
        book.note_failure(A.peer_id, 0.0)
        book.note_refusal(B.peer_id, 0.0)
    for peer in (A, B):
        book.note_call(peer.peer_id, 1.0, 0)
    assert book.choose(1.0, random.Random(0)) is None
    book.forget_refusals()
    assert set(choices(book, 2.0)) == {str(B.peer_id)}


def test_failures_of_our_own_network_end_every_back_off_but_no_rest() -> None:
    book = book_of(A, B, C, D)
    for peer in (A, B, C, D):
        book.note_meeting(peer.peer_id, 0.0, 1)
    for _ in range(5):
        book.note_failure(A.peer_id, 1.0)
    book.note_broken_meeting(B.peer_id, 1.0, 30.0)
    book.note_held(B.peer_id, 1.0, 30.0, breaks_off=True)
    book.rest(C.peer_id, 1.0, 600.0)
    book.note_failure(C.peer_id, 1.0)
    book.forget_failures()
    for peer in (A, B, D):
        assert book.is_welcome(peer.peer_id, 2.0) and book.get(peer.peer_id).is_familiar
        assert book.soonest_s(2.0, {A.peer_id, B.peer_id, C.peer_id, D.peer_id} - {peer.peer_id}) == 2.0
    assert book.soonest_s(2.0, {A.peer_id, B.peer_id, D.peer_id}) == 601.0 and not book.is_welcome(C.peer_id, 2.0)


def test_the_back_off_is_at_least_twice_our_wait_up_to_the_bound() -> None:
    for waited_s, back_off_s in ((0.1, BACK_OFF_S), (10.0, 20.0), (1000.0, BACK_OFF_FAILED_S)):
        for fail in (AddressBook.note_failure, AddressBook.note_broken_meeting):
            book = book_of(A)
            fail(book, A.peer_id, 5.0, waited_s)
            assert book.soonest_s(5.0) == 5.0 + back_off_s
            if waited_s > BACK_OFF_S:
                book.note_no_answer(A.peer_id, 5.5)
                assert book.soonest_s(5.5) == 5.0 + back_off_s


def test_the_timeout_follows_the_typical_duration_and_ends_with_a_failure() -> None:
    book, (times, least_s) = book_of(A), TIMEOUT
    assert book.get(A.peer_id).timeout_s == book.get(B.peer_id).timeout_s == math.inf
    book.note_meeting(A.peer_id, 0.0, 1, took_s=0.1)
    assert book.get(A.peer_id).timeout_s == least_s
    book.note_meeting(A.peer_id, 0.0, 2, took_s=3.0)
    assert book.get(A.peer_id).timeout_s == times * 3.0, "one long meeting is enough"
    book.note_meeting(A.peer_id, 0.0, 3, took_s=2.0)
    assert times * 2.0 < book.get(A.peer_id).timeout_s < times * 3.0
    for forget in (lambda: book.note_refusal(A.peer_id, 0.0), lambda: book.note_answer(A.peer_id, 0.0)):
        book.note_broken_meeting(A.peer_id, 0.0, 20.0)
        assert book.get(A.peer_id).timeout_s == math.inf
        forget()
        assert book.get(A.peer_id).timeout_s == times * 20.0, "our last wait outlasts the failure"


def test_the_back_off_after_not_now_is_short_and_does_not_grow() -> None:
    book = book_of(A)
    for _ in range(10):
        book.note_not_ready(A.peer_id, 0.0)
    assert book.soonest_s(0.0) == 1.0


def test_a_peer_that_announces_itself_after_a_gap_is_tried_at_once() -> None:
    book = book_of(A, B)
    for _ in range(10):
        book.note_failure(A.peer_id, 0.0)
        book.note_failure(B.peer_id, 0.0)
    book.learn(record(B, 2), SILENCE_S - 20)  # B announces itself regularly and cannot be reached
    book.learn(record(A, 2), SILENCE_S + 1)
    ready = book.choose(SILENCE_S + 1, random.Random(0))
    assert ready is not None and ready.peer_id == A.peer_id
    book.note_call(B.peer_id, SILENCE_S + 1, 7)  # a call does not end the back-off
    assert {str(A.peer_id)} == set(choices(book, SILENCE_S + 1))


def test_a_peer_that_breaks_off_meetings_is_refused_for_longer_each_time() -> None:
    book = book_of(A, B)
    book.note_failure(B.peer_id, 0.0)
    assert book.is_welcome(B.peer_id, 0.0), "a peer that we cannot reach may reach us"
    assert book.is_welcome(C.peer_id, 0.0)
    now_s = 0.0
    for back_off_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, BACK_OFF_FAILED_S, BACK_OFF_FAILED_S):
        book.note_call(A.peer_id, now_s, 7)
        book.note_broken_meeting(A.peer_id, now_s)
        assert not book.is_welcome(A.peer_id, now_s + back_off_s - 0.1) and book.is_welcome(A.peer_id, now_s + back_off_s)
        now_s += back_off_s
    book.note_broken_meeting(A.peer_id, now_s)
    book.note_meeting(A.peer_id, now_s, 7)
    assert book.is_welcome(A.peer_id, now_s)
    book.note_broken_meeting(A.peer_id, now_s)
    assert not book.is_welcome(A.peer_id, now_s + BACK_OFF_S - 0.1) and book.is_welcome(A.peer_id, now_s + BACK_OFF_S)


# --------------------------------------------------------------------------- bounds


def test_a_ban_lasts_a_day_whatever_the_peer_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    book = book_of(A)
    book.ban(A.peer_id, 0.0, "a test")
    book.learn(record(A, 2), BAN_S - 2)
    book.note_call(A.peer_id, BAN_S - 1, 0)
    assert book.is_banned(A.peer_id, BAN_S - 1) and not book.live(BAN_S - 1) and not book.is_banned(B.peer_id, 0.0)
    assert not book.is_banned(A.peer_id, BAN_S) and len(book.live(BAN_S)) == 1
    assert MAX_BANS <= 4096
    monkeypatch.setattr(module, "MAX_BANS", 4)
    peers = ids(*(somebody(number) for number in range(10)))
    for number, peer in enumerate(peers):
        book.ban(peer, BAN_S + number, "a test")
    assert [peer for peer in peers if book.is_banned(peer, BAN_S + 10.0)] == peers[6:], "the latest stay"


def test_the_book_is_bounded_and_replaces_strangers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 20)
    book = book_of(A)
    book.note_meeting(A.peer_id, 0.0, 1)
    for number in range(100, 200):
        book.note_call(somebody(number).peer_id, float(number), 1)
        book.add_address(somebody(number + 100).peer_id, ADDRESS.format(1), float(number))
    live = {entry.peer_id for entry in book.live(300.0)}
    assert len(book) == len(live) == 20 and A.peer_id in live
    for number in range(50):
        book.add_address(A.peer_id, ADDRESS.format(number), 300.0)
    assert len(book.get(A.peer_id).addresses) == MAX_HINTS and book.get(A.peer_id).addresses[-1] == ADDRESS.format(49)


# --------------------------------------------------------------------------- disk


def test_the_best_peers_and_the_rest_of_the_bans_outlive_the_session(tmp_path: Path) -> None:
    path, peers = tmp_path / "peers.json", [somebody(number) for number in range(1, KEPT + 11)]
    book = book_of(*peers, now_s=10.0)
    book.note_meeting(peers[-1].peer_id, 11.0, 5)
    book.ban(peers[0].peer_id, 11.0, "a test")
    path.write_bytes(book.to_bytes(111.0))
    later = AddressBook(ME.peer_id)
    later.load(path, 5.0)  # another loop: its clock starts at 0
    live = {entry.peer_id for entry in later.live(5.0)}
    assert len(live) == KEPT and peers[-1].peer_id in live and peers[0].peer_id not in live
    assert later.get(peers[-1].peer_id).addresses == ("/ip4/192.0.2.7/tcp/4001",)
    assert later.is_banned(peers[0].peer_id, 5.0 + BAN_S - 101) and not later.is_banned(peers[0].peer_id, 5.0 + BAN_S - 99)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "3", '{"known": 7}', '{"known": [{}], "banned": []}', '{"known": [3], "banned": []}',
        '{"known": [{"peer": "nonsense", "addresses": ["x"]}], "banned": []}',
        '{"known": [], "banned": [{"peer": "nonsense", "banned_for_s": 3}]}',
        '{"known": [], "banned": [{"peer": null, "banned_for_s": 3}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(content)
    book = AddressBook(ME.peer_id)
    book.load(path, 0.0)
    book.load(tmp_path / "missing.json", 0.0)
    assert not book.live(0.0)
