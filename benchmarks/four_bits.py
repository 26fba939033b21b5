"""What a codec costs in final loss: NoLoCo with each codec beside NoLoCo with fp32, seed by seed.

    python -m benchmarks.four_bits [--codecs NAME ...] [--inner-steps N ...] [--speeds LIST ...] [--optimizer NAME --learning-rate R]
                                   [--seeds N ...] [--keep FILE]

Eight peers, 300 inner steps, meetings that take one step; AdamW as in the papers, unless another is named. The aim: `modulo4` within 0.1 %
of fp32. Two runs that differ by a rounding error part ways by about as much, so what counts is the mean over many pairs of runs, and its
standard error stands beside it. Three minutes of a core per run; 24 runs for one codec with the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from benchmarks.runs import Outcome, Run, mean_and_error, parser, run_all

BASE: Run = {"method": "noloco", "peers": "8", "steps": "300", "delay": "1"}
ADAMW: Run = {"optimizer": "adamw", "learning_rate": "1.5e-3"}
AIM = 0.1  # percent


def excess(outcome: Outcome, exact: Outcome) -> float:
    """Return by how many percent the peers' mean loss lies above that with fp32."""
    return 100.0 * (outcome.loss / exact.loss - 1.0)


def print_summary(name: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> None:
    """Print one line about a set of pairs: a codec's outcome and that of fp32."""
    mean, error = mean_and_error([excess(outcome, exact) for outcome, exact in pairs])
    wider, _ = mean_and_error([100.0 * (outcome.weight_std / exact.weight_std - 1.0) for outcome, exact in pairs])
    print(f"{name:<34}{len(pairs):>3} pairs: {mean:+.3f} % +- {error:.3f} % (aim: {AIM} %), weight spread {wider:+.0f} %")


def main() -> None:
    """Print every pair, then the means."""
    options = parser("Final loss with a codec beside fp32.")
    options.add_argument("--codecs", nargs="+", default=["modulo4"])
    options.add_argument("--inner-steps", nargs="+", default=["25", "5"])
    options.add_argument("--speeds", nargs="+", default=["1", "4:1"])
    options.add_argument("--optimizer", default=ADAMW["optimizer"])
    options.add_argument("--learning-rate", default=ADAMW["learning_rate"])
    given = options.parse_args()
    inner: Run = {"optimizer": given.optimizer, "learning_rate": given.learning_rate}
    cells = list(product(given.inner_steps, given.speeds, given.seeds))
    names = ["fp32", *given.codecs]
    runs: list[Run] = [
        {**BASE, **inner, "codec": codec, "inner_steps": every, "speeds": speeds, "seed": str(seed)}
        for every, speeds, seed in cells
        for codec in names
    ]
    outcomes = run_all(runs, given)
    rows = [dict(zip(names, outcomes[start : start + len(names)], strict=True)) for start in range(0, len(runs), len(names))]
    print(f"{'every':>5} {'speeds':>6} {'seed':>4} {'fp32':>8}" + "".join(f"{codec:>18}" for codec in given.codecs))
    for (every, speeds, seed), row in zip(cells, rows, strict=True):
        found = "".join(f"{row[codec].loss:>9.4f} {excess(row[codec], row['fp32']):>+6.2f} %" for codec in given.codecs)
        print(f"{every:>5} {speeds:>6} {seed:>4} {row['fp32'].loss:>8.4f}{found}")
    for codec in given.codecs:
        for every, speeds in product(given.inner_steps, given.speeds):
            here = [row for cell, row in zip(cells, rows, strict=True) if cell[:2] == (every, speeds)]
            print_summary(f"{codec}, every {every}, speeds {speeds}", [(row[codec], row["fp32"]) for row in here])
        print_summary(f"{codec}, all", [(row[codec], row["fp32"]) for row in rows])


if __name__ == "__main__":
    main()
