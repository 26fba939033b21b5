"""The votes on a run's result: what is agreed by them, and which of them last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync.result_votes import AWAY_S, ResultVotes, Vote
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.tasks import loop_s
from tests.swarm.tiny import tiny_manifest, tiny_terms

R, S = b"r" * 32, b"s" * 32
TOTAL_STEPS = 1000
FETCH_S = 100.0


@dataclass
class Ending:
    """One peer's view of an ending: some partners at the end, and its own result."""

    num_partners: int
    at_hand: set[bytes] = field(default_factory=lambda: {R, S})

    def __post_init__(self) -> None:
        self.book = AddressBook(Identity(b"m" * 32).peer_id)
        self.ids = [Identity(bytes([number + 1]) * 32).peer_id for number in range(self.num_partners)]
        for peer in self.ids:
            self.book.note_meeting(peer, loop_s(), TOTAL_STEPS, finished=True)
        self.own: Any = SimpleNamespace(result=None, agreed=b"")
        self.votes = ResultVotes(SybilGroups(self.book, tiny_terms(tiny_manifest())), self.own, self.at_hand.__contains__, FETCH_S)

    def partner(self, number: int) -> KnownPeer:
        return self.book.get(self.ids[number])

    def vote(self, *votes: Vote) -> None:
        for number, vote in enumerate(votes):
            self.votes.note(self.partner(number), vote)

    def hold(self, name: bytes, *, agreed: bool = False) -> None:
        self.own.result, self.own.agreed = SimpleNamespace(name=name), name if agreed else b""


def play(story: Callable[[], None]) -> None:
    async def inside() -> None:
        await asyncio.sleep(5000.0)  # whoever has left is gone for long
        story()

    virtual_time.run(inside())


@pytest.mark.parametrize(
    ("num_partners", "num_votes", "is_agreed"),
    [(0, 0, True), (1, 0, False), (1, 1, True), (2, 1, True), (3, 1, False), (3, 2, True), (4, 2, False)],
)
def test_two_thirds_of_the_partners_and_we_agree(num_partners: int, num_votes: int, is_agreed: bool) -> None:
    def story() -> None:
        ending = Ending(num_partners)
        ending.hold(R)
        ending.vote(*[Vote(R)] * num_votes)
        assert ending.votes.is_agreed(R) == is_agreed and not ending.votes.is_agreed(S)

    play(story)


def test_one_that_tells_each_peer_another_vote_keeps_none_out() -> None:
    def story() -> None:
        ending = Ending(3)
        ending.hold(S)
        liar = Vote(S, S)
        ending.vote(Vote(R), Vote(R), liar)
        assert not ending.votes.is_agreed(R), "two of four have only voted so far"
        ending.vote(Vote(R, R), Vote(R, R), liar)
        assert ending.votes.is_agreed(R), "they have seen what the liar does not tell us"

    play(story)


@pytest.mark.parametrize("num_partners", [1, 2, 3])
def test_one_that_says_its_result_is_agreed_decides_nothing(num_partners: int) -> None:
    def story() -> None:
        ending = Ending(num_partners)
        ending.vote(Vote(R, R))
        assert not ending.votes.is_agreed(R)

    play(story)


def test_a_vote_for_an_agreed_result_counts_after_its_peer_has_left() -> None:
    def story() -> None:
        ending = Ending(2)
        ending.vote(Vote(R, R), Vote(R, R))
        for peer in ending.ids:
            ending.book.note_leaving(peer, loop_s())
        assert not ending.votes.at_end()
        assert ending.votes.is_agreed(R) and ending.votes.left_with(R) == [ending.partner(0), ending.partner(1)]
        ending.hold(S)
        assert not ending.votes.is_agreed(S)
        ending.votes.withdraw()
        assert ending.votes.is_agreed(R), "those who left have it still"
        ending.at_hand.clear()
        assert ending.votes.is_agreed(S), "nobody has the other one any more"

    play(story)


def test_a_vote_for_a_result_not_agreed_ends_when_its_peer_leaves() -> None:
    def story() -> None:
        ending = Ending(1)
        ending.hold(S)
        ending.vote(Vote(R))
        assert not ending.votes.is_agreed(S)
        ending.book.note_leaving(ending.ids[0], loop_s())
        assert ending.votes.is_agreed(S)

    play(story)


def test_one_that_has_just_gone_is_waited_for_before_a_result_is_agreed() -> None:
    async def inside() -> None:
        ending = Ending(1)
        ending.hold(R)
        ending.book.note_no_answer(ending.ids[0], loop_s())
        assert not ending.votes.at_end() and not ending.votes.is_agreed(R) and ending.votes.is_possible(R)
        await asyncio.sleep(AWAY_S)
        assert ending.votes.is_agreed(R)

    virtual_time.run(inside())


def test_two_sides_that_agreed_apart_prefer_the_same_result() -> None:
    def story() -> None:
        one, other = Ending(3), Ending(3)
        one.hold(R, agreed=True)
        one.vote(Vote(R, R), Vote(S, S), Vote(S, S))
        other.hold(S, agreed=True)
        other.vote(Vote(S, S), Vote(R, R), Vote(R, R))
        assert one.votes.is_agreed(S) != other.votes.is_agreed(R)

    play(story)


def test_a_result_is_settled_once_two_thirds_have_seen_it_agreed() -> None:
    def story() -> None:
        ending = Ending(2)
        ending.hold(R, agreed=True)
        ending.vote(Vote(R), Vote(R))
        assert ending.votes.is_agreed(R) and not ending.votes.is_settled(R)
        ending.vote(Vote(R, R))
        assert ending.votes.is_settled(R) and not ending.votes.is_settled(b"")

    play(story)


def test_a_result_that_most_have_not_seen_agreed_is_not_settled_by_their_votes() -> None:
    def story() -> None:
        ending = Ending(3)
        ending.hold(R, agreed=True)
        ending.vote(Vote(R), Vote(R), Vote(S, S))
        assert ending.votes.is_agreed(R) and not ending.votes.is_possible(R), "the third one may tell the others another vote than us"
        ending.vote(Vote(R, R), Vote(R, R), Vote(S, S))
        assert ending.votes.is_possible(R) and ending.votes.is_settled(R)

    play(story)


def test_a_result_that_others_judge_is_possible_for_as_long_as_that_may_take_in_all() -> None:
    async def inside() -> None:
        ending = Ending(2)
        ending.hold(R)
        assert not ending.votes.is_possible(R)
        ending.vote(Vote(is_fetching=True))
        assert ending.votes.is_possible(R) and ending.votes.is_judged()
        await asyncio.sleep(FETCH_S / 2)
        ending.vote(Vote())
        assert not ending.votes.is_judged()
        await asyncio.sleep(FETCH_S / 2)
        ending.vote(Vote(is_fetching=True))
        assert not ending.votes.is_possible(R) and not ending.votes.is_judged(), "it only seems to fetch"

    virtual_time.run(inside())


def test_a_partner_without_its_result_has_withdrawn_it_unless_we_had_given_it_up_too() -> None:
    def story() -> None:
        ending = Ending(1)
        ending.vote(Vote(R))
        ending.vote(Vote())
        assert ending.votes.most_withdraw()
        ending.vote(Vote(S))
        ending.votes.withdraw()
        ending.vote(Vote(S))
        ending.vote(Vote())
        assert not ending.votes.most_withdraw()

    play(story)
