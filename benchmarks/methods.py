"""Every method with its own tuned learning rate and outer step: loss, bytes and spread at equal tokens.

    python -m benchmarks.methods [--inner-steps N ...] [--seeds N ...] [--steps N] [--keep FILE]

Four peers, 400 inner steps, exchanges that take one step. First each method is tuned with fp32, on a seed of its own and meeting every 10
steps: three learning rates at the plain outer step (alpha 0, beta 1), then four outer steps at the best of them; the same grid and number
of runs for each. What the grid's edge wins is tried one step further. Then the tuned methods run on every seed, with their codecs. `ddp`
(gradients averaged at each step) and `local` (never) are the ends. 100 s of a core per run; about 110 runs with the defaults.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.runs import Outcome, Run, mean_and_error, parser, run_all

TUNING: Run = {"codec": "fp32", "inner_steps": "10", "seed": "3"}
RATES = ("1e-3", "1.5e-3", "2.2e-3")
BELOW, ABOVE = "7e-4", "3.2e-3"  # where the best rate is the grid's first or last
PLAIN: Run = {"alpha": "0", "beta": "1", "gamma": "1"}
OUTER_STEPS: tuple[Run, ...] = (  # gamma is for pairs only, and has to be below 2(1 - alpha^2)
    {"alpha": "0.3", "beta": "0.7", "gamma": "1"},
    {"alpha": "0.5", "beta": "0.5", "gamma": "0.7"},
    {"alpha": "0.5", "beta": "0.7", "gamma": "0.7"},
    {"alpha": "0.9", "beta": "0.1", "gamma": "0.2"},
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A method, how often it may exchange, and with which codecs it is shown."""

    settings: Run
    codecs: tuple[str, ...] = ("fp32",)
    has_outer_step: bool = True
    momentum_only: bool = False  # with alpha 0 it is NoLoCo, whose tuning of the learning rate it shares
    rates: tuple[str, ...] = RATES


CONTESTANTS: Mapping[str, Contestant] = {
    "ddp": Contestant({"method": "ddp"}, has_outer_step=False),
    "local": Contestant({"method": "local"}, has_outer_step=False),
    "noloco": Contestant({"method": "noloco"}, ("fp32", "modulo4")),
    "noloco-averaged": Contestant({"method": "noloco-averaged"}, momentum_only=True),
    "slowmo": Contestant({"method": "slowmo"}, momentum_only=True),
    "gasloc": Contestant({"method": "gasloc"}, momentum_only=True),
    "diloco": Contestant({"method": "diloco"}),
    "streaming": Contestant({"method": "streaming"}, ("fp32", "e3m0")),
    "noloco, Muon": Contestant({"method": "noloco", "optimizer": "muon"}, has_outer_step=False, rates=("5e-4", "1e-3", "2.2e-3")),
}
NEVER = ("ddp", "local")  # neither codec nor inner_steps matter


def tuned(given: argparse.Namespace) -> dict[str, Run]:
    """Return each contestant's best settings, and print all that were tried."""
    base: Run = {"peers": "4", "steps": given.steps, "delay": "1", **TUNING}
    rates = {name: one.rates for name, one in CONTESTANTS.items() if not one.momentum_only}
    found = _tried(base, {name: [_with_rate(name, rate) for rate in tried] for name, tried in rates.items()}, given)
    best = {name: _best(name, rows)["learning_rate"] for name, rows in found.items()}
    edges = {name: BELOW if best[name] == tried[0] else ABOVE for name, tried in rates.items() if best[name] in (tried[0], tried[-1])}
    further = _tried(base, {name: [_with_rate(name, rate)] for name, rate in edges.items()}, given)
    for name, rows in further.items():
        found[name] += rows
    best = {name: _best(name, rows)["learning_rate"] for name, rows in found.items()}
    asked = [name for name, one in CONTESTANTS.items() if one.has_outer_step]
    outer = {name: [{"learning_rate": best.get(name, best["noloco"]), **step} for step in OUTER_STEPS] for name in asked}
    for name, rows in _tried(base, outer, given).items():
        found[name] = found.get(name, []) + rows
    for name, rows in found.items():
        for settings, outcome in rows:
            print(f"{name:<18}{_text(settings):<54}{_shown(name, outcome):>8.4f}")
    return {name: _best(name, rows) for name, rows in found.items()}


Tried = list[tuple[Run, Outcome]]


def _tried(base: Run, asked: Mapping[str, Sequence[Run]], given: argparse.Namespace) -> dict[str, Tried]:
    flat = [(name, settings) for name, rows in asked.items() for settings in rows]
    outcomes = run_all([_run(name, {**base, **settings}) for name, settings in flat], given)
    pairs = list(zip(flat, outcomes, strict=True))
    return {name: [(settings, outcome) for (_, settings), outcome in rows] for name, rows in groupby(pairs, lambda pair: pair[0][0])}


def _with_rate(name: str, rate: str) -> Run:
    return {"learning_rate": rate, **({} if name in NEVER else PLAIN)}


def _run(name: str, settings: Run) -> Run:
    left_out = ("codec", "inner_steps", "delay") if name in NEVER else ()
    return {**{key: text for key, text in settings.items() if key not in left_out}, **CONTESTANTS[name].settings}


def _best(name: str, rows: Tried) -> Run:
    """Return the settings of the lowest loss; what diverged has none."""
    return min((row for row in rows if not math.isnan(row[1].loss)), key=lambda row: _shown(name, row[1]))[0]


def _text(settings: Run) -> str:
    return ", ".join(f"{name} {text}" for name, text in settings.items())


def main() -> None:
    """Print what tuning tried, then the table, best first."""
    options = parser("All methods, tuned.")
    options.add_argument("--inner-steps", nargs="+", default=["5", "25"])
    options.add_argument("--steps", default="400")
    given = options.parse_args()
    best = tuned(given)
    rows: list[tuple[str, str, str, Run]] = []
    for name, one in CONTESTANTS.items():
        for codec in one.codecs:
            for every in ["1"] if name == "ddp" else ["never"] if name == "local" else given.inner_steps:
                rows.append((name, codec, every, {"codec": codec, "inner_steps": every, **best[name]}))
    base: Run = {"peers": "4", "steps": given.steps, "delay": "1"}
    runs = [_run(name, {**base, **settings, "seed": str(seed)}) for name, _, _, settings in rows for seed in given.seeds]
    outcomes = run_all(runs, given)
    print(f"\n{'method':<18}{'codec':<9}{'every':>6}{'loss':>9}{'+-':>8}{'spread':>10}{'bit/param/step':>16}   settings")
    found = [(row, outcomes[at * len(given.seeds) : (at + 1) * len(given.seeds)]) for at, row in enumerate(rows)]
    for (name, codec, every, _), seeds in sorted(found, key=lambda pair: mean_and_error([_shown(pair[0][0], one) for one in pair[1]])[0]):
        loss, error = mean_and_error([_shown(name, one) for one in seeds])
        spread, bits = (mean_and_error([getattr(one, key) for one in seeds])[0] for key in ("weight_std", "bits_per_step"))
        print(f"{name:<18}{codec:<9}{every:>6}{loss:>9.4f}{error:>8.4f}{spread:>10.1e}{bits:>16.2f}   {_text(best[name])}")


def _shown(name: str, outcome: Outcome) -> float:
    """Return the loss that a method is judged by: its averaged weights', or the mean over peers that never met."""
    return outcome.loss if name == "local" else outcome.averaged


if __name__ == "__main__":
    main()
