"""Measure how loss, steps to a fixed loss, and speed-up over one peer change with the number of peers, in pairs and in groups.

    python -m benchmarks.scaling --keep FILE [--peers N ...] [--steps N] [--seeds N ...] [--every N ...] [--learning-rate R ...]

The engine is that of `peer simulate`: the real outer step, codec and merge gate. Every method tries every learning rate of the list, for
each number of peers, and its row is that of the best one by the mean over the seeds: the same budget for all. Learning rates, target and
seeds are fixed before the first run.

speed-up: steps that one peer needs for the same loss, in a schedule of its own of that length, over the steps of the swarm. One peer
trains 1, 2, 4, ... times the steps, up to the largest number of peers; between these the steps are interpolated in their logarithm.
gain: nats by which the loss falls for each doubling of the peers since the row above. target: the first step at which the loss of the
mean weights is below `--target`, within the schedule. A pair meets about every 0.7 of `--every` steps; groups get that interval.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from benchmarks.methods import Run, keep, kept, key, mean_and_error
from gossamer.optim.codecs.hadamard import keep_products_exact
from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.population import Diverged
from gossamer.peer.simulator.results import Result
from gossamer.peer.simulator.training import Venue, simulate
from gossamer.protocol.run.manifest import Manifest

EVAL_BATCHES: Final = 64
CURVE_BATCHES: Final = 16
METHODS: Final[Mapping[str, Run]] = {
    "pairs": {"method": "noloco", "codec": "modulo4", "delay": "1"},
    "ddp": {"method": "ddp", "codec": "fp32"},
    "local-sgd": {"method": "diloco", "codec": "fp32", "alpha": "0", "beta": "1"},
    "diloco": {"method": "diloco", "codec": "fp32"},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one run; the loss is NaN if it diverged."""

    loss: float = math.nan  # held-out, of the mean weights, nats per token
    sent_mb: float = math.nan  # per peer; one copy per exchange
    curve: tuple[tuple[float, float], ...] = ()  # steps and loss of the mean weights
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table: a method with a number of peers, at its best learning rate."""

    num_peers: int
    learning_rate: str
    losses: tuple[float, ...]  # by seed
    target_steps: float  # mean over the seeds; infinite where one never reached it
    sent_mb: float

    @property
    def loss(self) -> float:
        """Return the mean over the seeds."""
        return mean_and_error(self.losses)[0]


class Runs:
    """Runs simulations one after the other, and keeps each finished one in a file: a second start goes on from there."""

    def __init__(self, file: Path | None, data: Path | None, device: str = "cpu") -> None:
        self._file = file
        self._data = data
        self._device = device
        self._base = Manifest.checked({"data": {"source": "text"}}) if data else Manifest()
        self._text = hashlib.sha256(data.read_bytes()).hexdigest()[:8] if data else None
        self._known = kept(file, Outcome)

    def outcome(self, run: Run) -> Outcome:
        """Return the outcome of a run, simulated now if the file has none."""
        name = key(run, EVAL_BATCHES, CURVE_BATCHES, self._text, base=self._base) + (f" on {self._device}" if self._device != "cpu" else "")
        if name not in self._known:
            started_s = time.monotonic()
            self._known[name] = self._simulated(run)
            print(f"{time.monotonic() - started_s:5.0f} s: {name} {self._known[name].loss:.4f}", file=sys.stderr, flush=True)
            keep(self._file, name, self._known[name])
        return self._known[name]

    def _simulated(self, run: Run) -> Outcome:
        made = scenario(self._base, dict(setting(f"{name}={text}") for name, text in run.items()))
        with tempfile.TemporaryDirectory() as folder:
            venue = Venue(Path(folder), self._data, self._device, EVAL_BATCHES, CURVE_BATCHES, averages_curve=True)
            try:
                return _figures(simulate(made, venue, lambda *_: None))
            except Diverged:
                return Outcome()


def _figures(result: Result) -> Outcome:
    curve = tuple((point.tokens / result.tokens * result.steps, point.loss) for point in result.curve)
    return Outcome(result.eval_loss_averaged, 1e-6 * result.sent_bytes, curve, result.wall_seconds)


def rows(given: argparse.Namespace) -> Iterator[tuple[str, Run]]:
    """Yield each method's name in the table with its settings, but for the peers, the seed and the learning rate."""
    for name in given.methods:
        for every in [0] if name == "ddp" else given.every:
            settings = dict(METHODS[name])
            if every:
                settings["inner_steps"] = str(every if name == "pairs" else max(1, round(MEETING_INTERVAL * every)))
            yield f"{name}, every {every}" if every else name, settings


def best_line(runs: Runs, base: Run, num_peers: int, given: argparse.Namespace) -> Line:
    """Run all learning rates and seeds; return the row of the lowest mean loss. Diverged runs come last."""
    lines = []
    for rate in given.learning_rate:
        found = [runs.outcome({**base, "peers": str(num_peers), "learning_rate": rate, "seed": str(seed)}) for seed in given.seeds]
        targets = [steps_to(given.target, one.curve) for one in found]
        lines.append(
            Line(
                num_peers,
                rate,
                tuple(one.loss for one in found),
                sum(targets) / len(targets),
                mean_and_error([one.sent_mb for one in found])[0],
            )
        )
    return min(lines, key=lambda line: (math.isnan(line.loss), line.loss))


def steps_to(target: float, curve: Sequence[Sequence[float]]) -> float:
    """Return the steps after which the loss is at the target or below, interpolated between two points; infinite if it never is."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (early, above), (late, below) in pairwise(curve):
        if below <= target:
            return early + (late - early) * (above - target) / (above - below)
    return math.inf


def steps_alone(loss: float, alone: Sequence[tuple[int, float]]) -> float:
    """Return the steps that one peer needs for a loss, from its schedules' steps and losses; NaN beyond the longest."""
    for (few, high), (many, low) in pairwise(sorted(alone)):
        if low <= loss <= high:
            return float(few * (many / few) ** ((high - loss) / (high - low)))
    return math.nan


def table(name: str, lines: Sequence[Line], alone: Sequence[tuple[int, float]], steps: int) -> Iterator[str]:
    """Yield the lines of one method's table."""
    yield f"{name:<18}{'rate':>6}{'loss':>9}{'+-':>8}{'target':>8}{'MB sent':>9}{'speed-up':>10}{'gain':>8}"
    before: Line | None = None
    for line in lines:
        loss, error = mean_and_error(line.losses)
        gain = (before.loss - loss) / math.log2(line.num_peers / before.num_peers) if before else math.nan
        speed_up = steps_alone(loss, alone) / steps
        losses = _cell(loss, 9, 4) + _cell(error, 8, 4) + _cell(line.target_steps, 8, 0)
        yield f"{line.num_peers:>5} peers{line.learning_rate:>13}{losses}{line.sent_mb:>9.1f}{_cell(speed_up, 10, 2)}{_cell(gain, 8, 3)}"
        before = line


def _cell(value: float, width: int, digits: int) -> str:
    return f"{value:>{width}.{digits}f}" if math.isfinite(value) else f"{'-':>{width}}"


def main() -> None:
    """Print one table for each method, batch size by batch size."""
    given = _arguments()
    torch.set_num_threads(1)
    keep_products_exact()
    runs = Runs(given.keep, given.data, given.device)
    for batch_size in given.batch_size:
        base: Run = {"steps": str(given.steps), "batch_size": batch_size, **dict(text.split("=", 1) for text in given.set)}
        alone = [
            (steps, best_line(runs, {**base, "method": "local", "steps": str(steps)}, 1, given).loss)
            for steps in (given.steps * 2**power for power in range(1 + math.ceil(math.log2(max(given.peers)))))
        ]
        print(f"\nbatch size {batch_size}, {given.steps} steps, target {given.target}, seeds {' '.join(map(str, given.seeds))}")
        print("one peer: " + ", ".join(f"{steps} steps {loss:.4f}" for steps, loss in alone))
        one = best_line(runs, {**base, "method": "local"}, 1, given)
        for name, settings in rows(given):
            lines = [one] + [best_line(runs, {**base, **settings}, num_peers, given) for num_peers in given.peers if num_peers > 1]
            print("\n".join(table(name, lines, alone, given.steps)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What more peers bring.")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--every", type=int, nargs="+", default=[2], help="mean inner steps between two meetings that a peer begins")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learning-rate", nargs="+", default=["0.01", "0.02"], help="tried by every method at every number of peers")
    parser.add_argument("--batch-size", nargs="+", default=["4", "32"], help="sequences of 128 tokens per inner step")
    parser.add_argument("--target", type=float, default=2.2, help="nats per token")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of `peer simulate`, such as precision=bf16")
    parser.add_argument("--data", type=Path, help="a text file; default: the sources of this Python")
    parser.add_argument("--device", default="cpu", help="of all runs")
    parser.add_argument("--keep", type=Path, help="file that keeps each finished run, and from which a second start goes on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
