from __future__ import annotations

import itertools
import json
import math

import pytest

from peer.trainer.merge_gate import FIRST_LIMIT, LIMIT, Lengths, MergeGate

OWN = Lengths(pseudo_gradient=2.0, momentum=1.0, slow=30.0)
NEVER_TRAINED = Lengths(pseudo_gradient=0.0, momentum=0.0, slow=30.0)


def merged(gate: MergeGate, gap: float, own: Lengths = OWN) -> bool:
    if gate.judge(gap, own):
        return False
    gate.accept(gap, own)
    return True


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(gap: float) -> None:
    assert "not finite" in MergeGate().judge(gap, OWN)


def test_identical_weights_may_always_meet() -> None:
    gate = MergeGate()
    for own in (NEVER_TRAINED, OWN, NEVER_TRAINED):
        assert merged(gate, 0.0, own)
    assert merged(gate, 2.0)


def test_the_first_meeting_of_all_is_measured_by_the_weights() -> None:
    assert merged(MergeGate(), FIRST_LIMIT * 30.0, NEVER_TRAINED)
    reason = MergeGate().judge(FIRST_LIMIT * 30.0 + 0.1, NEVER_TRAINED)
    assert "more than 15 can be honest" in reason


def test_first_steps_under_warm_up_may_meet_a_faster_peer() -> None:
    """Recorded: at its third step, with a pseudo-gradient of 0.114, a peer met one four times as fast; the gap was 1.163."""
    assert merged(MergeGate(), 1.163, Lengths(0.114, 0.0, 12.0))


def test_long_first_steps_may_meet_a_slower_peer() -> None:
    """Recorded with Muon after 60 steps beside a peer's 20, in weights' lengths: movements of 0.953 and about 0.19, a gap of 0.928."""
    assert merged(MergeGate(), 0.928, Lengths(0.953, 0.0, 1.0))
    assert merged(MergeGate(), 0.928, Lengths(0.19, 0.0, 1.0))
    assert not merged(MergeGate(), 10.0, Lengths(0.19, 0.0, 1.0))


def test_a_peer_fresh_from_a_donor_is_measured_by_the_momentum_it_took_over() -> None:
    """Recorded: one step after joining, with a pseudo-gradient of 0.05, a joiner met a gap of 2.1 at a momentum of 0.8."""
    fresh = Lengths(0.05, 0.8, 26.0)
    assert merged(MergeGate(), 2.1, fresh)
    assert not merged(MergeGate(), 20.0, fresh)


def test_a_meeting_right_after_another_is_no_reason_to_refuse() -> None:
    gate = MergeGate()
    for _ in range(5):
        assert merged(gate, 3.0)
    assert merged(gate, 5.0, Lengths(0.0, 0.1, 30.0))
    for _ in range(20):
        assert merged(gate, 0.2, Lengths(1.5, 0.5, 30.0))
    assert merged(gate, 5.0, Lengths(0.01, 0.1, 30.0))


def test_ten_times_the_usual_is_too_much() -> None:
    gate = MergeGate()
    for _ in range(10):
        assert merged(gate, 3.0)
    assert merged(gate, 3.0 * LIMIT - 0.01)
    gate = MergeGate()
    for _ in range(10):
        assert merged(gate, 3.0)
    reason = gate.judge(3.0 * LIMIT + 0.01, OWN)
    assert "more than 30 can be honest" in reason


def test_a_refused_gap_leaves_no_trace() -> None:
    gate = MergeGate()
    assert merged(gate, 3.0)
    before = gate.state()
    assert not merged(gate, 1000.0)
    assert gate.state() == before


def test_a_ladder_of_growing_gaps_does_not_open_the_gate() -> None:
    """An attacker that always stays just under the limit gains little per meeting, and nothing once honest partners come between."""
    gate = MergeGate()
    for _ in range(20):
        assert merged(gate, 3.0)
    for _ in range(3):
        assert merged(gate, 29.0)
    assert not merged(gate, 100.0)
    for _ in range(10):
        assert merged(gate, 3.0)
    assert not merged(gate, 45.0)


def patient(gate: MergeGate, slow: float, pseudo_gradient: float, momentum: float, num_meetings: int) -> tuple[list[float], float]:
    """Meet one that always sends 0.99 of what is allowed, all in one direction; return the limits and the slow weights' length after it.

    The momentum is what the default outer step (alpha 0, beta 1, gamma 1) makes it: the pseudo-gradient and half of the gap.
    """
    limits = []
    for _ in range(num_meetings):
        own = Lengths(pseudo_gradient, momentum, slow)
        limits.append(gate.limit(own))
        assert merged(gate, 0.99 * limits[-1], own)
        momentum = pseudo_gradient + 0.99 * limits[-1] / 2
        slow += momentum
    return limits, slow


def test_a_patient_attacker_opens_the_gate_by_little() -> None:
    gate = MergeGate()
    for _ in range(20):
        assert merged(gate, 1.0, Lengths(1.0, 1.0, 100.0))
    limits, _ = patient(gate, 100.0, 1.0, 1.0, 11)
    assert all(after <= 1.11 * before for before, after in itertools.pairwise(limits))
    assert limits[10] < 2.7 * limits[0]


@pytest.mark.parametrize("pseudo_gradient", [0.0, 0.01])
def test_an_attacker_at_the_very_first_meeting_gains_no_wider_limit(pseudo_gradient: float) -> None:
    limits, slow = patient(MergeGate(), 1.0, pseudo_gradient, 0.0, 5)
    assert limits[0] == FIRST_LIMIT and limits[1] <= FIRST_LIMIT + 1e-9
    assert limits[4] < 1.4 * FIRST_LIMIT and slow < 3.0, "it was 168 times the start after four meetings"


def test_the_state_of_an_earlier_version_is_taken_over() -> None:
    gate = MergeGate()
    gate.restore({"gap": 3.0, "pseudo_gradient": 2.0})
    assert gate.state() == {"gap": 3.0, "pseudo_gradient": 2.0, "momentum": 0.0}


def test_gaps_that_shrink_with_the_learning_rate_tighten_the_gate() -> None:
    gate = MergeGate()
    assert merged(gate, 3.0)
    for _ in range(40):
        assert merged(gate, 0.03, Lengths(0.02, 0.01, 30.0))
    assert not merged(gate, 1.0, Lengths(0.02, 0.01, 30.0))


def test_a_restored_gate_judges_alike() -> None:
    gate, again = MergeGate(), MergeGate()
    for gap in (1.0, 4.0, 2.0):
        assert merged(gate, gap)
    again.restore(json.loads(json.dumps(gate.state())))
    assert again.state() == gate.state()
    for gap in (1.0, 20.0, 39.0, 41.0, 100.0):
        assert again.judge(gap, OWN) == gate.judge(gap, OWN)
