"""What must hold at every event of carriers among scripted trainers, wherever a fault falls."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossamer.peer.pipeline.commands import HopOutcome
from tests.peer.pipeline.carriers import IN_BATCH, World

FAULTS = ("holder", "trainer", "lane")
CALM_S = 20.0
PROGRESS_S = 30.0  # after the last fault


@pytest.mark.parametrize(("num_stages", "num_holders"), [(2, 1), (2, 2), (3, 2), (5, 1)])
def test_without_a_fault_every_hop_is_trained_at_once(num_stages: int, num_holders: int) -> None:
    world = World(num_stages, num_holders, seed=1)
    world.run_until(CALM_S)
    for holder in world.holders:
        assert not holder.faults
        assert set(holder.outcomes) <= {HopOutcome.TRAINED, HopOutcome.MEASURED, HopOutcome.ANSWERED}
    assert world.trained > 50 and all(holder.outcomes[HopOutcome.MEASURED] for holder in world.stages[0])
    assert min(sum(holder.added.values()) for holder in world.holders) > 0


def test_a_pipe_of_one_holder_each_is_kept_full() -> None:
    """The trainer of the slowest stage has always something to do."""
    world = World(3, 1, seed=2)
    slowest = max(world.holders, key=lambda holder: holder.service_s)
    world.run_until(60.0)
    services = 2 if slowest.stage < 2 else 1  # forward and backward, or both at once
    ideal = (60.0 - 2.0) / (services * slowest.service_s)
    assert sum(slowest.added.values()) > 0.75 * ideal


def test_a_holder_that_is_four_times_slower_takes_less() -> None:
    world = World(2, 2, seed=3)
    for low in world.stages[0]:
        low.service_s = 0.05
    quick, slow = world.stages[1]
    quick.service_s, slow.service_s = 0.1, 0.4
    world.run_until(100.0)
    share = sum(slow.added.values()) / (sum(slow.added.values()) + sum(quick.added.values()))
    assert 0.1 < share < 0.3, share


def test_equal_holders_take_equal_shares() -> None:
    world = World(2, 2, seed=4)
    for holder in world.holders:
        holder.service_s = 0.1
    world.run_until(100.0)
    one, other = (sum(holder.added.values()) for holder in world.stages[1])
    assert 0.4 < one / (one + other) < 0.6


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1 << 30),
    num_stages=st.integers(2, 4),
    num_holders=st.integers(1, 3),
    faults=st.lists(st.tuples(st.integers(1, 1500), st.sampled_from(FAULTS)), min_size=1, max_size=5),
)
@example(seed=12045903, num_stages=3, num_holders=1, faults=[(1, "lane"), (45, "holder")])  # the last stage has added what comes again
def test_faults_at_any_event(seed: int, num_stages: int, num_holders: int, faults: list[tuple[int, str]]) -> None:
    """Each event of each holder is followed by a check. Drivers make progress, and every hop ends, once the faults are over."""
    world = World(num_stages, num_holders, seed)
    for at_event, kind in sorted(faults):
        world.run_until(world.now_s + 5.0, lambda kind=kind: strike(world, kind), world.num_events + at_event)  # type: ignore[misc]
    world.run_until_trained(PROGRESS_S)
    for holder in world.stages[0]:
        holder.carrier.may_begin = False
    world.run_until(world.now_s + 3 * PROGRESS_S + 30.0)
    for holder in world.holders:
        assert not holder.carrier.hops and not holder.files and not holder.faults


def strike(world: World, kind: str) -> None:
    holder = world.rng.choice(world.holders)
    if kind == "lane" and holder.wires:
        world.cut(world.rng.choice(list(holder.wires.values())))
    elif holder.is_alive and kind == "holder":
        world.kill(holder)
    elif holder.is_alive and kind == "trainer":
        world.kill_trainer(holder)


@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30), share=st.floats(0.01, 0.5))
def test_a_trainer_that_declines_costs_micro_batches_and_nothing_else(seed: int, share: float) -> None:
    world = World(3, 2, seed)
    world.stages[1][0].declines = share
    world.stages[2][0].declines = share
    world.run_until(60.0)
    assert world.trained > 10
    for holder in world.holders:
        assert not holder.faults and len(holder.carrier.hops) <= 2 * IN_BATCH * 3


def test_a_stage_without_a_holder_stops_the_run_and_its_return_starts_it_again() -> None:
    world = World(3, 2, seed=5)
    world.run_until(10.0)
    for holder in world.stages[2]:
        world.kill(holder, back_s=60.0)
    world.run_until(30.0)
    trained, events = world.trained, world.num_events
    world.run_until(65.0)
    assert world.trained == trained and world.num_events - events < 2500, "nothing spins while nobody holds a stage"
    world.run_until(90.0)
    assert world.trained > trained + 20
