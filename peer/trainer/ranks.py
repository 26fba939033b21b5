"""Several devices in one trainer: it is the first rank, and starts and orders a process for each further device.

Only the first rank has the link, the text, the outer state and the checkpoints; the others compute. When one rank dies, all die, and the
supervisor starts the trainer again from its checkpoint. Partners cannot detect how many ranks a peer has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.energy import cpu_s
from gossamer.peer.model.computing import Computing
from gossamer.peer.trainer.rank import FIRST, Rank, RankSettings, join
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROGRAM: Final = "gossamer.peer.trainer.rank_process"
NOTICE_S: Final = 5.0  # for the trainer's own thread to notice a dead rank: while it waits for a GPU, it never does
END_S: Final = 5.0  # for the other ranks to exit by themselves


class RankFell(GossamerError):
    """A rank's process exited: the machine's fault, or ours. The supervisor restarts the trainer."""


class RankProcesses:
    """The processes of all ranks but the first. They load their code while the trainer builds its model."""

    def __init__(
        self,
        manifest: Path,
        devices: Sequence[torch.device],
        store: Path,
        give_up: Callable[[RankFell], NoReturn],
        config: LocalSettings,
        optimizer_on_host: bool = False,
    ) -> None:
        self.optimizer_on_host = optimizer_on_host
        self.count = len(devices)
        self.store = store
        self._give_up = give_up
        self._fell: RankFell | None = None
        self._has_fallen = threading.Event()
        self._has_noticed = threading.Event()
        self._is_closing = False
        self._processes: dict[subprocess.Popen[bytes], threading.Thread] = {}  # with their watchers
        store.unlink(missing_ok=True)
        threads = threads_each(config, devices)
        for number, device in enumerate(devices[1:], FIRST + 1):
            settings = RankSettings(
                number, self.count, str(device), threads, config.gpu_memory, str(manifest), str(store), optimizer_on_host
            )
            self._start(settings)

    @property
    def pids(self) -> list[int]:
        """Return their process ids."""
        return [process.pid for process in self._processes]

    def joined(self, manifest: Manifest, model: PreTrainedModel) -> Ranks:
        """Wait until the ranks are ready to compute with this model, whose weights are final."""
        return Ranks(manifest, model, self)

    @contextmanager
    def running_on_all(self, name: str, *arguments: object) -> Iterator[None]:
        """Run code beside a method (rank.py) that all of them call with arguments that fit into JSON. Raises as `together`."""
        with self.together():
            for process in self._processes:
                _write(process, (name, arguments))
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run code that all ranks run at once. Raises RankFell if it fails because a rank is dead."""
        try:
            yield
        except (RuntimeError, BrokenPipeError) as error:
            if self._has_fallen.wait(NOTICE_S) and self._fell is not None:
                self._has_noticed.set()
                raise self._fell from error
            raise

    def close(self) -> None:
        """End the processes, however busy they are."""
        self._is_closing = True
        self._has_noticed.set()
        for process in self._processes:
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # of an order that a dead rank never read
                    process.stdin.close()
        for process, watcher in self._processes.items():
            watcher.join(END_S)
            process.kill()
            watcher.join()

    def _start(self, settings: RankSettings) -> None:
        process = subprocess.Popen([sys.executable, "-P", "-m", PROGRAM], stdin=subprocess.PIPE, stdout=sys.stderr.fileno())
        watcher = threading.Thread(target=self._watch, args=(settings, process), name=f"rank {settings.number}", daemon=True)
        self._processes[process] = watcher
        watcher.start()
        _write(process, settings)

    def _watch(self, settings: RankSettings, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_closing or self._has_fallen.is_set():
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._fell = RankFell(f"rank {settings.number} of the trainer, on {settings.device}, {how}", hint="the log of this peer says more")
        self._has_fallen.set()
        if not self._has_noticed.wait(NOTICE_S):
            self._give_up(self._fell)


def _write(process: subprocess.Popen[bytes], line: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(line).encode() + b"\n")
    process.stdin.flush()


def threads_each(config: LocalSettings, devices: Sequence[torch.device]) -> int:
    """Return the processor threads of each rank, 0 for torch's choice: ranks on the CPU share the threads of one trainer."""
    if devices[0].type != "cpu":
        return config.threads
    return max(1, (config.threads or torch.get_num_threads()) // len(devices))


class Ranks:
    """Several devices as one. Make it when the first rank's model has its weights; waits for the other ranks."""

    def __init__(self, manifest: Manifest, model: PreTrainedModel, processes: RankProcesses) -> None:
        self._processes = processes
        with processes.together():
            join(processes.store, FIRST, processes.count, model.device.type)
        self._rank = Rank(manifest, model, FIRST, processes.count, processes.optimizer_on_host)
        self.moved = self._rank.own.moved

    def send(self, batch: Tensor) -> Tensor:
        """As OneDevice.send: `backward` shares the batch with all ranks."""
        return batch

    def backward(self, batch: Tensor, seed: int, computing: Computing) -> Tensor | None:
        """As OneDevice.backward."""
        changed = self._rank.changed()
        how = computing.micro_batch, computing.recompute, computing.compiles, computing.num_devices, computing.optimizer_on_host
        order = changed, list(batch.shape), seed, *how
        with self._processes.running_on_all("backward", *order):
            return self._rank.backward(changed, batch, seed, computing)

    def clip(self, most: float) -> Tensor:
        """As OneDevice.clip."""
        with self._processes.running_on_all("clip", most):
            return self._rank.clip(most)

    def step(self, rate: float) -> None:
        """As OneDevice.step."""
        with self._processes.running_on_all("step", rate):
            self._rank.step(rate)

    def state(self) -> dict[str, Tensor]:
        """As OneDevice.state."""
        with self._processes.running_on_all("give_state"):
            return self._rank.give_state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """As OneDevice.restore."""
        with self._processes.running_on_all("take_state"):
            self._rank.take_state(state)

    def forget(self) -> None:
        """As OneDevice.forget."""
        with self._processes.running_on_all("forget"):
            self._rank.own.forget()

    def cpu_s(self) -> float:
        """As OneDevice.cpu_s."""
        return sum(map(cpu_s, self._processes.pids))

    def close(self) -> None:
        """End the other ranks."""
        self._processes.close()
        dist.destroy_process_group()
