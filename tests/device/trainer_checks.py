"""The trainer's path on the device made in Python: beside the tests of the trainer itself, what only a device can show.

Run in a process of its own by test_on_python_device.py.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.optim import resting
from gossamer.peer.doctor.matmul import _check_devices
from gossamer.peer.link import messages
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import CheckpointSaved
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import Room
from gossamer.peer.model.accelerator import choose_device, choose_devices
from gossamer.peer.model.checkpoint import load_latest
from gossamer.peer.model.computing import Computing
from gossamer.peer.simulator.choices import scenario
from gossamer.peer.simulator.training import Venue, simulate
from gossamer.peer.trainer import stopwatch
from gossamer.peer.trainer.device import keep_within
from gossamer.peer.trainer.need import rooms, run_need
from gossamer.peer.trainer.process import build
from gossamer.peer.trainer.saver import Saver
from gossamer.peer.trainer.text_training import TextReplica, TextTrainer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.device.python_device import FREE_BYTES, NAME, no_synchronization, synchronizations
from tests.peer.exchange import Terms, meet, replica_side
from tests.peer.small import AskedReplica, fingerprint, small_manifest, small_replica
from tests.peer.trainer.test_exchange_thread import linked
from tests.peer.trainer_thread import Supervision

QUIET_S = 1e9


def test_it_is_what_auto_and_gpu_mean() -> None:
    device = torch.device(NAME, 0)
    assert choose_device("auto") == (device, f"a GPU was found: {NAME}")
    assert choose_device("gpu") == (device, "as asked")
    assert choose_devices("all")[0] == choose_devices("0")[0] == (device,)
    assert choose_device("cpu")[0] == torch.device("cpu")
    assert "a device made in Python" in _check_devices("gpu")


def test_its_memory_is_its_own(tmp_path: Path) -> None:
    free, limited = (
        rooms([torch.device(NAME, 0)], PeerConfig(home=tmp_path, **settings), tmp_path, 0).device
        for settings in ({}, {"gpu_memory": "100 MB"})
    )
    assert free is not None and free.num_bytes == FREE_BYTES
    assert limited == Room(10**8, "the setting gpu_memory = 100 MB", "gpu_memory")
    assert run_need(small_manifest(), NAME).device == run_need(small_manifest(), "cuda").device


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_inner_step_waits_for_its_loss_alone_and_learns_as_on_the_cpu(tmp_path: Path, optimizer: str) -> None:
    manifest = small_manifest(inner={"optimizer": optimizer})
    here, there = (small_replica(tmp_path, manifest, device=device) for device in ("cpu", NAME))
    for _ in range(8):
        with synchronizations() as found:
            step = there.inner_step()
        assert step.loss == pytest.approx(here.inner_step().loss, abs=1e-4)
    by_transformers = [where for where in found if "in find_packed_sequence_indices" in where]  # at each forward pass, for its mask
    assert len(by_transformers) == 1
    (own,) = set(found) - set(by_transformers)
    assert "text_training.py" in own


@pytest.mark.parametrize("codec", ["fp32", "int8", "modulo4"])
def test_a_meeting_ends_as_on_the_cpu(tmp_path: Path, codec: str) -> None:
    def met(device: str) -> AskedReplica:
        pair = []
        for peer in (b"me", b"you"):
            folder = tmp_path / device / peer.decode()
            replica = small_replica(folder, small_manifest(codec={"name": codec}), peer, device=device)
            replica.inner_step()
            pair.append((replica, replica_side(replica, folder)))
        meet((pair[0][1], pair[1][1]), Terms())
        return pair[0][0]

    here, there = met("cpu"), met(NAME)
    assert here.fragments[0].since.steps == there.fragments[0].since.steps == 0, "the meeting counted"
    moved = torch.sub(here.fragments[0].slow, small_replica(tmp_path, here.manifest, device="cpu").fragments[0].slow)
    assert (here.fragments[0].slow - there.fragments[0].slow).norm() < 0.05 * moved.norm()
    assert there.fragments[0].slow.device.type == "cpu", "it rests on the host"


def test_a_meeting_that_begins_beside_the_gradient_is_in_order_with_the_step_before_it() -> None:
    with linked("modulo4") as trainer:
        for parameter in trainer.replica.parameters.values():
            parameter.data.add_(0.01)  # as an optimizer does; nobody waits for it
        with trainer.exchange.while_weights_are_read():
            trainer.ask(messages.Open(1, 0), messages.Prepare(1, 100, 0, 7, RunPhase.TRAIN))
            assert [type(trainer.reply()) for _ in range(2)] == [messages.Opened, messages.SketchReady]
        for parameter in trainer.replica.parameters.values():
            parameter.data.add_(0.01)
        assert list(trainer.exchange.at_boundary()) == [], "it raises what went wrong there"


def saved(tmp_path: Path, replica: AskedReplica) -> tuple[Saver, Home, list[object]]:
    home, events = Home(tmp_path / "home"), list[object]()
    home.create()
    saver = Saver(home, PeerConfig(home=home.path), events.append, time.monotonic)
    saver.begin(replica)  # the memory for the copies
    saver.finish()
    return saver, home, events


def test_a_checkpoint_beside_the_steps_waits_for_its_copies_once(tmp_path: Path) -> None:
    replica = small_replica(tmp_path, small_manifest())
    replica.inner_step()
    saver, home, events = saved(tmp_path, replica)
    before = fingerprint(replica)
    with synchronizations() as found:
        saver.begin(replica)
    assert len(found) == 1 and "saver.py" in found[0], "\n".join(found)
    replica.inner_step()
    saver.finish()
    assert [type(event) for event in events] == [CheckpointSaved]
    loaded = load_latest(home.checkpoints, replica.manifest.run_id)
    assert loaded is not None
    fresh = small_replica(tmp_path / "fresh", replica.manifest)
    saver.restore(fresh, loaded)
    assert fingerprint(fresh) == before
    for device in ("cpu", NAME):  # it is the same checkpoint on another device
        other = small_replica(tmp_path / device, replica.manifest, device=device)
        saver.restore(other, loaded)
        assert fingerprint(other) == before


def test_losses_and_outputs_are_the_cpus(tmp_path: Path) -> None:
    here, there = (small_replica(tmp_path, small_manifest(), device=device).program for device in ("cpu", NAME))
    assert there.losses().mean == pytest.approx(here.losses().mean, abs=1e-5)
    assert there.evaluation()[0] == pytest.approx(here.evaluation()[0], abs=1e-5)
    torch.testing.assert_close(there.outputs().cpu(), here.outputs(), atol=1e-4, rtol=1e-4)
    probes = [program.new_probe(random.Random(1)) for program in (here, there)]
    fragment = small_replica(tmp_path, small_manifest(), device="cpu").fragments[0].codec.fragment
    shift = torch.full((fragment.numel,), 0.01)
    losses = [probe.losses(fragment, shift.to(device), probe.draw()[0]).cpu() for probe, device in zip(probes, ("cpu", NAME), strict=True)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=1e-4)


def built(tmp_path: Path, manifest: Manifest, **config: object) -> TextTrainer:
    """A trainer as its process builds it from a home."""
    home = Home(tmp_path / "home")
    home.create()
    identity = Identity.load_or_create(home.identity)
    home.manifest.write_bytes(SignedManifest.sign(manifest.with_host(identity.peer_id), identity).to_bytes())
    settings = PeerConfig(home=home.path, devices="gpu", alone=True, **config)
    return build(Supervision(ChildSettings(config=settings, peer_id=str(identity.peer_id), runtime=tmp_path, waits_for_start=False)))


def test_the_trainer_process_trains_on_it(tmp_path: Path) -> None:
    trainer = built(tmp_path, small_manifest(run={"total_steps": 12}))
    trainer.run()
    replica = trainer.boundary.replica
    assert {parameter.device.type for parameter in replica.parameters.values()} == {NAME}
    assert replica.own_steps == 12
    assert load_latest(tmp_path / "home" / "checkpoints", replica.manifest.run_id).contents.step == 12


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_that_rests_on_the_host_steps_as_on_the_device(
    tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "PART_VALUES", 1000)  # some parameters are cut into rows
    manifest = small_manifest(inner={"optimizer": optimizer})
    hosted, beside = (small_replica(tmp_path, manifest, computing=how) for how in (Computing(optimizer_on_host=True), Computing()))
    for _ in range(6):
        beside.inner_step()
        with synchronizations() as found:
            hosted.inner_step()
    assert len([where for where in found if "in find_packed_sequence_indices" not in where]) == 1, "it waits for its loss alone"
    states = [replica.program.inner.devices.state() for replica in (hosted, beside)]
    assert {value.device.type for value in states[0].values()} == {"cpu"}
    assert NAME in {value.device.type for value in states[1].values()}
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value.cpu(), rtol=1e-5, atol=1e-7)
    for name, parameter in beside.parameters.items():
        torch.testing.assert_close(hosted.parameters[name].cpu(), parameter.cpu(), rtol=1e-5, atol=1e-7)


def test_a_checkpoint_of_a_resting_optimizer_is_the_one_of_its_step(tmp_path: Path) -> None:
    manifest, resting_state = small_manifest(), Computing(optimizer_on_host=True)
    replica = small_replica(tmp_path, manifest, computing=resting_state)
    replica.inner_step()
    saver, home, _ = saved(tmp_path / "saved", replica)
    replica.inner_step()
    before = fingerprint(replica)
    saver.begin(replica)
    replica.inner_step()
    saver.finish()
    loaded = load_latest(home.checkpoints, replica.manifest.run_id)
    assert loaded is not None
    again = small_replica(tmp_path / "again", manifest, computing=resting_state)
    saver.restore(again, loaded)
    assert fingerprint(again) == before
    again.inner_step()
    assert fingerprint(again) == fingerprint(replica)


def test_the_boundary_of_the_text_trainer_waits_for_nothing_unless_something_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopwatch, "REPORT_S", QUIET_S)
    trainer = built(tmp_path, small_manifest(outer={"inner_steps": 400}), checkpoint_interval_s=86_400.0)
    boundary, replica = trainer.boundary, trainer.boundary.replica
    assert isinstance(replica, TextReplica)
    boundary.start()
    try:
        for _ in range(5):
            step = replica.inner_step(boundary.reading())
            with no_synchronization():
                boundary.after_step(step)
                boundary.answer()
    finally:
        boundary.close()


def test_a_simulated_swarm_meets_on_it_as_its_seed_says(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200)
    venue = Venue(tmp_path / "cache", tmp_path / "text.txt", NAME, num_eval_batches=1, num_curve_batches=1)
    made = scenario(small_manifest(data={"source": "text"}), {"peers": 2, "steps": 4, "inner_steps": 2, "codec": "modulo4"})
    first, second = (simulate(made, venue, lambda *_: None) for _ in range(2))
    assert first.meetings
    assert (first.eval_loss, first.weight_std, first.meetings) == (second.eval_loss, second.weight_std, second.meetings)


def test_a_limit_that_torch_cannot_hold_there_is_refused() -> None:
    device = choose_device("gpu")[0]
    keep_within(device, math.inf)
    with pytest.raises(BadSettings, match=f"cannot limit its memory on {NAME}:0"):
        keep_within(device, 1e9)


class Regression:
    """A program of the library's user, on the device."""

    def __init__(self, home: Path, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)).to(NAME)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.held_out = torch.randn(64, 8).to(NAME)
        run = gossamer.Run("regression", 1000, "rows", inner_steps=400)
        settings = {"listen": "127.0.0.1", "checkpoint_interval_steps": 0, **settings}
        self.swarm = gossamer.host(run, self.model, self.optimizer, evaluate=self.evaluate, home=home, settings=settings)

    def loss_on(self, x: Tensor) -> Tensor:
        return (self.model(x) - x.sum(1, keepdim=True)).square().flatten()

    def evaluate(self) -> Tensor:
        return self.loss_on(self.held_out)

    def train(self) -> Tensor:
        loss = self.loss_on(torch.randn(32, 8).to(NAME)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("alone", [True, False])
def test_a_step_with_nothing_due_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    monkeypatch.setattr(stopwatch, "REPORT_S", QUIET_S)  # nothing is due
    program = Regression(tmp_path / "home", alone=alone)
    with program.swarm:
        program.swarm.step(tokens=32, loss=program.train())
        for _ in range(40):
            loss = program.train()
            with no_synchronization():
                program.swarm.step(tokens=32, loss=loss)
        assert program.swarm.clock.steps == 41
        monkeypatch.setattr(stopwatch, "REPORT_S", 0.0)
        loss = program.train()
        with synchronizations() as found:
            program.swarm.step(tokens=32, loss=loss)
        assert len(found) == 1 and "stopwatch.py" in found[0], "a report reads all losses at once"
