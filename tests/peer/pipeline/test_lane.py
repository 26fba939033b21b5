"""Credit on one lane: a smaller window holds once the partner must know it, and no honest partner is ever beyond it."""

from __future__ import annotations

import random
from collections import deque

import pytest

from gossamer.peer.pipeline.lane import DownLane, UpLane, typical_step
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import WINDOW
from tests.protocol.samples import ALICE, BOB

WIDE, NARROW = 6, 2


def filled() -> UpLane:
    lane = UpLane(1, ALICE.peer_id, WIDE)
    for number in range(1, WIDE + 1):
        lane.accept(number)
        lane.unanswered[number] = number
    return lane


def answer(lane: UpLane, number: int, window: int) -> None:
    lane.grant(window)
    lane.num_answering += 1
    lane.release(number, is_answering=True, is_answered=True)


def test_a_smaller_window_holds_once_a_hop_shows_that_the_partner_knows_it() -> None:
    lane = filled()
    answer(lane, 1, NARROW)
    lane.accept(7)  # one answer is read: it grants less
    lane.unanswered[7] = 7
    with pytest.raises(BadMessage, match="window of 2"):
        lane.accept(8)


def test_a_hop_that_replaces_a_withdrawn_one_shows_nothing() -> None:
    lane = filled()
    answer(lane, 1, NARROW)
    lane.release(2, is_answering=False, is_answered=False)
    lane.accept(7)
    lane.unanswered[7] = 7
    assert lane.most_granted == WIDE
    lane.accept(8)
    assert lane.most_granted == NARROW


def test_all_hops_of_a_lane_may_be_withdrawn_while_their_answers_come() -> None:
    lane = DownLane(1, BOB.peer_id, WINDOW, answers=WINDOW)
    numbers = [lane.send(hop) for hop in range(WINDOW)]
    for number in numbers:
        lane.withdraw(number, measure=False)
    assert [lane.take_answer(number, WINDOW) for number in numbers] == [(None, False)] * WINDOW


class Honest:
    """Both ends of a lane, and what is on its way in each direction, in order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.low, self.high = DownLane(1, BOB.peer_id, WIDE, answers=100), UpLane(1, ALICE.peer_id, WIDE)
        self.to_high: deque[tuple[str, int]] = deque()
        self.to_low: deque[tuple[str, int, int]] = deque()

    def step(self) -> None:
        match self.rng.choice(("send", "send", "withdraw", "arrive", "arrive", "answer", "decline", "read")):
            case "send" if self.low.credit(0.0):
                self.to_high.append(("hop", self.low.send(0)))
            case "withdraw" if self.low.unanswered and self.rng.random() < 0.3:
                number = self.rng.choice(list(self.low.unanswered))
                self.low.withdraw(number, measure=False)
                self.to_high.append(("withdrawn", number))
            case "arrive" if self.to_high:
                kind, number = self.to_high.popleft()
                if kind == "hop":
                    self.high.accept(number)
                    self.high.unanswered[number] = number
                else:
                    self.high.release(number, is_answering=False, is_answered=False)
            case "answer" if self.high.unanswered:
                number, window = self.rng.choice(list(self.high.unanswered)), self.rng.randint(1, WIDE)
                answer(self.high, number, window)
                self.to_low.append(("answer", number, window))
            case "decline" if self.high.unanswered and self.rng.random() < 0.3:
                number = self.rng.choice(list(self.high.unanswered))
                self.high.release(number, is_answering=False, is_answered=False)
                self.to_low.appendleft(("decline", number, 0))  # notices overtake
            case "read" if self.to_low:
                kind, number, window = self.to_low.popleft()
                if kind == "answer":
                    self.low.take_answer(number, window)
                else:
                    self.low.take_decline(number, -10.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_honest_partner_is_beyond_the_window(seed: int) -> None:
    lane, was_lowered = Honest(seed), False
    for _ in range(3000):
        before = lane.high.most_granted
        lane.step()  # raises BadMessage where a hop is beyond it
        was_lowered |= lane.high.most_granted < before
    assert was_lowered and lane.high.last > 200


def test_the_typical_step_of_the_lower_stage_is_that_of_its_groups() -> None:
    """Three lanes of one group count as one, and a lane without a hop as none."""

    def lane(number: int, global_step: int, *, last: int = 1) -> UpLane:
        return UpLane(number, Identity(bytes([number]) * 32).peer_id, WIDE, last=last, global_step=global_step)

    honest, hostile = [lane(1, 50), lane(2, 52)], [lane(number, 0) for number in (3, 4, 5)]
    groups = {one.partner: "hostile" for one in hostile}
    assert typical_step([], {}) == typical_step([lane(9, 70, last=0)], {}) == 0
    assert typical_step(honest, {}) == 52
    assert typical_step([*honest, *hostile], groups) == 50
    assert typical_step([*honest, lane(6, 2**40)], {}) == 52
