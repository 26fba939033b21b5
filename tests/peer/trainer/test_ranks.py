"""Two ranks on the CPU beside one: the same weights, and so the same bytes for partners."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
from torch import Tensor

from gossamer.optim.noloco import NoLoCo
from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import build_model
from gossamer.peer.trainer.meeting import MeetingSide
from gossamer.peer.trainer.ranks import RankFell, RankProcesses
from gossamer.peer.trainer.text_training import TextProgram
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.peer.small import AskedReplica, fingerprint, ignored, small_corpus, small_manifest
from tests.peer.waiting import wait_until

TWO = [torch.device("cpu")] * 2
BATCH = 4


def never(error: RankFell) -> NoReturn:
    raise AssertionError from error


def replica(job: Manifest, computing: Computing, ranks: RankProcesses | None = None) -> AskedReplica:
    model = build_model(job.model, job.run.seed)
    devices = ranks.joined(job, model) if ranks is not None else None
    return AskedReplica(job, TextProgram(job, model, small_corpus(job), ignored, computing, devices), 1)


def two_processes(folder: Path, job: Manifest) -> RankProcesses:
    folder.mkdir()
    signed = folder / "manifest"
    signed.write_bytes(SignedManifest.sign(job, Identity(b"1" * 32)).to_bytes())
    return RankProcesses(signed, TWO, folder / "store", never, LocalSettings())


@contextmanager
def two_ranks(folder: Path, job: Manifest) -> Iterator[tuple[AskedReplica, RankProcesses]]:
    processes = two_processes(folder, job)
    one = replica(job, Computing(num_devices=2), processes)
    try:
        yield one, processes
    finally:
        one.program.inner.devices.close()


def payload(one: AskedReplica) -> bytes:
    """What a partner whose sketch is the same would get of the first fragment."""
    side = MeetingSide(one.fragments[0])
    sketch = side.prepare(NoLoCo(0.5, 0.7, 0.7), 0.5, 1)
    return sketch.numpy().tobytes() + side.encode(sketch).numpy().tobytes()


def without_memory(one: AskedReplica, most: int) -> None:
    """Have a device find no memory for more sequences at a time."""

    def allocate(model: object, args: object, given: dict[str, Tensor]) -> None:
        if len(given["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    one.program.model.register_forward_pre_hook(allocate, with_kwargs=True)


def test_two_ranks_are_one_peer(tmp_path: Path) -> None:
    """Bit for bit what one device learns that takes its batch in two parts: the same sums, in the same order."""
    job = small_manifest(inner={"batch_size": BATCH, "clip_norm": 0.5, "optimizer": "muon"})
    alone = replica(job, Computing(micro_batch=BATCH // 2))
    with two_ranks(tmp_path / "two", job) as (both, processes):
        for _ in range(3):
            assert alone.inner_step() == both.inner_step()
        assert (both.plan, payload(both)) == (alone.plan, payload(alone))
        for one in (alone, both):
            one.take_solo_step(0, RunPhase.TRAIN)  # writes to weights beside the steps
            one.move_fast_weights()
            one.inner_step()
        assert fingerprint(both) == fingerprint(alone)
        saved = {name: tensor.clone() for name, tensor in both.kept().tensors.items()}, copy.deepcopy(both.kept().state)
        both.inner_step()
        both.restore(*saved)
        assert alone.inner_step() == both.inner_step()
        assert fingerprint(both) == fingerprint(alone)
        for one in (alone, both):
            one.program.inner.devices.forget()
            one.inner_step()
        assert fingerprint(both) == fingerprint(alone)

        without_memory(both, 1)
        assert both.inner_step().loss == pytest.approx(alone.inner_step().loss, rel=1e-5)
        assert both.program.inner.computing.micro_batch == 1

        os.kill(processes.pids[0], signal.SIGKILL)
        with pytest.raises(RankFell, match="rank 1 of the trainer, on cpu, was killed by signal 9"):
            both.inner_step()


def test_ranks_can_be_closed_after_an_order_reached_nobody(tmp_path: Path) -> None:
    """Else an error of the pipe hides which rank has died, and the other ranks go on."""
    processes = two_processes(tmp_path / "two", small_manifest())
    (pid,) = processes.pids
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), "the rank is gone")
    with pytest.raises(RankFell, match="killed by signal 9"), processes.running_on_all("step", 0.1):
        pass
    processes.close()
