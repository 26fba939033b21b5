from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gossamer.optim.inner import learning_rate
from gossamer.peer.link import messages
from gossamer.peer.machine.events import SoloStep
from gossamer.peer.model.plan import STEP_FACTOR, inner_settings
from gossamer.peer.trainer.fragment_state import FragmentWeights
from gossamer.peer.trainer.text_training import step_seed
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.exchange import Side, Terms, exchange, meet, opened, replica_side
from tests.peer.small import DEVICE, AskedReplica, fingerprint, small_manifest, small_replica

MANIFEST = small_manifest()
SLACK = MANIFEST.outer.inner_steps
STEP_TOKENS = MANIFEST.inner.batch_size * MANIFEST.inner.sequence_length


def pair(tmp_path: Path, emitted: list[SoloStep] | None = None) -> tuple[tuple[AskedReplica, AskedReplica], tuple[Side, Side]]:
    """Two replicas; what the first one emits goes to `emitted`."""
    emit = (emitted if emitted is not None else []).append
    replicas = small_replica(tmp_path / "i", MANIFEST, b"i", emit), small_replica(tmp_path / "j", MANIFEST, b"j")
    return replicas, (replica_side(replicas[0], tmp_path / "i"), replica_side(replicas[1], tmp_path / "j"))


def train(replica: AskedReplica, num_steps: int) -> None:
    for _ in range(num_steps):
        replica.inner_step()


def make_due(replica: AskedReplica) -> int:
    while not replica.countdown.due():
        replica.countdown.tick()
    return replica.countdown.due()[0]


# --------------------------------------------------------------------------- steps


def test_a_step_learns_and_counts(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    losses = [replica.inner_step() for _ in range(40)]
    assert sum(step.loss for step in losses[-5:]) < sum(step.loss for step in losses[:5]) - 1.0
    assert (replica.own_steps, replica.global_step, replica.tokens) == (40, 40, 40 * STEP_TOKENS)
    assert [fragment.since.tokens for fragment in replica.fragments] == [40 * STEP_TOKENS] * len(replica.fragments)
    assert losses[0].learning_rate == learning_rate(0, 0, inner_settings(MANIFEST))
    assert all(step.num_tokens == STEP_TOKENS for step in losses)


def test_a_loss_that_is_not_finite_changes_no_weight(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    train(replica, 3)
    weight = next(iter(replica.parameters.values()))
    with torch.no_grad():
        good, weight[0, 0] = float(weight[0, 0]), torch.inf
    before = fingerprint(replica)
    with pytest.raises(FloatingPointError, match="inner step 3: loss nan"):
        replica.inner_step()
    assert fingerprint(replica) == before
    with torch.no_grad():
        weight[0, 0] = good
    replica.skip_step()
    assert (replica.own_steps, replica.global_step) == (4, 3)
    assert math.isfinite(replica.inner_step().loss)


@pytest.mark.parametrize("codec", ["fp32", "int8", "modulo4"])
def test_the_plan_is_what_it_sends(tmp_path: Path, codec: str) -> None:
    replica = small_replica(tmp_path, small_manifest(codec={"name": codec}))
    sizes = [(f.codec.sketch_bytes, f.codec.payload_bytes, f.codec.num_blocks) for f in replica.fragments]
    assert [(f.sketch_bytes, f.payload_bytes, f.num_blocks) for f in replica.plan.fragments] == sizes
    replica.handle(messages.CopyState("copy-1"))
    assert len(replica.payloads.read("copy-1")) == replica.plan.state_bytes


def test_steps_depend_on_nothing_drawn_elsewhere(tmp_path: Path) -> None:
    assert len({step_seed(seed, step) for seed in range(3) for step in range(100)}) == 300
    one, other = small_replica(tmp_path / "a", MANIFEST), small_replica(tmp_path / "b", MANIFEST)
    for replica in (one, other):
        train(replica, 2)
        torch.rand(5)
    assert fingerprint(one) == fingerprint(other)


def test_a_run_without_momentum_keeps_none(tmp_path: Path) -> None:
    manifest = small_manifest(outer={"alpha": 0.0})
    one, other = (small_replica(tmp_path / peer, manifest, peer.encode()) for peer in "ij")
    for replica in (one, other):
        train(replica, 3)
    meet((replica_side(one, tmp_path / "i"), replica_side(other, tmp_path / "j")), Terms())
    train(one, 2)
    one.handle(messages.Solo(make_due(one)))
    one.handle(messages.WriteResult("result"))
    for fragment in one.fragments:
        assert fragment.momentum.untyped_storage().nbytes() == 4
        assert not fragment.momentum.any()
    assert not [name for name in one.kept().tensors if name.startswith("momentum/")]
    fresh = small_replica(tmp_path / "fresh", manifest)
    fresh.restore(one.kept().tensors, one.kept().state)
    assert fingerprint(fresh) == fingerprint(one)


# --------------------------------------------------------------------------- clock


def test_the_clock_follows_one_that_is_far_ahead(tmp_path: Path) -> None:
    (ahead, behind), sides = pair(tmp_path)
    train(ahead, 18)
    train(behind, 5)
    meet(sides, Terms())
    assert (ahead.global_step, behind.global_step) == (18, 18 - SLACK)
    assert behind.own_steps == 5
    train(behind, 1)
    assert behind.global_step == 19 - SLACK


def test_equal_peers_run_at_their_own_steps(tmp_path: Path) -> None:
    """Now one is ahead, now the other: no meeting moves a clock."""
    (one, other), sides = pair(tmp_path)
    for number, (steps, others_steps) in enumerate([(4, 1), (1, 5), (3, 4), (5, 2)]):
        train(one, steps)
        train(other, others_steps)
        meet(sides, Terms(number=number, name=f"{number:032x}"))
    assert (one.global_step, other.global_step) == (one.own_steps, other.own_steps)


def test_the_clock_never_runs_faster_than_a_factor_over_own_steps(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    train(replica, 3)
    meet_a_clock(tmp_path, replica, 50)
    assert replica.global_step == STEP_FACTOR * 3
    train(replica, 2)
    meet_a_clock(tmp_path, replica, 10**12, number=2)
    assert replica.global_step == STEP_FACTOR * 5
    train(replica, 20)
    meet_a_clock(tmp_path, replica, 10**12, number=3)
    assert replica.global_step == MANIFEST.run.total_steps
    assert replica.phase is RunPhase.FINISH


def test_a_call_that_brought_nothing_puts_off_no_meeting(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    while not (due := replica.countdown.due()):
        train(replica, 1)
        replica.countdown.tick()
    replica.count_outer_step(due[0], 0, is_met=False)
    assert due[0] not in replica.countdown.due(), "a meeting of its own counts, whatever it brought"
    state = replica.countdown.state()
    for fragment in set(range(len(replica.fragments))) - set(replica.countdown.due()):
        replica.count_outer_step(fragment, 0, is_met=False)
    assert replica.countdown.state() == state


def meet_a_clock(tmp_path: Path, replica: AskedReplica, global_step: int, number: int = 1) -> None:
    """Meet a partner that is at the same weights and says that its clock stands at `global_step`."""
    partner = small_replica(tmp_path / "partner", MANIFEST)
    partner.restore(replica.kept().tensors, replica.kept().state)
    partner.global_step = global_step
    meet((replica_side(replica, tmp_path), replica_side(partner, tmp_path / "partner")), Terms(number=number, name=f"{number:032x}"))


def test_a_solo_step_leaves_the_clock(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    train(replica, 3)
    replica.handle(messages.Solo(make_due(replica)))
    assert replica.global_step == 3


# --------------------------------------------------------------------------- due, solo, defer


def test_an_outer_step_counts_down_anew(tmp_path: Path) -> None:
    emitted: list[SoloStep] = []
    (replica, partner), sides = pair(tmp_path, emitted)
    fragment = make_due(replica)
    train(replica, 1)
    train(partner, 1)
    meet(sides, Terms(fragment=fragment))
    assert fragment not in replica.countdown.due()
    replica.handle(messages.Solo(fragment))  # the node gave up in the very moment in which a partner called
    assert emitted == []
    fragment = make_due(replica)
    replica.handle(messages.Solo(fragment))
    assert emitted == [SoloStep(fragment, "no partner answered in time")]
    assert fragment not in replica.countdown.due()


def test_solo_waits_for_the_end_of_a_meeting_that_comes_to_nothing(tmp_path: Path) -> None:
    emitted: list[SoloStep] = []
    replica = small_replica(tmp_path, MANIFEST, emit=emitted.append)
    train(replica, 2)
    fragment = make_due(replica)
    opened(replica_side(replica, tmp_path), Terms(fragment=fragment, number=4))
    replica.handle(messages.Solo(fragment))
    assert emitted == []
    replica.handle(messages.Drop(4))
    assert [solo.fragment for solo in emitted] == [fragment]
    assert fragment not in replica.countdown.due()


def test_solo_is_not_taken_after_a_meeting_that_counts(tmp_path: Path) -> None:
    emitted: list[SoloStep] = []
    (replica, partner), sides = pair(tmp_path, emitted)
    train(replica, 2)
    fragment = make_due(replica)
    exchange(sides, Terms(fragment=fragment))
    replica.handle(messages.Solo(fragment))
    assert isinstance(replica.handle(messages.Check(1)), messages.Checked)
    assert replica.handle(messages.Apply(1, "ab" * 16, "")) == messages.Applied(1)
    opened(sides[0], Terms(fragment=fragment, number=2))
    replica.handle(messages.Drop(2))
    assert emitted == []


def test_defer_counts_down_again_without_a_step(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    train(replica, 2)
    before = [fragment.slow.clone() for fragment in replica.fragments]
    fragment = make_due(replica)
    left = replica.countdown.state()
    replica.handle(messages.Defer((fragment + 1) % 3))  # not due: nothing happens
    assert replica.countdown.state() == left
    replica.handle(messages.Defer(fragment))
    assert fragment not in replica.countdown.due()
    assert all(torch.equal(f.slow, was) for f, was in zip(replica.fragments, before, strict=True))
    assert replica.fragments[fragment].since.tokens == 2 * STEP_TOKENS


@pytest.mark.parametrize(("no_partner", "num_solo"), [("solo", 1), ("defer", 0)])
def test_without_a_node_the_manifest_decides(tmp_path: Path, no_partner: str, num_solo: int) -> None:
    emitted: list[SoloStep] = []
    replica = small_replica(tmp_path, small_manifest(outer={"no_partner": no_partner}), emit=emitted.append)
    fragment = make_due(replica)
    replica.exchange.announce([fragment])
    assert len(emitted) == num_solo
    assert fragment not in replica.countdown.due()


def test_losing_the_node_frees_every_fragment(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    for fragment in range(3):
        opened(replica_side(replica, tmp_path), Terms(fragment=fragment, number=fragment))
    replica.exchange.drop_all()
    for fragment in range(3):
        opened(replica_side(replica, tmp_path), Terms(fragment=fragment, number=10 + fragment))


def test_ending_alone_makes_slow_weights_the_fast_ones(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    train(replica, 5)
    opened(replica_side(replica, tmp_path), Terms())
    fast = {name: parameter.detach().clone() for name, parameter in replica.parameters.items()}
    replica.exchange.take_last_solo_steps()
    for name, parameter in replica.parameters.items():
        assert torch.allclose(parameter, fast[name], atol=1e-7)
    assert float(replica.fragments[0].momentum.norm()) > 0
    replica.exchange.take_last_solo_steps()
    assert float(replica.fragments[0].momentum.norm()) < 1e-5  # there was nothing left to average


# --------------------------------------------------------------------------- restoring


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, MANIFEST)
    tensors = replica.kept().tensors
    del tensors["slow/1"]
    with pytest.raises(KeyError):
        small_replica(tmp_path, MANIFEST).restore(tensors, replica.kept().state)


def test_adam_counts_its_steps_where_torch_wants_it(tmp_path: Path) -> None:
    """Moments lie beside their parameter, whatever its device; the count of steps does on CUDA alone, where one kernel does all."""
    manifest = small_manifest(inner={"optimizer": "adamw"})
    replica = small_replica(tmp_path, manifest)
    train(replica, 2)
    restored = small_replica(tmp_path, manifest)
    restored.restore(replica.kept().tensors, replica.kept().state)
    state = restored.program.inner.devices.state()
    for name, parameter in restored.parameters.items():
        assert state[f"step/{name}"].device.type == ("cuda" if DEVICE == "cuda" else "cpu")
        assert float(state[f"step/{name}"]) == 2.0
        assert state[f"exp_avg/{name}"].device == parameter.device
        assert state[f"exp_avg/{name}"].shape == parameter.shape


def test_weights_that_are_taken_over_are_not_moved_by_earlier_outer_steps(tmp_path: Path) -> None:
    """An outer step of before may still owe the model a move; the result of a run must be the same bit for bit everywhere."""
    replica = small_replica(tmp_path, MANIFEST)
    train(replica, 3)
    replica.take_solo_step(0, RunPhase.TRAIN)
    parts = [FragmentWeights(one, torch.full_like(one.slow, 0.5), one.momentum) for one in replica.fragments]
    replica.take_over(parts, 10)
    for part in parts:
        replica.weights.scatter(part.fragment.codec.fragment, part.slow)
    replica.move_fast_weights()
    assert all(bool((tensor == 0.5).all()) for tensor in replica.parameters.values())
