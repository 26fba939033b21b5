from __future__ import annotations

import pytest

from gossamer.peer.trainer.interval import estimate
from gossamer.peer.trainer.need import needs, places
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan
from gossamer.protocol.run.manifest import Manifest
from tests.peer.small import LLAMA

MBIT = 1e6 / 8
# A billion parameters in bf16, and a hundred fragments of about 4.2 bits each.
PLAN = ModelPlan(1, tuple(FragmentTerms(100_000, 5_100_000, 10) for _ in range(100)), 2_000_000_000)


def test_a_fast_line_meets_as_often_as_it_pays() -> None:
    found = estimate(PLAN, 200, 1000 * MBIT, 10.0)
    assert (found.join_s, found.interval_steps, found.interval_s) == (16.0, 2, 20.0)
    assert found.line_share == pytest.approx(found.day_bytes / (86_400 * 1000 * MBIT))
    assert found.line_share < 0.5


def test_a_slow_line_sets_the_interval_and_is_half_busy() -> None:
    found = estimate(PLAN, 200, 20 * MBIT, 10.0)
    assert found.line_share == pytest.approx(0.5, rel=0.02)
    assert found.meeting_s == pytest.approx(PLAN.fragments[0].slow_bytes / (20 * MBIT))
    fragments_s = PLAN.round_bytes / (20 * MBIT) + 10.0  # 208 s: one round
    assert found.join_s == pytest.approx(PLAN.state_bytes / (20 * MBIT) + fragments_s)  # 800 s: older than a fourth of 2000 s


def test_a_line_that_cannot_carry_the_run_is_seen() -> None:
    assert estimate(PLAN, 200, 0.1 * MBIT, 10.0).line_share > 1


def test_places_are_those_of_the_devices() -> None:
    gpu, cpu = (places(need) for need in needs(Manifest.checked({"model": {"config": LLAMA}})).values())
    assert gpu["device"] > 0 == cpu["device"]
    assert cpu["memory"] > gpu["memory"] and cpu["disk"] == gpu["disk"]
