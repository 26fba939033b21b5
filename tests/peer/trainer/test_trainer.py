from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import CheckpointSaved, EvalDone, RunKnown, SoloStep
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.model.checkpoint import load_latest
from gossamer.peer.model.weights import fast_weights
from gossamer.peer.trainer import boundary as boundary_module
from gossamer.peer.trainer.fragment_state import OuterStep
from gossamer.peer.trainer.process import build
from gossamer.peer.trainer.stopwatch import InnerStep
from gossamer.protocol.errors import OperatorError
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.run.manifest import SignedManifest
from tests.peer.small import small_manifest
from tests.peer.trainer_thread import RunningTrainer, Supervision, node, trainer
from tests.peer.waiting import eventually

LONG = small_manifest(run={"total_steps": 100_000})
SHORT = small_manifest(run={"total_steps": 30})


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_alone_it_trains_to_the_end_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_module, "EVAL_INTERVAL_STEPS", 10)

    async def test() -> None:
        async with trainer(tmp_path, SHORT, alone=True) as running:
            await running.ended()
            assert running.replica.own_steps == 30
            assert [event.step for event in running.events(CheckpointSaved)] == [0, 30]
            assert [event.step for event in running.events(EvalDone)] == [10, 20, 30, 30]
            assert running.supervision.states() == [("training", "")]
            status = reduce(apply, running.supervision.events, Status())
            assert (status.step, status.own_steps, status.meetings["solo"]) == (30, 30, 0)
            assert status.train_seconds > status.blocked_seconds == status.checkpoint_seconds, "alone, nothing is waited for"
            assert status.eval_loss == running.events(EvalDone)[-1].loss
            loaded = load_latest(running.home.checkpoints, SHORT.run_id)
            assert loaded is not None and loaded.contents.step == 30

    run(test())


def test_without_a_node_it_trains_and_goes_solo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_module, "LONELY_FINISH_S", 0.2)

    async def test() -> None:
        async with trainer(tmp_path, SHORT) as running:
            await running.ended()
            solos = running.events(SoloStep)
            assert len(solos) >= 6
            assert {solo.reason for solo in solos} == {"no node to find a partner"}

    run(test())


def test_a_trainer_process_tells_name_and_tokens_of_its_run_as_the_node_does(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    identity = Identity.load_or_create(home.identity)
    manifest = small_manifest(run={"total_steps": 2}).with_host(identity.peer_id)
    home.manifest.write_bytes(SignedManifest.sign(manifest, identity).to_bytes())
    config = PeerConfig(home=home.path, devices="cpu", alone=True)
    supervision = Supervision(ChildSettings(config=config, peer_id=str(identity.peer_id), runtime=tmp_path, waits_for_start=False))
    build(supervision).run()
    assert [event for event in supervision.events if isinstance(event, RunKnown)] == [RunKnown.of(manifest)]
    assert RunKnown.of(manifest).step_tokens == manifest.step_tokens > 0


def test_it_stops_when_asked_and_saves(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG) as running:
            await eventually(lambda: running.replica.own_steps > 5, "some steps")
            await running.stopped()
            loaded = load_latest(running.home.checkpoints, LONG.run_id)
            assert loaded is not None and loaded.contents.step == running.replica.own_steps

    run(test())


# --------------------------------------------------------------------------- beginning


def test_it_waits_for_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG, waits_for_start=True) as running, node(running) as one:
            await eventually(lambda: one.progress() == [messages.Progress(0, RunPhase.TRAIN, False)], "first word")
            assert running.supervision.states() == [("ready", "")]
            assert not running.events(CheckpointSaved)
            one.end.notify(messages.Start())
            await eventually(lambda: messages.Progress(0, RunPhase.TRAIN, True) in one.progress(), "word that it trains")
            await eventually(lambda: running.replica.own_steps, "first step")
            assert [event.step for event in running.events(CheckpointSaved)] == [0]  # so that a restart needs no word

    run(test())


def test_a_waiting_trainer_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG, waits_for_start=True) as running:
            await running.stopped()
            assert load_latest(running.home.checkpoints, LONG.run_id) is None

    run(test())


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_it_begins_with_a_sources_weights_or_reports_why_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG, waits_for_start=True) as running, node(running) as one:
            num_values = 2 * sum(fragment.slow.numel() for fragment in running.replica.fragments)
            bad, good = (written(tmp_path / name, value * num_values) for name, value in (("bad", b"\xff\xff"), ("good", b"\x23\x3c")))
            refused = await one.end.request(messages.Adopt(bad, 40))
            assert refused == messages.Adopted(bad, False, "the state holds values that are not finite", is_sound=False)
            assert not running.replica.own_steps
            assert await one.end.request(messages.Adopt(good, 40)) == messages.Adopted(good, True, "")
            await eventually(lambda: running.replica.global_step > 40, "first step")
            assert running.supervision.states() == [("ready", ""), ("training", "")]
            (saved,) = running.events(CheckpointSaved)
            assert saved.step == 0

    run(test())


# --------------------------------------------------------------------------- the node


def test_the_node_is_notified_of_due_fragments(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG) as running, node(running) as one:
            await eventually(lambda: len({due.fragment for due in one.dues()}) == 3, "every fragment due")
            await eventually(lambda: running.replica.own_steps > 40, "more steps")
            solos = len(running.events(SoloStep))
            assert len(one.dues()) == 3  # each once: they rest until something is done about them
            one.end.notify(messages.Solo(0))
            await eventually(lambda: len(running.events(SoloStep)) == solos + 1, "solo step")
            await eventually(lambda: [due.fragment for due in one.dues()].count(0) == 2, "the next period")

    run(test())


def test_a_dead_nodes_meetings_do_not_outlive_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG) as running:
            async with node(running) as first:
                await eventually(lambda: len(first.dues()) == 3, "every fragment due")
                for fragment in range(3):
                    assert isinstance(await first.end.request(messages.Open(fragment + 1, fragment)), messages.Opened)
            async with node(running) as second:
                assert isinstance(await second.end.request(messages.Open(1, 0)), messages.Opened)
                assert isinstance(await second.end.request(messages.Prepare(2, 0, 0, 1, RunPhase.TRAIN)), messages.Unavailable)

    run(test())


def test_fragments_that_were_due_go_solo_when_the_node_dies(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG) as running:
            async with node(running) as one:
                await eventually(lambda: len(one.dues()) == 3, "every fragment due")
                one.end.notify(messages.Solo(9999))  # nonsense about a fragment that is not there changes nothing
                before = len(running.events(SoloStep))
            await eventually(lambda: len(running.events(SoloStep)) >= before + 3, "solo steps")
            assert running.replica.own_steps

    run(test())


def test_a_restarted_node_gets_the_trainers_state(tmp_path: Path) -> None:
    manifest = small_manifest(run={"total_steps": 100_000}, outer={"inner_steps": 6, "no_partner": "defer"})

    async def test() -> None:
        async with trainer(tmp_path, manifest) as running:
            for _ in range(2):
                async with node(running) as one:
                    await eventually(one.progress, "progress")
                    assert one.progress()[0].started
                    await eventually(one.dues, "something due")
            assert not running.events(SoloStep)

    run(test())


def test_the_last_averaging_ends_at_the_nodes_notification(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, SHORT) as running, node(running) as one:
            await eventually(lambda: any(p.phase is RunPhase.FINISH for p in one.progress()), "the end of the schedule")
            await eventually(lambda: running.supervision.states()[-1][0] == "finishing", "the last averaging")
            opened = await one.end.request(messages.Open(1, 0))
            assert isinstance(opened, messages.Opened) and opened.phase is RunPhase.FINISH
            one.end.notify(messages.FinishDone())
            await running.ended()
            await eventually(lambda: any(p.done for p in one.progress()), "the last word")
            for fragment in running.replica.fragments:
                fast = torch.cat([running.replica.parameters[p.name].detach().flatten() for p in fragment.codec.fragment.pieces])
                assert torch.allclose(fragment.slow, fast.cpu(), atol=1e-7)

    run(test())


def test_finish_done_before_the_end_means_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG) as running, node(running) as one:
            one.end.notify(messages.FinishDone())
            assert isinstance(await one.end.request(messages.Open(1, 0)), messages.Opened)
            assert running.is_running

    run(test())


# --------------------------------------------------------------------------- trouble


def test_a_run_that_diverges_ends_and_leaves_the_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG, waits_for_start=True, checkpoint_interval_steps=2) as running:
            async with node(running) as one:
                one.end.notify(messages.Start())
                await eventually(lambda: running.replica.own_steps > 3, "some steps")
                step = running.replica.inner_step

                def diverged(*_: object) -> InnerStep:
                    with torch.no_grad():
                        next(iter(running.replica.parameters.values()))[:] = torch.inf
                    return step()

                monkeypatch.setattr(running.replica, "inner_step", diverged)
                with pytest.raises(OperatorError, match="10 batches in a row gave no finite loss") as caught:
                    await running.ended()
            assert "learning rate" in caught.value.hint
            loaded = load_latest(running.home.checkpoints, LONG.run_id)
            assert loaded is not None
            assert all(bool(tensor.isfinite().all()) for tensor in loaded.contents.tensors.values())

    run(test())


def test_a_disk_that_refuses_is_the_reason_shown(tmp_path: Path) -> None:
    async def test() -> None:
        async with trainer(tmp_path, LONG, waits_for_start=True, checkpoint_interval_steps=5) as running, node(running) as one:
            running.home.checkpoints.rmdir()
            running.home.checkpoints.write_text("not a folder")
            one.end.notify(messages.Start())
            await eventually(lambda: running.replica.own_steps > 20, "steps all the same")
            state, reason = running.supervision.states()[-1]
            assert state == "training"
            assert "could not be written" in reason

    run(test())


def test_the_last_checkpoint_holds_the_weights_as_the_last_meetings_move_them(tmp_path: Path) -> None:
    """Else the restored peer takes what is missing for its own training, and its next meeting takes the merge back."""
    running = RunningTrainer(tmp_path, tmp_path / "runtime", LONG, waits_for_start=False, alone=True)
    boundary, replica = running.trainer.boundary, running.replica
    boundary.start()
    replica.inner_step()
    fragment = replica.fragments[0]
    slow = fragment.slow + 1.0
    fragment.merge(OuterStep(slow, fragment.momentum, torch.ones_like(slow)), fragment.since)  # while the program only reads the weights
    expected = fragment.fast()
    boundary.end()
    boundary.close()
    loaded = load_latest(running.home.checkpoints, LONG.run_id)
    assert loaded is not None
    replica.weights.restore(fast_weights(loaded.contents))
    assert torch.equal(replica.weights.gather(fragment.codec.fragment), expected)
