"""Many simulations for one benchmark: each in a process of its own, several at a time, and kept so that a benchmark broken off goes on.

A run is the settings of `peer simulate` by name, as text. All runs train the default model on the default text. What is kept counts for the
same settings only as long as all that they leave open stands too: the manifest's defaults, the Python release (its sources are the text)
and torch's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.population import Diverged
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.training import Venue, simulate
from gossamer.protocol.run.manifest import Manifest

EVAL_BATCHES = 128
Run = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a run; all NaN where it diverged."""

    loss: float = math.nan  # held-out, nats per token: mean over the peers
    averaged: float = math.nan  # held-out loss of the mean of their weights
    weight_std: float = math.nan
    bits_per_step: float = math.nan  # what a peer sends per parameter and inner step


def parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that every such benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, each on one thread")
    made.add_argument("--keep", type=Path, help="file that keeps each finished run, and from which a second start goes on")
    return made


def run_all(runs: Iterable[Run], given: argparse.Namespace) -> list[Outcome]:
    """Return the outcomes of runs, in their order. Those that `--keep` knows are not run again."""
    wanted = [key(run) for run in runs]
    known = _kept(given.keep)
    missing = list(dict.fromkeys(one for one in wanted if one not in known))
    started_s = time.monotonic()
    with ThreadPoolExecutor(given.workers) as threads:
        for number, finished in enumerate(as_completed([threads.submit(_in_own_process, one) for one in missing]), 1):
            done, outcome = finished.result()
            known[done] = outcome
            _keep(given.keep, done, outcome)
            took = f"{time.monotonic() - started_s:5.0f} s, {number} of {len(missing)}"
            print(f"{took}: {done} {outcome.averaged:.4f}", file=sys.stderr, flush=True)
    return [known[one] for one in wanted]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; NaN for both when a run diverged, and for the error of a single value."""
    if any(math.isnan(value) for value in values):
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def key(run: Run) -> str:
    """Return a run as one line: its settings, and what stands for all that they leave open."""
    settings = " ".join(f"{name}={run[name]}" for name in sorted(run))
    manifest = _scenario(settings).manifest.model_dump_json()
    around = f"{manifest} {EVAL_BATCHES} {platform.python_version()} {torch.__version__}"
    return f"{settings} #{hashlib.sha256(around.encode()).hexdigest()[:8]}"


def _scenario(settings: str) -> Scenario:
    return scenario(Manifest(), dict(setting(text) for text in settings.split()))


def _in_own_process(wanted: str) -> tuple[str, Outcome]:
    printed = subprocess.run([sys.executable, "-m", "benchmarks.runs", wanted], check=True, stdout=subprocess.PIPE, text=True).stdout
    return wanted, Outcome(**json.loads(printed))


def _outcome(wanted: str) -> Outcome:
    made = _scenario(wanted.partition(" #")[0])
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = simulate(made, Venue(Path(folder), device="cpu", num_eval_batches=EVAL_BATCHES), lambda progress: None)
        except Diverged:
            return Outcome()
    return Outcome(result.eval_loss_mean, result.eval_loss_averaged, result.weight_std, result.bits_per_step)


def _kept(file: Path | None) -> dict[str, Outcome]:
    lines = file.read_text().splitlines() if file and file.exists() else []
    known = {}
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # cut off by the end of an earlier benchmark
            row = json.loads(line)
            done = row.pop("run")
            known[done] = Outcome(**row)
    return known


def _keep(file: Path | None, done: str, outcome: Outcome) -> None:
    if file:
        with file.open("a") as lines:
            lines.write(json.dumps({"run": done, **asdict(outcome)}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(asdict(_outcome(sys.argv[1]))))
