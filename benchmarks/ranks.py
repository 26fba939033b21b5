"""Several processes on one CPU beside one process with as many threads: the same model and batches, alternating in one run.

    python -m benchmarks.ranks [--millions N] [--batch B] [--optimizer adamw|muon] [--threads T] [--rounds N]

`one` is a peer with `--devices cpu --threads T`, `ranks` a peer with `--devices cpu:2 --threads T` (peer/trainer/ranks.py). `fsdp2`, with
AdamW only, is torch's `fully_shard` over two processes with half the threads each, per block, keeping the weights between forward and
backward pass. Tokens per second are medians over the rounds. Processor seconds, of all processes, vary least on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.memory import manifest
from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.energy import cpu_s
from gossamer.peer.model.computing import Computing, next_token_loss
from gossamer.peer.model.model import build_model
from gossamer.peer.model.plan import inner_settings
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.rank import join
from gossamer.peer.trainer.ranks import RankFell, RankProcesses, threads_each
from gossamer.peer.trainer.text_training import TextProgram, TextReplica
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest

COUNT = 2
CPUS = (torch.device("cpu"),) * COUNT
STEPS = 2  # a turn


@dataclass
class Direction:
    """One way to train, and what its turns took."""

    turn: Callable[[], object]
    threads: int  # of this process meanwhile
    pids: list[int]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def take(self) -> None:
        """Take a turn."""
        torch.set_num_threads(self.threads)
        began_s, before_s = time.monotonic(), sum(map(cpu_s, self.pids))
        self.turn()
        self.seconds.append((time.monotonic() - began_s) / STEPS)
        self.cpu_seconds.append((sum(map(cpu_s, self.pids)) - before_s) / STEPS)


def job(millions: float, batch: int, optimizer: str) -> Manifest:
    """Return the job of `benchmarks.memory` with another batch."""
    small = manifest(millions)
    inner = small.inner.model_copy(update={"batch_size": batch, "optimizer": optimizer})
    return small.model_copy(update={"run": small.run.model_copy(update={"access": "open"}), "inner": inner})


def corpus_of(given: Manifest, folder: Path) -> Corpus:
    """Load the built-in text."""
    inner = given.inner
    draw = Draw(0, b"me", inner.batch_size, inner.sequence_length)
    return load_corpus(given.data, load_tokenizer(given.tokenizer), draw, None, folder)


def replica(given: Manifest, folder: Path, ranks: RankProcesses | None) -> TextReplica:
    """Build a peer's replica on one device, or on several."""
    model = build_model(given.model, 0)
    devices = ranks.joined(given, model) if ranks is not None else None
    how = Computing(num_devices=COUNT if ranks is not None else 1)
    return TextReplica(given, TextProgram(given, model, corpus_of(given, folder), lambda event: None, how, devices), 0)


def steps(one: TextReplica) -> None:
    """Train for a turn."""
    for _ in range(STEPS):
        one.inner_step()


def fell(error: RankFell) -> Any:
    """End: a benchmark has nobody who starts it again."""
    os._exit(1)


def sharded(number: int, given: Manifest, folder: Path, threads: int, orders: Connection) -> None:
    """Train on one process of FSDP2's, a turn for each word."""
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")  # torch's own, of names that it is about to change
    torch.set_num_threads(threads)
    join(folder / "fsdp2", number, COUNT, "cpu")
    model: Any = build_model(given.model, 0)
    for block in (*model.model.layers, model):
        fully_shard(block, reshard_after_forward=False)
    settings = inner_settings(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(settings.beta1, settings.beta2))
    corpus, step = corpus_of(given, folder), 0
    while orders.recv():
        for _ in range(STEPS):
            rows = torch.tensor_split(corpus.batch(step), COUNT)[number]
            optimizer.zero_grad(set_to_none=True)
            next_token_loss(model, rows).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.inner.clip_norm)
            optimizer.step()
            step += 1
        orders.send(True)


@contextlib.contextmanager
def fully_sharded(given: Manifest, folder: Path, threads: int) -> Iterator[Direction]:
    """Run FSDP2's processes."""
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(COUNT)]
    processes = [context.Process(target=sharded, args=(number, given, folder, threads, pipes[number][1])) for number in range(COUNT)]
    for process in processes:
        process.start()

    def turn() -> None:
        for mine, _ in pipes:
            mine.send(True)
        for mine, _ in pipes:
            mine.recv()

    yield Direction(turn, threads, [process.pid or 0 for process in processes])
    for mine, _ in pipes:
        mine.send(False)
    for process in processes:
        process.join()


@contextlib.contextmanager
def ways(given: Manifest, folder: Path, threads: int) -> Iterator[dict[str, Direction]]:
    """Make all ways ready."""
    signed = folder / "manifest"
    signed.write_bytes(SignedManifest.sign(given, Identity(bytes(32))).to_bytes())
    settings = LocalSettings(threads=threads)
    processes = RankProcesses(signed, CPUS, folder / "ranks", fell, settings)
    alone, both = replica(given, folder / "one", None), replica(given, folder / "two", processes)
    each, me = threads_each(settings, CPUS), os.getpid()
    found = {"one": Direction(lambda: steps(alone), threads, [me]), "ranks": Direction(lambda: steps(both), each, [me, *processes.pids])}
    with contextlib.ExitStack() as stack:
        if given.inner.optimizer == "adamw":
            found["fsdp2"] = stack.enter_context(fully_sharded(given, folder, each))
        yield found
    both.program.inner.devices.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    given = job(options.millions, options.batch, options.optimizer)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ways(given, Path(folder), options.threads) as found:
        for number in range(options.rounds + 1):
            for way in found.values():
                way.take()
                if number == 0:  # the first turn warms up
                    way.seconds.clear()
                    way.cpu_seconds.clear()
    tokens = given.inner.batch_size * given.inner.sequence_length
    rows = {
        name: {
            "tokens_per_second": tokens / statistics.median(way.seconds),
            "step_seconds": statistics.median(way.seconds),
            "processor_seconds": statistics.median(way.cpu_seconds),
        }
        for name, way in found.items()
    }
    print(f"{options.millions:g} M, {options.optimizer}, {tokens} tokens a step, {options.threads} threads in all")
    print(f"{'':<8}{'tokens/s':>12}{'s a step':>12}{'cpu s':>12}")
    for name, row in rows.items():
        print(f"{name:<8}{row['tokens_per_second']:>12.0f}{row['step_seconds']:>12.3f}{row['processor_seconds']:>12.3f}")


if __name__ == "__main__":
    main()
