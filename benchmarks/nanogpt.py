"""nanoGPT's line for CPUs, by a swarm: characters of Shakespeare to a held-out loss of 1.88 nats.

    python -m benchmarks.nanogpt steps --data FILE [--peers 1 2 4 8] [--rates 20] [--keep FILE]
    python -m benchmarks.nanogpt race --data FILE [--rates 20] [--steps 300] [--systems NAME ...]

nanoGPT's own line: one process, 4 layers of width 128, blocks of 64 characters, batches of 12, 2,000 iterations to 1.88. Here the demo's
model (as many layers, as wide; Muon) trains with these blocks and batches. FILE is "tiny Shakespeare", which nanoGPT's
data/shakespeare_char/prepare.py fetches: 1.1 MB. The last part of it is held out, as always; a character is a byte.

`steps`: the simulator's. Each number of peers trains in schedules of 60 to 2,000 steps until two of them enclose the target; the
steps to it are interpolated in their logarithm. `--rates` sets the interval of `auto`, at `--step-seconds` of an inner step. Any load.

`race`: four real peers of each system in namespaces, each on a line of that rate, as `python -m benchmarks.side_by_side` (root, an idle
machine). *to target*: wall seconds from readiness, own steps and MB sent until the training batches' loss, mean over the peers of about two
seconds, is at the target (four peers draw the whole text about once in 300 steps, so it is mostly new to the swarm). *loss*: held-out, of
the mean weights at the end. Runs are kept in `--results`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from benchmarks.methods import Run as Settings
from benchmarks.scaling import METHODS, Runs, steps_alone
from benchmarks.side_by_side.__main__ import interruptible, run_missing
from benchmarks.side_by_side.job import NANOGPT
from benchmarks.side_by_side.results import Run, Setting, kept
from benchmarks.side_by_side.systems import SYSTEMS

TARGET: Final = 1.88
SCHEDULES: Final = (60, 125, 250, 500, 1000, 2000)
BLOCK: Final[Settings] = {"batch_size": "12", "sequence_length": "64", "precision": "bf16"}  # faster on a CPU that multiplies in bf16
RACERS: Final = ("gossamer", "torchft", "local_sgd", "optimizer", "ddp")


def steps(given: argparse.Namespace) -> None:
    """Print the steps and bytes to the target by number of peers and line rate."""
    torch.set_num_threads(1)
    runs = Runs(given.keep, given.data)
    print(f"{'peers':>5}{'Mbit/s':>8}{'steps':>7}{'of one':>8}{'MB sent':>9}  schedules: loss")
    one = math.nan
    for num_peers in given.peers:
        for rate in given.rates if num_peers > 1 else given.rates[:1]:
            pairs: Settings = {**METHODS["pairs"], "inner_steps": "auto", "line_mbit": f"{rate:g}", "step_s": f"{given.step_seconds:g}"}
            chosen: Settings = {**(pairs if num_peers > 1 else {"method": "local"}), "peers": str(num_peers), "seed": str(given.seed)}
            found = enclosing(runs, {**BLOCK, **chosen, "learning_rate": given.learning_rate}, first=1000 // num_peers)
            needed = steps_alone(TARGET, [(steps, loss) for steps, (loss, _) in found.items()])
            one = needed if num_peers == 1 else one
            mb = needed * max(sent / steps for steps, (_, sent) in found.items())
            losses = ", ".join(f"{steps} {loss:.4f}" for steps, (loss, _) in sorted(found.items()))
            print(f"{num_peers:>5}{rate:>8g}{needed:>7.0f}{needed / one:>8.2f}{mb:>9.1f}  {losses}", flush=True)


def enclosing(runs: Runs, settings: Settings, first: int) -> dict[int, tuple[float, float]]:
    """Simulate schedules from about `first` steps on until two enclose the target; return loss and MB sent of each by its steps."""
    at = min(range(len(SCHEDULES)), key=lambda place: abs(SCHEDULES[place] - first))
    found: dict[int, tuple[float, float]] = {}
    while 0 <= at < len(SCHEDULES) and SCHEDULES[at] not in found:
        outcome = runs.outcome({**settings, "steps": str(SCHEDULES[at])})
        found[SCHEDULES[at]] = outcome.loss, outcome.sent_mb
        at += 1 if not outcome.loss <= TARGET else -1
    return found


def race(given: argparse.Namespace) -> None:
    """Run what is missing of the systems' runs, and print what each took to the target."""
    wanted = [
        Setting(name, rate, total_steps=given.steps, seed=given.seed, num_peers=num_peers, task=NANOGPT)
        for num_peers in given.peers
        for rate in given.rates
        for name in given.systems
    ]
    given.sample = given.limit  # a run that is stopped earlier shows no seconds to the target
    run_missing(wanted, given)
    known = kept(given.results)
    print(f"{'system':<40}{'peers':>6}{'Mbit/s':>8} | to {TARGET}:{'s':>7}{'steps':>7}{'MB':>8} | {'wall s':>7}{'MB':>8}{'loss':>8}")
    for setting in wanted:
        if setting in known:
            print(row(known[setting]))


def row(run: Run) -> str:
    """Return the row of one run; `~`: the rate of a part of the run, multiplied up."""
    setting, reached = run.setting, to_target(run)
    words = "".join(f"{value:>{width}.{digits}f}" for value, width, digits in zip(reached, (7, 7, 8), (1, 0, 1), strict=True))
    loss = math.nan if run.loss_average is None else run.loss_average
    wall = ("~" if run.outcome == "stopped" else "") + f"{run.full_wall_s:.0f}"
    name = f"{SYSTEMS[setting.system].title:<40}{setting.num_peers:>6}{setting.mbit_per_s:>8g}"
    return f"{name} |         {words} | {wall:>7}{run.sent:>8.1f}{loss:>8.4f}"


def to_target(run: Run) -> tuple[float, float, float]:
    """Return wall seconds, own steps and MB sent per peer until the curve is at the target, interpolated; NaN if it never is."""
    for early, late in pairwise(run.curve):
        if late.loss <= TARGET:
            share = min(1.0, max(0.0, (early.loss - TARGET) / max(1e-9, early.loss - late.loss)))
            pairs = ((early.wall_s, late.wall_s), (early.own_steps, late.own_steps), (early.sent_mb, late.sent_mb))
            seconds, own_steps, sent_mb = (before + share * (after - before) for before, after in pairs)
            return seconds, own_steps, sent_mb
    return math.nan, math.nan, math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    given = parser().parse_args(arguments)
    given.data = given.data.resolve()
    return interruptible(lambda: given.work(given))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(required=True)
    for_steps, for_race = (commands.add_parser(work.__name__, help=work.__doc__) for work in (steps, race))
    for command, work, peers in ((for_steps, steps, [1, 2, 4, 8]), (for_race, race, [4])):
        command.add_argument("--data", type=Path, required=True, metavar="FILE", help="the text")
        command.add_argument("--peers", type=int, nargs="+", default=peers, metavar="N")
        command.add_argument("--rates", type=float, nargs="+", default=[20.0], metavar="MBIT")
        command.add_argument("--seed", type=int, default=0)
        command.set_defaults(work=work, keep=None)
    for_steps.add_argument("--learning-rate", default="0.02")
    for_steps.add_argument("--step-seconds", type=float, default=0.1)
    for_steps.add_argument("--keep", type=Path, metavar="FILE", help="keeps each finished run; a second start goes on from there")
    for_race.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(RACERS), metavar="NAME", help=", ".join(SYSTEMS))
    for_race.add_argument("--steps", type=int, default=300, metavar="N", help="length of the schedule")
    for_race.add_argument("--results", type=Path, default=Path("nanogpt.jsonl"), metavar="FILE")
    for_race.add_argument("--again", action="store_true", help="run what is there already")
    for_race.add_argument("--limit", type=float, default=240.0, metavar="S", help="longest run, in seconds")
    return made


if __name__ == "__main__":
    sys.exit(main())
