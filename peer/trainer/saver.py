"""When the trainer saves a replica, and how it restores one from a checkpoint. The files themselves: peer/model/checkpoint.py.

A save stops the trainer for a copy of the tensors that its next step writes to; a thread hashes and writes. Memory that grows with the
model is never allocated at a step boundary: a thread prepares the place for the copies too.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import CheckpointFailed, CheckpointRejected, CheckpointSaved, Event
from gossamer.peer.machine.home import Home
from gossamer.peer.model.accelerator import finish, has_own_memory
from gossamer.peer.model.checkpoint import CheckpointContents, Loaded, save
from gossamer.peer.model.computing import is_out_of_memory
from gossamer.peer.trainer.replica import ALONE, Replica
from gossamer.protocol.errors import BadSettings, GossamerError

T = TypeVar("T")
STOP_SHARE: Final = 0.01  # of the time that checkpoints may stop the trainer
LEAST_PRIORITY: Final = 19
WRITE_SHARE: Final = 0.1  # of the time that checkpoints may be written: writing wears the disk
LONGEST_S: Final = 600.0  # between two for the disk's sake: after that, the loss in a crash weighs more


@dataclass(frozen=True, slots=True)
class Write:
    """A checkpoint on its way to the disk."""

    step: int
    stopped_s: float  # for how long the copy stopped the trainer
    path: Future[tuple[Path, float]]  # with the seconds that writing took


class Saver:
    """Saves a replica every so many steps or seconds, but no more often than the cost allows. Belongs to the trainer's thread."""

    def __init__(self, home: Home, config: PeerConfig, emit: Callable[[Event], None], now_s: Callable[[], float]) -> None:
        self.has_checkpoint = False  # of this run, written or restored by us
        self._trouble = ""  # why the last checkpoint could not be saved
        self._passed_over = ""  # the checkpoints that were damaged when this process started
        self._home = home
        self._config = config
        self._emit = emit
        self._now_s = now_s
        self._saved_s = self._now_s()
        self._saved_step = 0
        self._least_s = 0.0  # between two, by the cost of the last one
        self._copies: dict[str, Tensor] = {}  # on the host, by name
        self._readying: Future[dict[str, Tensor]] | None = None
        self._write: Write | None = None
        self._is_wanted = False
        self._is_prepared = False  # for the checkpoint that is wanted, places for the copies were made

    @property
    def trouble(self) -> str:
        """Return why the checkpoints are not in order, in words; empty if they are."""
        return self._trouble or self._passed_over

    @property
    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written, or its end not yet seen by `look`."""
        return self._write is not None

    def is_due(self, replica: Replica) -> bool:
        """Return whether a checkpoint should begin at this boundary."""
        if self._is_busy():
            return False
        steps, seconds = replica.own_steps - self._saved_step, self._now_s() - self._saved_s
        enough_steps = self._config.checkpoint_interval_steps
        has_come = seconds >= self._config.checkpoint_interval_s or (enough_steps > 0 and steps >= enough_steps)
        return self._is_wanted or (has_come and seconds >= self._least_s)

    def begin(self, replica: Replica, reading: AbstractContextManager[None] = ALONE) -> None:
        """Save as soon as possible, beside the inner steps: now if the copies have a place and no other checkpoint is being written.

        The weights are copied inside `reading`, in which they are only read; meetings may be decided there.
        """
        self._is_wanted = True
        self.look()
        if self._is_busy():
            return
        started_s, (tensors, state) = self._now_s(), replica.kept()
        moving = {name: tensor.detach() for name, tensor in tensors.items() if replica.changes(name)}
        lacking = {name: tensor for name, tensor in moving.items() if not _has_same_layout(self._copies.get(name), tensor)}
        if lacking and not self._is_prepared:
            self._readying = _run_beside(lambda: _allocate_copies(lacking))
            return
        if lacking and not self._keep_places(lambda: _allocate_copies(lacking)):  # of a state that has grown meanwhile
            return
        state = copy.deepcopy(state)  # of the same moment as `tensors`: a merge meanwhile replaces slow weights
        with reading:
            for name, tensor in moving.items():
                self._copies[name].copy_(tensor, non_blocking=True)
            for device in {tensor.device for tensor in moving.values()}:  # a program's states may lie on several
                finish(device)
        self._copies = {name: self._copies[name] for name in moving}
        copied = {name: self._copies.get(name, tensor) for name, tensor in tensors.items()}
        contents = CheckpointContents(replica.manifest.run_id, replica.own_steps, copied, state)
        self._is_wanted = self._is_prepared = False
        self._saved_s, self._saved_step = self._now_s(), replica.own_steps
        self._write = Write(replica.own_steps, self._saved_s - started_s, _run_beside(lambda: self._written(contents)))

    def look(self) -> None:
        """Take the results of the threads, and report them."""
        if self._readying is not None and self._readying.done():
            readying, self._readying = self._readying, None
            self._is_prepared = self._keep_places(readying.result)
        if self._write is not None and self._write.path.done():
            write, self._write = self._write, None
            self._report(write.step, write.stopped_s, write.path.result)

    def _keep_places(self, made: Callable[[], dict[str, Tensor]]) -> bool:
        """Keep what is made as the copies' places; return whether there is memory for it. Without, the next checkpoint tries again."""
        try:
            self._copies |= made()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._is_wanted = self._is_prepared = False
            self._saved_s = self._now_s()
            self._fail(self._saved_step, f"not enough memory for a copy of the weights: {error}")
            return False
        return True

    def save(self, replica: Replica) -> None:
        """Save now, and wait for it. An event reports a disk error, which leaves the earlier checkpoints untouched."""
        self.finish()
        self._is_wanted = False
        contents = CheckpointContents(replica.manifest.run_id, replica.own_steps, *replica.kept())
        self._saved_step = replica.own_steps
        self._report(replica.own_steps, 0.0, lambda: self._written(contents))
        self._saved_s = self._now_s()

    def finish(self) -> None:
        """Wait for the threads."""
        wait(self._running_work())
        self.look()

    def _is_busy(self) -> bool:
        return not all(work.done() for work in self._running_work())

    def _running_work(self) -> list[Future[Any]]:
        return [work for work in (self._readying, self._write.path if self._write else None) if work is not None]

    def _written(self, contents: CheckpointContents) -> tuple[Path, float]:
        started_s = self._now_s()
        return save(self._home.checkpoints, contents), self._now_s() - started_s

    def _report(self, step: int, stopped_s: float, written: Callable[[], tuple[Path, float]]) -> None:
        try:
            path, seconds = written()
        except GossamerError as error:
            self._fail(step, str(error))
            return
        self.has_checkpoint, self._trouble = True, ""
        self._least_s = max(stopped_s / STOP_SHARE, min(seconds / WRITE_SHARE, LONGEST_S))
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        self._emit(CheckpointSaved(step, str(path), num_bytes, seconds, stopped_s))

    def _fail(self, step: int, reason: str) -> None:
        self._trouble = reason
        self._emit(CheckpointFailed(step, reason))

    def restore(self, replica: Replica, loaded: Loaded) -> None:
        """Restore a replica from a checkpoint. Raises BadSettings if the checkpoint is of another model than the manifest's."""
        for path, reason in loaded.rejected:
            self._emit(CheckpointRejected(str(path), reason))
        try:
            replica.restore(loaded.contents.tensors, loaded.contents.state)
        except (KeyError, ValueError, RuntimeError) as error:
            reason = f"the checkpoint {loaded.path} does not fit the model: {error}"
            raise BadSettings(reason, hint="move it away, or use another --home") from error
        self._saved_step = replica.own_steps
        self.has_checkpoint = True
        if loaded.rejected:
            damaged = ", ".join(f"{path.name} ({reason})" for path, reason in loaded.rejected)
            self._passed_over = f"went back to checkpoint {loaded.path.name}: damaged are {damaged}"


def _run_beside(work: Callable[[], T]) -> Future[T]:
    """Do some work on a thread of its own, with the lowest priority where the system has priorities for threads."""
    thread = ThreadPoolExecutor(1, "checkpoint", _take_least_priority)
    try:
        return thread.submit(work)
    finally:
        thread.shutdown(wait=False)


def _take_least_priority() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)


def _has_same_layout(place: Tensor | None, tensor: Tensor) -> bool:
    return place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype)


def _allocate_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate copies of tensors on the host, and write to them: the first write to new memory is slow."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=has_own_memory(tensor.device.type)).zero_()
        for name, tensor in tensors.items()
    }
