from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from gossamer.peer.trainer.fragment_state import (
    EARNED,
    ENOUGH,
    FIRST_ALLOWANCE,
    FULL_STEPS,
    LATEST,
    LEAST_KEPT,
    LIMIT,
    MOST_PLACES,
    UNRELATED,
    USUAL,
    Lengths,
    MergeGate,
)

WEIGHTS = 30.0  # a length
STEPS = 5  # in which it has moved


def moved(length: float, fast: float = WEIGHTS, partner: float = 0.0) -> Lengths:
    return Lengths(length, length / STEPS, fast, max(fast, partner), 0.0)


NOTHING = moved(0.0)


def merged(gate: MergeGate, gap: float, own: Lengths) -> bool:
    """Merge a gap whole if the gate accepts it and it is within the limit."""
    if gate.judge(gap, own) or gap > gate.limit(own):
        return False
    gate.accept(gap, own)
    return True


def steady(gap: float = 1.0, num_meetings: int = 20) -> MergeGate:
    """A gate that has met one after another, each as far as it has moved itself, and has no allowance left from its beginning."""
    gate = MergeGate()
    gate.restore({"reach": 0.0, "allowance": 0.0, "gaps": []})
    for _ in range(num_meetings):
        assert merged(gate, gap, moved(gap))
    return gate


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(gap: float) -> None:
    assert "not finite" in MergeGate().judge(gap, NOTHING)


def test_identical_weights_may_always_meet() -> None:
    gate = steady()
    for own in (NOTHING, moved(2.0), NOTHING):
        assert merged(gate, 0.0, own)


def test_before_the_first_meeting_the_gate_is_measured_by_the_weights() -> None:
    """Recorded: a fresh peer, its weights 25.9 long, met a host that had made 55 steps alone; the gap was 46.4."""
    assert merged(MergeGate(), 46.4, moved(0.04, 25.9, math.hypot(25.9, 46.4)))
    assert not merged(MergeGate(), FIRST_ALLOWANCE * WEIGHTS + 0.1, moved(0.0, partner=1000.0))
    reason = MergeGate().judge(FIRST_ALLOWANCE * WEIGHTS / LEAST_KEPT + 0.1, moved(0.0, partner=1000.0))
    assert "far more than the 60 that honest training explains" in reason


def explained(gate: MergeGate, own: Lengths) -> float:
    """The longest gap that is kept whole."""
    return 1e9 * gate.kept(1e9, own, 1.0)


def test_a_gap_is_clipped_to_the_partners_share_of_what_training_explains() -> None:
    gate, own = steady(), moved(1.0)
    whole, limit = explained(gate, own), gate.limit(own)
    assert gate.kept(0.0, own, 0.5) == 1.0 and gate.kept(0.5 * whole, own, 0.5) == 1.0
    assert gate.kept(whole, own, 0.5) == pytest.approx(0.5) and gate.kept(2 * whole, own, 1.0) == pytest.approx(0.5)
    assert gate.judge(1.01 * limit / LEAST_KEPT, own) and not gate.judge(0.99 * limit / LEAST_KEPT, own)


def test_a_gap_that_only_the_allowance_covers_is_clipped_to_what_training_explains() -> None:
    gate, own = steady(num_meetings=3), moved(1.0)
    assert gate.kept(LIMIT, own, 1.0) == 1.0 and gate.kept(gate.limit(own), own, 1.0) < 1.0


def test_longer_gaps_than_usual_are_clipped_once_enough_gaps_are_known() -> None:
    gate = MergeGate()
    gate.restore({"reach": 1.0, "allowance": 0.0, "gaps": []})
    before = explained(gate, NOTHING)
    gate.restore({"reach": 1.0, "allowance": 0.0, "gaps": {"a": [0.5] * (ENOUGH - 1)}})
    assert explained(gate, NOTHING) == before == pytest.approx(LIMIT)
    gate.restore({"reach": 1.0, "allowance": 0.0, "gaps": {"a": [0.5] * ENOUGH}})
    assert explained(gate, NOTHING) == pytest.approx(USUAL * 0.5)
    gate.restore({"reach": 1.0, "allowance": 0.0, "gaps": {"a": [LIMIT] * ENOUGH}})
    assert explained(gate, NOTHING) == before, "partners that send as much as is allowed do not widen the limit"


def test_a_peer_alone_for_long_may_meet_as_far_away_as_it_has_moved() -> None:
    gate = steady()
    for _ in range(11):
        gate.take_solo_step(5.0)
    assert not gate.judge(55.0, moved(5.0, fast=60.0)), "a probe shows how much of it is of use"
    assert explained(gate, moved(5.0, fast=60.0)) > 9 * explained(steady(), moved(5.0, fast=60.0))


def test_steps_that_the_clock_made_without_us_count_as_moved() -> None:
    """`moved` brings them along: who stood still may be as far from the others as they have come."""
    assert merged(steady(num_meetings=4), 12.0, moved(0.5 * (1 + 10), fast=60.0))
    assert not merged(steady(num_meetings=4), 12.0, moved(0.5, fast=60.0))


def test_a_meeting_with_a_slower_partner_takes_only_its_part_of_the_way_to_the_others_away() -> None:
    """What is left is the way to the others: a gate that forgot it would refuse the next honest partner."""
    limits = []
    for most in (1.0, 0.5, 0.0):
        gate = steady()
        gate.accept(1.5, moved(1.0), most, most)
        limits.append(gate.limit(NOTHING))
    alone = steady()
    alone.take_solo_step(1.0)
    assert limits == sorted(limits) and limits[-1] == pytest.approx(alone.limit(NOTHING), rel=0.1)


def test_what_a_partner_that_says_it_is_slow_sends_back_narrows_no_limit() -> None:
    gate = steady()
    limit = gate.limit(NOTHING)
    for _ in range(15):
        gate.accept(0.0, moved(0.2), 0.0, 0.0)
    assert gate.limit(NOTHING) > limit


def in_turn(places: str, num_meetings: int) -> MergeGate:
    """A gate that has met partners of these places in turn."""
    gate = steady(num_meetings=2)
    for number in range(num_meetings):
        gate.accept(1.0, moved(1.0), place=places[number % len(places)])
    return gate


@pytest.mark.parametrize("mirrors", ["m", "mn"])
@pytest.mark.parametrize(("noise", "left"), [(0.0, 0.99), (1.0, 0.5), (2.0, 0.15)])
def test_a_partner_that_sends_our_message_back_at_each_step_brings_us_no_nearer_to_the_others(
    mirrors: str, noise: float, left: float
) -> None:
    """Noise takes a part of it away: as long as our steps a half; twice as long nearly all, as it leads away from the others."""
    (gate, alone), step = (in_turn("abcd" + mirrors, 30) for _ in range(2)), 1.0 / STEPS
    for number in range(30):
        gate.accept(noise * step, moved(step), place=mirrors[number % len(mirrors)])
        alone.take_solo_step(step)
    assert explained(gate, NOTHING) > left * explained(alone, NOTHING)


def test_partners_met_in_turn_bring_each_other_nearer() -> None:
    assert explained(in_turn("abcd", 40), NOTHING) == pytest.approx(explained(steady(), NOTHING), rel=0.01)


def test_a_checkpoint_of_before_gaps_were_kept_by_place_is_restored_without_them() -> None:
    gate = MergeGate()
    for gaps in ({}, {"gaps": [0.5] * 15}):
        gate.restore({"reach": 1.0, "allowance": 0.0} | gaps)
        assert explained(gate, NOTHING) == pytest.approx(LIMIT)


def test_only_the_latest_gaps_of_the_places_met_last_are_kept() -> None:
    gate = MergeGate()
    for number in range(1000):
        gate.accept(1.0, moved(1.0), place=str(number % 100))
    assert len(gate.state()["gaps"]) == MOST_PLACES
    for _ in range(100):
        gate.accept(1.0, moved(1.0), place="a")
    assert len(gate.state()["gaps"]["a"]) == LATEST


def test_two_reaches_are_honest_and_more_is_not() -> None:
    gate = steady(num_meetings=3)
    limit = gate.limit(moved(1.0))
    assert LIMIT < limit < 3 * LIMIT
    assert not merged(gate, limit + 0.01, moved(1.0))
    assert merged(gate, limit, moved(1.0))


def test_a_far_partner_takes_the_allowance_with_it_and_training_earns_it_back() -> None:
    gate = MergeGate()
    full = FULL_STEPS / STEPS  # moved(1.0) each time
    gate.restore({"reach": 0.0, "allowance": full, "gaps": []})
    assert merged(gate, full, moved(1.0))
    for _ in range(4):
        assert merged(gate, 1.0, moved(1.0))
    assert not merged(gate, full, moved(1.0)), "once was enough"
    for _ in range(round(full / EARNED)):
        assert merged(gate, 1.0, moved(1.0))
    assert merged(gate, full, moved(1.0))
    for _ in range(1000):
        assert merged(gate, 1.0, moved(1.0))
    assert gate.limit(moved(1.0)) <= 3 * LIMIT + full, "there is a full one"


def test_a_peer_that_met_a_far_partner_may_be_far_from_the_others() -> None:
    """Two have never moved; one of them meets a host from afar, and then the other."""
    gate = MergeGate()
    assert merged(gate, 40.0, moved(0.01, partner=50.0))
    assert merged(gate, 20.0, moved(0.01, fast=36.0))


def test_what_shares_nothing_with_our_weights_is_refused_whatever_is_left_of_the_allowance() -> None:
    gate = MergeGate()
    assert "nothing in common" in gate.judge(math.hypot(WEIGHTS, WEIGHTS), moved(1.0, partner=WEIGHTS))
    assert "nothing in common" in gate.judge(WEIGHTS, moved(1.0)), "zeros"
    assert "nothing in common" in gate.judge(2 * WEIGHTS, moved(1.0)), "our weights with the sign turned"
    assert not gate.judge(UNRELATED * 55.0, moved(1.0, partner=55.0))
    gate.take_solo_step(40.0)
    assert not gate.judge(math.hypot(WEIGHTS, WEIGHTS), moved(1.0)), "so long a way explains even that"


def test_what_leads_back_where_training_came_from_is_not_explained_by_training() -> None:
    gate = steady(num_meetings=3)
    reach = 1.0 + (gate.state()["reach"] or 0.0)
    assert not gate.judge(reach, replace(moved(1.0), back=reach))
    assert gate.kept(reach, replace(moved(1.0), back=reach), 1.0) == 1.0
    assert gate.kept(1.6 * reach, replace(moved(1.0), back=1.6 * reach), 1.0) == 0.0


def test_a_refused_gap_leaves_no_trace() -> None:
    gate = steady()
    before = gate.state()
    assert not merged(gate, 1000.0, moved(1.0))
    assert gate.state() == before


def patient(gate: MergeGate, movement: float, num_meetings: int) -> list[float]:
    """Meet one that always sends 0.99 of what is allowed, all in one direction; return the limits."""
    limits, fast = [], WEIGHTS
    for _ in range(num_meetings):
        own = moved(movement, fast, 1e9)
        limits.append(gate.limit(own))
        assert merged(gate, 0.99 * limits[-1], own)
        fast += movement + 0.99 * limits[-1] / 2
    return limits


def test_a_patient_attacker_does_not_open_the_gate() -> None:
    gate, widest = steady(), MergeGate()
    widest.restore({**gate.state(), "gaps": ()})
    limits = patient(gate, 1.0, 80)
    assert max(limits) < 1.3 * widest.limit(moved(1.0))
    assert max(limits[40:]) <= 1.01 * limits[40], "and no further"


def test_an_attacker_at_the_very_first_meeting_gains_no_wider_limit() -> None:
    limits = patient(MergeGate(), 0.0, 6)
    assert limits[0] == FIRST_ALLOWANCE * WEIGHTS
    assert all(after <= LIMIT * limit for limit, after in itertools.pairwise(limits)) and limits[-1] < FIRST_ALLOWANCE * WEIGHTS


def test_gaps_that_shrink_with_the_learning_rate_tighten_the_gate() -> None:
    gate = steady(3.0)
    assert not gate.judge(10.0, moved(3.0))
    for _ in range(100):
        assert merged(gate, 0.03, moved(0.02))
    assert not merged(gate, 1.0, moved(0.02))


def test_a_restored_gate_judges_alike() -> None:
    for gate in (MergeGate(), steady()):
        again = MergeGate()
        again.restore(json.loads(json.dumps(gate.state())))
        assert again.state() == gate.state()
        for gap in (1.0, 5.0, 20.0, 39.0, 41.0, 100.0):
            assert again.judge(gap, moved(1.0)) == gate.judge(gap, moved(1.0))
