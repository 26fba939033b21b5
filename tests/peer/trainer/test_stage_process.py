"""Two trainers of a staged run, built as their processes build them, with scripted nodes on the real link between them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.link.messages import Backward, Begin, Declined, Forward, Forwarded, HopFile, Returned, hop_file
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import ModelBuilt, StepDone, TextRead
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import Room
from gossamer.peer.model.checkpoint import CheckpointContents, load_latest, save
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import num_parameters
from gossamer.peer.model.stages import manifest_cuts
from gossamer.peer.model.weights import FAST
from gossamer.peer.trainer.need import Rooms
from gossamer.peer.trainer.stage_loop import stage_terms
from gossamer.peer.trainer.stage_need import HOPS, fitting_stages, least_stage_need, stage_need
from gossamer.peer.trainer.stage_process import build_staged, exchange_checkpoints
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import WINDOW
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.terms import StageTerms
from gossamer.protocol.run.manifest import Manifest, StagedManifest
from gossamer.protocol.tasks import cancel
from tests.peer.trainer.staged import staged_manifest
from tests.peer.trainer_thread import Supervision
from tests.peer.waiting import eventually


def made_manifest() -> StagedManifest:
    tables = staged_manifest().model_dump(exclude_unset=True)
    made = Manifest.checked(tables | {"data": {"source": "text"}, "run": tables["run"] | {"total_steps": 4}})
    assert isinstance(made, StagedManifest)
    return made


class StageTrainer:
    """A trainer in a thread, and the node that tells it which stage to hold."""

    def __init__(self, folder: Path, stage: int, wanted: int | None = None) -> None:
        self.home = Home(folder / f"home-{stage}")
        self.home.create()
        self.runtime = Path(tempfile.mkdtemp(prefix="stage-"))
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 500)
        config = PeerConfig(home=self.home.path, data=folder / "text.txt", devices="cpu", stage=wanted)
        peer_id = str(Identity(bytes([stage + 1]) * 32).peer_id)
        self.supervision: Any = Supervision(ChildSettings(config=config, peer_id=peer_id, runtime=self.runtime, waits_for_start=False))
        self.stage = stage
        self.reports: list[messages.TrainerReport] = []
        self.payloads = PayloadFolder(self.runtime / "payloads")
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            build_staged(self.supervision, self.home, made_manifest()).run()
        except BaseException as error:
            self.errors.append(error)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._thread.start()
        self.offered: list[tuple[int, ...]] = []
        try:
            await self._start_node()
            yield
        finally:
            self.supervision.stop.set()
            await eventually(lambda: not self._thread.is_alive(), "end of the trainer")
            self._running.cancel()
        assert not self.errors

    async def _start_node(self) -> None:
        self.end = NodeEnd(self.runtime)
        self.end.choose_stage = self._choose
        self._running = asyncio.create_task(self._node())
        await eventually(lambda: self.end.connected or bool(self.errors), "the trainer at the link")
        assert not self.errors

    async def restart_node(self) -> None:
        await cancel(self._running)
        await self._start_node()

    async def _choose(self, stages: tuple[int, ...]) -> int:
        self.offered.append(stages)
        return self.stage

    async def _node(self) -> None:
        self.plan = await self.end.connect()
        await self.end.run(self.reports.append)

    def progress(self) -> list[messages.Progress]:
        return [report for report in self.reports if isinstance(report, messages.Progress)]

    def has_begun(self) -> bool:
        return any(report.started for report in self.progress())

    def phase(self) -> RunPhase:
        return self.progress()[-1].phase

    def events(self, kind: type) -> list[Any]:
        return [event for event in self.supervision.events if isinstance(event, kind)]


async def carry(first: StageTrainer, last: StageTrainer, hop: int) -> list[str]:
    """Carry one micro-batch through both stages and back; return the kinds of the replies."""
    name = f"{hop:032x}"
    begun = await first.end.pass_hop(Begin(hop, name))
    if not isinstance(begun, Forwarded):
        return [type(begun).__name__]
    for own, partner in ((HopFile.OWN_TOKENS, HopFile.PARTNER_TOKENS), (HopFile.OWN_FORWARD, HopFile.PARTNER_FORWARD)):
        last.payloads.write(hop_file(hop, partner), first.payloads.read(hop_file(hop, own)))
    done = await last.end.pass_hop(Forward(hop, name, begun.measure))
    assert isinstance(done, Returned)
    if not begun.measure:
        first.payloads.write(hop_file(hop, HopFile.PARTNER_BACKWARD), last.payloads.read(hop_file(hop, HopFile.OWN_BACKWARD)))
    back = await first.end.pass_hop(Backward(hop, name, begun.measure, "", begun.own_steps, done.loss))
    for trainer in (first, last):
        trainer.payloads.remove_hop(hop)
    return [type(reply).__name__ for reply in (begun, done, back)]


def test_two_processes_train_until_a_neighbour_is_at_the_end(tmp_path: Path) -> None:
    first, last = StageTrainer(tmp_path, 0), StageTrainer(tmp_path, 1)

    async def story() -> None:
        async with asyncio.timeout(50), first.running(), last.running():
            assert first.offered == last.offered == [(0, 1)]
            assert first.plan.stage == StageTerms(0, 2, token_bytes=2 * 17 * 4, value_bytes=2 * 16 * 64 * 4, in_batch=3)
            assert last.plan.stage is not None and last.plan.stage.is_last
            assert (first.plan.next_state_bytes, last.plan.next_state_bytes) == (last.plan.state_bytes, first.plan.state_bytes)
            await eventually(lambda: first.has_begun() and last.has_begun(), "both train")
            for hop in range(6):
                assert await carry(first, last, hop) == ["Forwarded", "Returned", "Returned"]
            first.end.notify(messages.FollowClock(4))
            last.end.notify(messages.FollowClock(4, is_unlimited=True))  # only its node ends a later stage
            await eventually(lambda: first.phase() is last.phase() is RunPhase.FINISH, "the end of the schedule")
            assert isinstance(await first.end.pass_hop(Begin(6, "06")), Declined)

    asyncio.run(story())
    assert sum(trainer.events(ModelBuilt)[0].params for trainer in (first, last)) == num_parameters(made_manifest().model)
    assert first.events(TextRead) and not last.events(TextRead)
    assert [trainer.events(StepDone)[-1].step for trainer in (first, last)] == [2, 2]


def test_what_a_trainer_wrote_for_a_node_that_died_is_gone_before_the_next_one_asks(tmp_path: Path) -> None:
    """Else each death of a node would take the room of all micro-batches under way, until the trainer ends."""
    first = StageTrainer(tmp_path, 0)

    async def story() -> None:
        async with asyncio.timeout(50), first.running():
            await eventually(first.has_begun, "it trains")
            assert isinstance(await first.end.pass_hop(Begin(0, f"{0:032x}")), Forwarded)
            assert isinstance(await first.end.request(messages.CopyState("copy-7")), messages.Written)
            files = list(first.payloads.path("").iterdir())
            assert {path.name for path in files} == {hop_file(0, HopFile.OWN_TOKENS), hop_file(0, HopFile.OWN_FORWARD), "copy-7"}
            await first.restart_node()
            assert not any(path.exists() for path in files)
            assert first.offered == [(0, 1)] and first.end.fits == (0, 1), "it is not asked again, and knows what fits"

    asyncio.run(story())


# ---------------------------------------------------------------------- what fits


def rooms(memory: int) -> Rooms:
    plenty = Room(10**12, "free")
    return Rooms(Room(memory, "free"), None, plenty, plenty)


def test_a_node_is_offered_the_stage_that_the_operator_wants_and_no_other(tmp_path: Path) -> None:
    last = StageTrainer(tmp_path, 1, wanted=2)

    async def story() -> None:
        async with last.running():
            assert last.offered == [(1,)]

    asyncio.run(story())


def test_the_stage_that_the_operator_wants_is_offered_alone_and_refused_with_its_own_sum() -> None:
    manifest = made_manifest()
    wide, narrow = Room(1 << 40, "there"), Room(1000, "there")
    computing = Computing(micro_batch=manifest.stages.micro_batch)
    assert list(fitting_stages(manifest, "cpu", Rooms(wide, None, wide, wide), computing, 2)) == [1]
    with pytest.raises(BadSettings, match=r"^stage 2 of 2 needs") as caught:
        fitting_stages(manifest, "cpu", Rooms(narrow, None, wide, wide), computing, 2)
    assert "leave out --stage" in caught.value.hint


def test_a_stage_that_fits_is_offered_and_a_machine_too_small_for_any_is_refused() -> None:
    manifest, computing = staged_manifest(3), Computing(micro_batch=2)
    needs = [sum(stage_need(manifest, cut, "cpu", computing).memory.values()) for cut in manifest_cuts(manifest)]
    assert fitting_stages(manifest, "cpu", rooms(max(needs)), computing) == dict.fromkeys(range(3), computing)
    less = replace(computing, recompute=True)
    least = [
        min(sum(stage_need(manifest, cut, "cpu", how).memory.values()) for how in (computing, less)) for cut in manifest_cuts(manifest)
    ]
    smallest = least.index(min(least))
    assert list(fitting_stages(manifest, "cpu", rooms(min(least)), computing)) == [smallest]
    assert sum(least_stage_need(manifest, "cpu", None).memory.values()) <= max(needs)
    with pytest.raises(BadSettings, match=r"no stage of this run fits: stage 1 of 3 needs .*; stage 3 of 3 needs ") as caught:
        fitting_stages(manifest, "cpu", rooms(min(least) - 1), computing)
    assert "more stages" in caught.value.hint


def test_no_more_micro_batches_are_counted_than_a_window_holds() -> None:
    manifest = staged_manifest(micro_batch=1, batch_size=2 * WINDOW)
    cut = manifest_cuts(manifest)[0]
    need = stage_need(manifest, cut, "cpu", Computing(micro_batch=1))
    assert need.payloads[HOPS] == WINDOW * stage_terms(manifest, cut).files_bytes


RUN = bytes(32)


def save_stage(home: Home, stage: int, step: int) -> None:
    save(home.checkpoints, CheckpointContents(RUN, step, {f"{FAST}block.{stage}": torch.zeros(2)}, {}))


def steps_of(folder: Path) -> int | None:
    found = load_latest(folder, RUN)
    return found.contents.step if found else None


def test_a_peer_that_moves_on_and_back_finds_its_own_checkpoints(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    save_stage(home, stage=1, step=10)
    for stage, own, left in [(1, 10, None), (2, None, 10), (1, 10, None), (2, None, 10)]:
        exchange_checkpoints(home, {f"block.{stage}"})
        assert (steps_of(home.checkpoints), steps_of(home.left_checkpoints)) == (own, left)
    save_stage(home, stage=2, step=20)
    for stage, own, left in [(2, 20, 10), (1, 10, 20), (2, 20, 10), (3, None, 20)]:
        exchange_checkpoints(home, {f"block.{stage}"})
        assert (steps_of(home.checkpoints), steps_of(home.left_checkpoints)) == (own, left)


def test_a_peer_that_moves_to_a_stage_that_it_held_long_ago_takes_the_newer_weights_of_others(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    save_stage(home, stage=1, step=10)
    exchange_checkpoints(home, {"block.2"})
    save_stage(home, stage=2, step=500)
    home.stage.write_text("1\n")
    home.left_stage.write_text("2\n")
    exchange_checkpoints(home, {"block.1"})
    assert (steps_of(home.checkpoints), steps_of(home.left_checkpoints)) == (None, 500)
    home.stage.write_text("2\n")  # nobody gives weights of stage 1, and it was killed before it could forget where it came from
    exchange_checkpoints(home, {"block.2"})
    assert steps_of(home.checkpoints) == 500


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_a_crash_while_checkpoints_are_exchanged_loses_none(num_renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    home.create()
    save_stage(home, stage=1, step=10)
    exchange_checkpoints(home, {"block.2"})
    save_stage(home, stage=2, step=20)
    rename, num_done = Path.rename, 0

    def rename_some(path: Path, to: Path) -> Path:
        nonlocal num_done
        if num_done == num_renames:
            raise KeyboardInterrupt
        num_done += 1
        return rename(path, to)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename_some)
        exchange_checkpoints(home, {"block.1"})
    home.create()
    exchange_checkpoints(home, {"block.1"})
    assert (steps_of(home.checkpoints), steps_of(home.left_checkpoints)) == (10, 20)
