from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gossamer.peer.trainer.interval import (
    LEAST_STEPS,
    LONGEST_STEPS,
    MOST_FOR_PROCESSOR,
    SHORTEST_STEPS,
    Interval,
    Spent,
    afforded_steps,
    estimate,
    line_use,
    step_hop_bytes,
    traffic,
    traffic_expected,
)
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan, StageTerms

STEP_S = 0.5
ROUND_BYTES = 1_000_000


def steady(
    *,
    bytes_per_s: float = 0.0,
    blocked_s: float = 0.0,  # in a meeting
    cpu_s: float = 0.0,  # of synchronization, in a meeting
    resting: float = 0.0,  # share of a processor that the node takes without any
    start_steps: int = 10,
    seconds: int = 600,
) -> Interval:
    """Return the interval of a peer whose meetings cost so much, once it has found it."""
    interval, spent = Interval(start_steps, ROUND_BYTES), Spent()
    interval.update(spent, bytes_per_s)
    for _ in range(seconds):
        meetings = 1 / STEP_S / (0.7 * interval.steps)
        spent = Spent(
            own_steps=spent.own_steps + round(1 / STEP_S),
            train_s=spent.train_s + 1.0,
            blocked_s=spent.blocked_s + meetings * blocked_s,
            training_cpu_s=spent.training_cpu_s + 1.0,
            sync_cpu_s=spent.sync_cpu_s + meetings * cpu_s + resting,
        )
        interval.update(spent, bytes_per_s)
    return interval


def test_a_peer_with_time_and_a_line_calls_at_every_step() -> None:
    interval = steady(bytes_per_s=1e9, blocked_s=1e-4, cpu_s=1e-3)
    assert interval.steps == SHORTEST_STEPS
    assert "once a step" in interval.reason


@pytest.mark.parametrize("megabits", [0.5, 2, 5])
def test_half_of_the_line_is_the_meetings(megabits: float) -> None:
    bytes_per_s = megabits * 1e6 / 8
    interval = steady(bytes_per_s=bytes_per_s)
    sent_bytes_per_s = ROUND_BYTES / (0.7 * interval.steps * STEP_S)
    assert 0.4 * bytes_per_s <= sent_bytes_per_s <= 0.6 * bytes_per_s
    assert interval.is_for_line
    assert f"{megabits:g} Mbit/s" in interval.reason
    assert abs(interval.steps - afforded_steps(ROUND_BYTES, bytes_per_s, STEP_S)) <= 0.15 * interval.steps


def test_meetings_leave_nine_tenths_of_the_line_to_micro_batches() -> None:
    whole = ModelPlan(1, (FragmentTerms(0, 4_000_000, 1),), 8_000_000)
    staged = replace(whole, stage=StageTerms(0, 2, 516, 8_448, 4))
    beside_hops, alone = (traffic_expected(plan, "auto", 1e6, STEP_S).inner_steps for plan in (staged, whole))
    assert beside_hops == pytest.approx(5 * alone, rel=0.1)


@pytest.mark.parametrize("start_steps", [1, 4, 10, 300])
@pytest.mark.parametrize(("cost", "share"), [("blocked_s", 0.01), ("cpu_s", 0.1)])
def test_what_a_meeting_costs_stays_within_its_share(cost: str, share: float, start_steps: int) -> None:
    per_meeting_s = 0.7 * 6 * share * STEP_S  # so that about six steps are right
    interval = steady(**{cost: per_meeting_s}, start_steps=start_steps)
    assert interval.steps == pytest.approx(6, rel=0.25)
    assert not interval.is_for_line


def test_what_a_node_costs_at_rest_does_not_drive_meetings_away() -> None:
    assert steady(resting=0.2).steps <= MOST_FOR_PROCESSOR


def test_the_tightest_limit_holds() -> None:
    interval = steady(bytes_per_s=2e6 / 8, blocked_s=0.07, cpu_s=0.1)
    assert interval.is_for_line
    assert interval.steps == pytest.approx(ROUND_BYTES / (0.7 * 0.5 * 0.25e6 * STEP_S), rel=0.15)


def test_a_line_that_carries_next_to_nothing_still_has_an_interval() -> None:
    assert steady(bytes_per_s=1.0).steps == LONGEST_STEPS


def test_the_reason_names_the_rate_of_a_fast_line_in_gbit() -> None:
    interval = Interval(10, 1000 * ROUND_BYTES)
    interval.update(Spent(), 341.25e6)
    interval.update(Spent(own_steps=100, train_s=10.0), 341.25e6)
    assert interval.reason.endswith("% of the line: 2.73 Gbit/s")


def test_nothing_is_concluded_from_the_first_moments() -> None:
    interval = Interval(10, ROUND_BYTES)
    interval.update(Spent(), 0.0)
    assert not interval.update(Spent(own_steps=1, train_s=0.5, blocked_s=0.4), 0.0)
    assert interval.steps == 10


def test_an_interval_that_is_right_stays() -> None:
    interval, changes, spent = steady(blocked_s=0.03), 0, Spent()
    for second in range(200):
        noise = 1.0 + 0.1 * math.sin(second)
        spent = Spent(spent.own_steps + 2, spent.train_s + 1.0, spent.blocked_s + noise * 2 / (0.7 * interval.steps) * 0.03, 0.0, 0.0)
        changes += interval.update(spent, 0.0)
    assert changes <= 2


def test_the_expected_traffic_is_that_of_the_estimate() -> None:
    plan = ModelPlan(1, (FragmentTerms(0, 400_000, 1), FragmentTerms(0, 100_000, 1)), 2_000_000)
    for bytes_per_s in (1e4, 1e5, 1e9, math.inf):
        found = traffic_expected(plan, "auto", bytes_per_s, STEP_S)
        same = estimate(plan, 200, bytes_per_s, STEP_S)
        assert (found.day_bytes, found.inner_steps) == (same.day_bytes, same.interval_steps)
    fixed = traffic_expected(plan, 50, math.inf, STEP_S)
    assert fixed.day_bytes == pytest.approx(plan.round_bytes * 86_400 / (0.7 * 50 * STEP_S))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_hops_count_beside_meetings(stage: int) -> None:
    """Four micro-batches of 32 tokens in a step; eight batches of held-out text go up every 100 steps."""
    terms = StageTerms(stage, 3, 4 * 32, 132 * 32, 4)
    plan = ModelPlan(1, (FragmentTerms(0, 400_000, 1),), 2_000_000, terms)
    up, down = 136 * 32 * 4, 132 * 32 * 4
    sent = {0: 1.08 * up, 1: 1.08 * up + down, 2: down}[stage]
    received = {0: down, 1: 1.08 * up + down, 2: 1.08 * up}[stage]
    assert step_hop_bytes(terms) == pytest.approx((sent, received))
    met = replace(plan, stage=None)
    found, alone = traffic(plan, 4, 0.5, is_measured=True), traffic(met, 4, 0.5, is_measured=True)
    assert found.day_hops == pytest.approx(found.day_bytes - alone.day_bytes) == pytest.approx(86_400 / 0.5 * sent)
    assert found.day_received - alone.day_received == pytest.approx(86_400 / 0.5 * received)
    assert alone.day_received == alone.day_bytes and not alone.day_hops


def test_the_share_that_a_line_feeds_follows_from_a_step_that_computes() -> None:
    terms = StageTerms(2, 3, 4 * 32, 132 * 32, 4)
    received = 1.08 * 136 * 32 * 4
    assert line_use(terms, 0.5, received) == pytest.approx(0.5)
    assert line_use(terms, 0.5, 1e9) == 1.0
    assert math.isnan(line_use(terms, 0.5, 0.0)), "the line is not known yet"


def test_many_quick_steps_are_enough_for_the_first_change() -> None:
    interval = Interval(SHORTEST_STEPS, ROUND_BYTES)
    interval.update(Spent(), 0.0)
    assert not interval.update(Spent(LEAST_STEPS - 1, train_s=1.0, blocked_s=0.02), 0.0)
    assert interval.update(Spent(LEAST_STEPS, train_s=1.1, blocked_s=0.02), 0.0)
    assert not interval.update(Spent(3 * LEAST_STEPS, train_s=3.3, blocked_s=0.2), 0.0), "later ones rest on seconds"
