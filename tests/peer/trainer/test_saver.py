from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import CheckpointFailed, CheckpointRejected, CheckpointSaved, Event
from gossamer.peer.machine.home import Home
from gossamer.peer.model.checkpoint import load_latest
from gossamer.peer.trainer.program import Kept as KeptState
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.saver import Saver
from gossamer.protocol.errors import BadSettings
from tests.peer.small import LLAMA, fingerprint, small_manifest, small_replica
from tests.peer.trainer.test_exchange_thread import judged, linked

MANIFEST = small_manifest()


class Kept:
    """A home, a replica and what saves the one in the other."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.now_s = 50.0
        self.moments_s = iter(())  # what the clock shows next, before `now_s` again
        self.home = Home(folder / "home")
        self.home.create()
        self.replica = small_replica(folder / "payloads", MANIFEST)
        self.events: list[Event] = []
        config = PeerConfig(home=self.home.path, **settings)
        self.saver = Saver(self.home, config, self.events.append, lambda: next(self.moments_s, self.now_s))

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.replica.inner_step()

    def restore(self, replica: Replica) -> None:
        loaded = load_latest(self.home.checkpoints, MANIFEST.run_id)
        assert loaded is not None
        self.saver.restore(replica, loaded)


def test_a_checkpoint_is_due_after_so_many_steps(tmp_path: Path) -> None:
    kept = Kept(tmp_path, checkpoint_interval_steps=3)
    kept.step(2)
    assert not kept.saver.is_due(kept.replica)
    kept.step()
    assert kept.saver.is_due(kept.replica)
    kept.saver.save(kept.replica)
    assert not kept.saver.is_due(kept.replica)
    kept.step(3)
    assert kept.saver.is_due(kept.replica)


def test_a_checkpoint_is_due_after_so_many_seconds(tmp_path: Path) -> None:
    kept = Kept(tmp_path, checkpoint_interval_s=60.0, checkpoint_interval_steps=0)
    kept.replica.own_steps = 101  # more than the default of checkpoint_interval_steps
    assert not kept.saver.is_due(kept.replica)
    kept.now_s += 61.0
    assert kept.saver.is_due(kept.replica)
    kept.saver.save(kept.replica)
    assert not kept.saver.is_due(kept.replica)


def test_saved_and_restored(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.step(4)
    assert not kept.saver.has_checkpoint
    kept.saver.save(kept.replica)
    assert kept.saver.has_checkpoint
    fresh = small_replica(tmp_path / "fresh", MANIFEST)
    kept.restore(fresh)
    assert fingerprint(fresh) == fingerprint(kept.replica)
    assert kept.saver.trouble == ""
    (event,) = kept.events
    assert isinstance(event, CheckpointSaved)
    assert event.step == 4
    assert event.num_bytes == sum(file.stat().st_size for file in Path(event.path).iterdir())


def test_beside_the_inner_steps_is_saved_what_was_there_at_the_boundary(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.step(3)
    kept.saver.begin(kept.replica)  # there is no place for a copy yet
    kept.saver.finish()
    assert not kept.saver.has_checkpoint
    assert kept.saver.is_due(kept.replica)
    before = fingerprint(kept.replica)
    kept.saver.begin(kept.replica)
    kept.replica.exchange.take_last_solo_steps()
    kept.step(2)
    kept.saver.finish()
    fresh = small_replica(tmp_path / "fresh", MANIFEST)
    kept.restore(fresh)
    assert fingerprint(fresh) == before != fingerprint(kept.replica)
    (event,) = kept.events
    assert isinstance(event, CheckpointSaved)
    assert event.step == 3


def test_a_meeting_that_counts_while_the_weights_are_copied_is_in_the_next_one(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with linked() as trainer:
        replica = trainer.replica
        judged(replica, trainer.runtime / "payloads", tmp_path / "partner")
        kept.saver.begin(replica)
        kept.saver.finish()
        before = fingerprint(replica)

        @contextlib.contextmanager
        def while_the_node_asks() -> Iterator[None]:
            with trainer.exchange.while_weights_are_read():
                trainer.ask(messages.Apply(1, "ab" * 16, ""))
                assert trainer.reply() == messages.Applied(1)
                yield
            replica.move_fast_weights()

        kept.saver.begin(replica, while_the_node_asks())
        kept.saver.finish()
    fresh = small_replica(tmp_path / "fresh", MANIFEST)
    kept.restore(fresh)
    assert fingerprint(fresh) == before != fingerprint(replica)


def test_a_second_one_waits_for_the_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path, checkpoint_interval_steps=1)
    for _ in range(6):
        kept.step()
        kept.saver.begin(kept.replica)  # wanted at each step, and done as often as there is room
    kept.saver.finish()
    kept.saver.save(kept.replica)
    steps = [event.step for event in kept.events if isinstance(event, CheckpointSaved)]
    assert steps == sorted(steps)
    assert steps[-1] == 6


def test_a_state_that_is_larger_at_each_step_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    replica, kept_now = kept.replica, kept.replica.kept

    def growing() -> KeptState:
        tensors, state = kept_now()
        return KeptState(tensors | {f"fast/log of {replica.own_steps}": torch.zeros(replica.own_steps)}, state)

    monkeypatch.setattr(replica, "kept", growing)
    for _ in range(4):
        kept.step()
        kept.saver.begin(replica)
        kept.saver.finish()
    assert [event.step for event in kept.events if isinstance(event, CheckpointSaved)] == [2, 4]


def test_what_a_checkpoint_costs_decides_how_often_there_is_one(tmp_path: Path) -> None:
    kept = Kept(tmp_path, checkpoint_interval_s=60.0, checkpoint_interval_steps=0)
    kept.step()
    kept.saver.begin(kept.replica)
    kept.saver.finish()
    began_s, kept.now_s = kept.now_s, kept.now_s + 2.0
    kept.moments_s = iter([began_s])  # the copy takes two seconds
    kept.saver.begin(kept.replica)
    kept.saver.finish()
    kept.now_s += 61.0
    assert not kept.saver.is_due(kept.replica)
    kept.now_s += 140.0
    assert kept.saver.is_due(kept.replica)


def test_a_disk_that_refuses_costs_the_checkpoint_only(tmp_path: Path) -> None:
    kept = Kept(tmp_path, checkpoint_interval_steps=2)
    kept.saver.save(kept.replica)
    shutil.move(kept.home.checkpoints, tmp_path / "away")
    kept.home.checkpoints.write_text("not a folder")  # the disk refuses
    kept.step(2)
    kept.saver.save(kept.replica)
    assert "could not be written" in kept.saver.trouble
    assert isinstance(kept.events[-1], CheckpointFailed)
    assert not kept.saver.is_due(kept.replica)  # tried again later, not at each step
    kept.home.checkpoints.unlink()
    shutil.move(tmp_path / "away", kept.home.checkpoints)
    kept.step(2)
    assert kept.saver.is_due(kept.replica)
    kept.saver.save(kept.replica)
    assert kept.saver.trouble == ""


def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for _ in range(2):
        kept.step(2)
        kept.saver.save(kept.replica)
    newest = sorted(kept.home.checkpoints.iterdir())[-1]
    tensors = newest / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x7f")
    fresh = small_replica(tmp_path / "fresh", MANIFEST)
    kept.restore(fresh)
    assert fresh.own_steps == 2
    event = kept.events[-1]
    assert isinstance(event, CheckpointRejected)
    assert event.path == str(newest)
    assert kept.saver.trouble.startswith("went back to checkpoint step-00000002: damaged are step-00000004 (")


def test_a_checkpoint_of_another_model_is_the_operators_affair(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.saver.save(kept.replica)
    other = small_replica(tmp_path / "other", small_manifest(model={"config": LLAMA | {"num_hidden_layers": 3}}))
    with pytest.raises(BadSettings, match="does not fit the model"):
        kept.restore(other)
