"""Every method with its own tuned learning rate and outer step: loss, bytes and spread at equal tokens.

    python -m benchmarks.methods [--inner-steps N ...] [--seeds N ...] [--steps N] [--keep FILE]

Four peers, 400 inner steps, exchanges that take one step. First each contestant is tuned with fp32, on its own seed, exchanging every 10
steps: three learning rates at the plain outer step (alpha 0, beta 1), then, at the best rate, three common outer steps and that of its
paper. If the best rate is at the edge of the grid, the next one beyond it is tried too. `ddp` and `local` (never meets) have no outer step.
Then the tuned contestants run on every seed. On demand a fragment meets every 0.7 inner_steps, so groups get 0.7 of the named inner_steps.
Bits are those of one copy of each message: exact for pairs, a lower bound for groups. 100 s of a core per run; about 130 runs by default.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.population import Diverged
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.training import Venue, simulate
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kept = TypeVar("Kept")
Run = Mapping[str, str]  # settings of `peer simulate` by name, as text; all else as the default manifest has it
EVAL_BATCHES = 128
ONE_RUN = "--one-run"  # how a process of one run is started
TUNING: Run = {"codec": "fp32", "inner_steps": "10", "seed": "3"}
PLAIN: Run = {"alpha": "0", "beta": "1", "gamma": "1"}
OUTER_STEPS: tuple[Run, ...] = (  # gamma is for pairs only, and has to be below 2(1 - alpha^2)
    {"alpha": "0.3", "beta": "0.7", "gamma": "1"},
    {"alpha": "0.5", "beta": "0.5", "gamma": "0.7"},
    {"alpha": "0.5", "beta": "0.7", "gamma": "0.7"},  # NoLoCo's own
)
ADAMW: Run = {"optimizer": "adamw"}
MUON: Run = {"optimizer": "muon"}
DILOCO: Run = {"alpha": "0.9", "beta": "0.7", "gamma": "0.2"}
STREAMING: Run = {"alpha": "0.9", "beta": "0.6", "gamma": "0.2"}
RATES = ("7e-4", "1e-3", "1.5e-3", "2.2e-3", "3.2e-3", "5e-3", "8e-3", "1.2e-2", "1.8e-2", "2.7e-2")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run; all NaN if it diverged."""

    loss: float = math.nan  # held-out, nats per token: mean over the peers
    averaged: float = math.nan  # held-out loss of the mean of their weights
    weight_std: float = math.nan
    bits_per_step: float = math.nan  # what a peer sends per parameter and inner step


@dataclass(frozen=True, slots=True)
class Contestant:
    """A method, its tuned settings, and the codecs of its rows."""

    settings: Run
    codecs: tuple[str, ...] = ("fp32",)
    outer_steps: tuple[Run, ...] = ()
    is_group: bool = False
    rates: tuple[int, int] = (1, 4)  # those of RATES that are tried, from and to


CONTESTANTS: Mapping[str, Contestant] = {
    "ddp": Contestant({"method": "ddp"}),
    "local": Contestant({"method": "local"}),
    "noloco": Contestant({"method": "noloco"}, ("fp32", "modulo4"), OUTER_STEPS),
    "diloco": Contestant({"method": "diloco"}, outer_steps=(*OUTER_STEPS, DILOCO), is_group=True),
    "streaming": Contestant({"method": "streaming"}, ("fp32", "e3m0"), (*OUTER_STEPS, STREAMING), is_group=True),
    "local, Muon": Contestant({"method": "local", **MUON}, rates=(5, 8)),
    "noloco, Muon": Contestant({"method": "noloco", **MUON}, ("fp32", "modulo4"), rates=(5, 8)),
    "ddp, Muon": Contestant({"method": "ddp", **MUON}, rates=(5, 8)),
}
Tried = list[tuple[Run, Outcome]]


def tuned(given: argparse.Namespace) -> dict[str, Run]:
    """Return each contestant's best settings, and print all tried ones."""
    base: Run = {"peers": "4", "steps": given.steps, "delay": "1", **TUNING}
    found = _tried(base, {name: [_at(name, rate) for rate in RATES[slice(*one.rates)]] for name, one in CONTESTANTS.items()}, given)
    beyond = {name: rate_beyond(best_settings(name, rows)["learning_rate"], CONTESTANTS[name].rates) for name, rows in found.items()}
    for name, rows in _tried(base, {name: [_at(name, rate)] for name, rate in beyond.items() if rate}, given).items():
        found[name] += rows
    best = {name: best_settings(name, rows)["learning_rate"] for name, rows in found.items()}
    outer = {name: [{"learning_rate": rate, **step} for step in CONTESTANTS[name].outer_steps] for name, rate in best.items()}
    for name, rows in _tried(base, outer, given).items():
        found[name] += rows
    for name, rows in found.items():
        for settings, outcome in rows:
            print(f"{name:<18}{_text(settings):<54}{shown_loss(name, outcome):>8.4f}")
    return {name: best_settings(name, rows) for name, rows in found.items()}


def _tried(base: Run, asked: Mapping[str, Sequence[Run]], given: argparse.Namespace) -> dict[str, Tried]:
    flat = [(name, settings) for name, rows in asked.items() for settings in rows]
    outcomes = run_all([run_of(name, {**base, **settings}) for name, settings in flat], given)
    pairs = list(zip(flat, outcomes, strict=True))
    return {name: [(settings, outcome) for (_, settings), outcome in rows] for name, rows in groupby(pairs, lambda pair: pair[0][0])}


def _at(name: str, rate: str) -> Run:
    return {"learning_rate": rate, **({} if _meets_never(name) else PLAIN)}


def rate_beyond(best: str, tried: tuple[int, int]) -> str:
    """Return the untried rate next to the best one; empty if both its neighbours were tried."""
    at, (first, end) = RATES.index(best), tried
    return RATES[at - 1] if at == first > 0 else RATES[end] if at == end - 1 and end < len(RATES) else ""


def run_of(name: str, settings: Run) -> Run:
    """Return a contestant's run with these settings, without those that have no effect on it."""
    left_out = ("codec", "inner_steps", "delay") if _meets_never(name) else ()
    return {**{key: text for key, text in settings.items() if key not in left_out}, **ADAMW, **CONTESTANTS[name].settings}


def _meets_never(name: str) -> bool:
    """Return whether codec and inner_steps have no effect."""
    return CONTESTANTS[name].settings["method"] in ("ddp", "local")


def best_settings(name: str, rows: Tried) -> Run:
    """Return the settings of the lowest loss; diverged runs come last."""
    return min(rows, key=lambda row: (math.isnan(row[1].loss), shown_loss(name, row[1])))[0]


def shown_loss(name: str, outcome: Outcome) -> float:
    """Return the loss by which a method is compared: that of the averaged weights, or the mean over peers that never meet."""
    return outcome.loss if name.startswith("local") else outcome.averaged


def _text(settings: Run) -> str:
    return ", ".join(f"{name} {text}" for name, text in settings.items())


def _inner_steps(one: Contestant, every: str) -> str:
    return str(round(MEETING_INTERVAL * int(every))) if one.is_group else every


def rows_of(best: Mapping[str, Run], given: argparse.Namespace) -> list[tuple[str, Run]]:
    """Return the table's rows: a contestant's name, and its settings but for the seed."""
    rows: list[tuple[str, Run]] = []
    for name, one in CONTESTANTS.items():
        for every in ["1"] if _meets_never(name) else given.inner_steps:
            rows += [(name, {"codec": codec, "inner_steps": _inner_steps(one, every), **best[name]}) for codec in one.codecs]
    return rows


# ---------------------------------------------------------------------- simulations, each in a process of its own


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of the runs."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, each on one thread")
    made.add_argument("--keep", type=Path, help="file that keeps each finished run, and from which a second start goes on")
    return made


def run_all(runs: Iterable[Run], given: argparse.Namespace) -> list[Outcome]:
    """Return the outcomes of runs in their order. Runs in the `--keep` file are not repeated."""
    wanted = [key(run) for run in runs]
    known = kept(given.keep, Outcome)
    missing = list(dict.fromkeys(one for one in wanted if one not in known))
    started_s = time.monotonic()
    with ThreadPoolExecutor(given.workers) as threads:
        for number, finished in enumerate(as_completed([threads.submit(_in_own_process, one) for one in missing]), 1):
            done, outcome = finished.result()
            known[done] = outcome
            keep(given.keep, done, outcome)
            took = f"{time.monotonic() - started_s:5.0f} s, {number} of {len(missing)}"
            print(f"{took}: {done} {outcome.averaged:.4f}", file=sys.stderr, flush=True)
    return [known[one] for one in wanted]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; NaN for both when a run diverged, and for the error of a single value."""
    if any(math.isnan(value) for value in values):
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def key(run: Run, *beside: object, base: Manifest | None = None) -> str:
    """Return a run as one line: its settings, and a digest of all that they leave open; `beside`: what else an outcome depends on."""
    settings = " ".join(f"{name}={run[name]}" for name in sorted(run))
    manifest = _scenario(settings, base).manifest.model_dump_json()
    around = " ".join(map(str, (manifest, EVAL_BATCHES, platform.python_version(), torch.__version__, *beside)))
    return f"{settings} #{hashlib.sha256(around.encode()).hexdigest()[:8]}"


def _scenario(settings: str, base: Manifest | None = None) -> Scenario:
    return scenario(base or Manifest(), dict(setting(text) for text in settings.split()))


def _in_own_process(wanted: str) -> tuple[str, Outcome]:
    command = [sys.executable, "-m", "benchmarks.methods", ONE_RUN, wanted]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return wanted, Outcome(**json.loads(printed))


def _outcome(wanted: str) -> Outcome:
    made = _scenario(wanted.partition(" #")[0])
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = simulate(made, Venue(Path(folder), device="cpu", num_eval_batches=EVAL_BATCHES), lambda *_: None)
        except Diverged:
            return Outcome()
    return Outcome(result.eval_loss_mean, result.eval_loss_averaged, result.weight_std, result.bits_per_step)


def kept(file: Path | None, kind: Callable[..., Kept]) -> dict[str, Kept]:
    """Return the outcomes in a file of kept runs, by key; an unfinished line is skipped."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    known = {}
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # an earlier benchmark was interrupted while it wrote this line
            row = json.loads(line)
            done = row.pop("run")
            known[done] = kind(**row)
    return known


def keep(file: Path | None, done: str, outcome: DataclassInstance) -> None:
    """Append the outcome of a run, named by its key, to the file of kept runs, if there is one."""
    if file:
        with file.open("a") as lines:  # on a line of its own, even after an unfinished one
            lines.write("\n" + json.dumps({"run": done, **asdict(outcome)}))


def main() -> None:
    """Print the tuning, then the table, best first."""
    options = parser("All methods, tuned.")
    options.add_argument("--inner-steps", nargs="+", default=["5", "25"])
    options.add_argument("--steps", default="400")
    given = options.parse_args()
    rows = rows_of(tuned(given), given)
    base: Run = {"peers": "4", "steps": given.steps, "delay": "1"}
    outcomes = run_all([run_of(name, {**base, **settings, "seed": str(seed)}) for name, settings in rows for seed in given.seeds], given)
    table = []
    for at, (name, settings) in enumerate(rows):
        seeds = outcomes[at * len(given.seeds) : (at + 1) * len(given.seeds)]
        loss, error = mean_and_error([shown_loss(name, one) for one in seeds])
        spread, bits = (mean_and_error([getattr(one, key) for one in seeds])[0] for key in ("weight_std", "bits_per_step"))
        how = ("", "") if _meets_never(name) else (settings["codec"], settings["inner_steps"])
        rest = _text({key: text for key, text in settings.items() if key not in ("codec", "inner_steps")})
        table.append((loss, f"{name:<18}{how[0]:<9}{how[1]:>6}{loss:>9.4f}{error:>8.4f}{spread:>10.1e}{bits:>16.2f}   {rest}"))
    print(f"\n{'method':<18}{'codec':<9}{'every':>6}{'loss':>9}{'+-':>8}{'spread':>10}{'bit/param/step':>16}   settings")
    for _, line in sorted(table, key=lambda row: (math.isnan(row[0]), row[0])):
        print(line)


if __name__ == "__main__":
    if sys.argv[1:2] == [ONE_RUN]:
        torch.set_num_threads(1)
        print(json.dumps(asdict(_outcome(sys.argv[2]))))
    else:
        main()
