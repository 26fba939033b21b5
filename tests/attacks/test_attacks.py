"""A few fast attacks on real peers. `python -m tests.attacks --real` plays all; docs/concepts/attacks.md has the results."""

from __future__ import annotations

import functools

import pytest

from gossamer.peer.simulator.attacks import AWAY
from tests.attacks.real import RealOutcome, play_real
from tests.attacks.trial import Setup

SWARM = Setup(num_peers=4, num_hostile=1, seed=0)
NUM_STEPS = 80
MOST_COST = 1.03  # times the loss of the same swarm without the attacker: how much so short a run varies


@functools.cache
def without() -> RealOutcome:
    return play_real(AWAY, SWARM, NUM_STEPS)


@pytest.mark.parametrize("attack", ["ascent-aimed", "ascent-below-probe", "reversed-many-tokens", "constant", "stale"])
def test_a_hostile_member_costs_the_honest_next_to_nothing(attack: str) -> None:
    found = play_real(attack, SWARM, NUM_STEPS)
    assert found.tried > 0
    assert found.loss < MOST_COST * without().loss


def test_a_message_that_is_not_finite_is_refused_with_a_reason() -> None:
    found = play_real("non-finite", SWARM, NUM_STEPS)
    assert found.merged == 0 < found.tried
    assert any("not finite" in reason for reason in found.reasons)


def test_where_nothing_is_judged_the_same_attack_does_harm() -> None:
    """The attack is one."""
    ungated = Setup(SWARM.num_peers, SWARM.num_hostile, SWARM.seed, gate=False)
    assert play_real("sign-flip", ungated, NUM_STEPS).loss > 1.2 * without().loss
