"""Meetings on demand with token weights beside scheduled pairs without them, at 4:1 and at equal speeds, seed by seed.

    python -m benchmarks.on_demand [--inner-steps N] [--as-often N] [--seeds N ...] [--keep FILE]

Eight peers, 300 inner steps at mean speed, AdamW, fp32, meetings that take one step. On demand a fragment meets every 0.7 inner_steps:
partners cut countdowns short. So the schedule is tried twice, with the same inner_steps and with one that gives it as many meetings. The
aim: lower loss where half of the peers are four times slower, and no loss at equal speeds. Three minutes of a core per run; 18 runs with
the defaults.
"""

from __future__ import annotations

from itertools import product

from benchmarks.four_bits import ADAMW, BASE
from benchmarks.runs import Run, mean_and_error, parser, run_all

SCHEDULED: Run = {"matching": "scheduled", "token_weights": "false"}
SPEEDS = ("4:1", "1")


def main() -> None:
    """Print every set of runs, then the means."""
    options = parser("Meetings on demand beside scheduled ones.")
    options.add_argument("--inner-steps", default="25")
    options.add_argument("--as-often", default="18", help="inner_steps of a schedule with as many meetings")
    given = options.parse_args()
    cells = list(product(SPEEDS, given.seeds))
    every: Run = {"inner_steps": given.inner_steps}
    ways: list[Run] = [every, {**every, **SCHEDULED}, {"inner_steps": given.as_often, **SCHEDULED}]
    runs: list[Run] = [
        {**BASE, **ADAMW, "codec": "fp32", **way, "speeds": speeds, "seed": str(seed)} for speeds, seed in cells for way in ways
    ]
    outcomes = run_all(runs, given)
    rows = [outcomes[start : start + len(ways)] for start in range(0, len(runs), len(ways))]
    names = (f"on demand {given.inner_steps}", f"scheduled {given.inner_steps}", f"scheduled {given.as_often}")
    print("mean loss of the peers, nats per token (bits per parameter and step)")
    print(f"{'speeds':>6} {'seed':>4}" + "".join(f"{name:>20}" for name in names))
    for (speeds, seed), row in zip(cells, rows, strict=True):
        print(f"{speeds:>6} {seed:>4}" + "".join(f"{one.loss:>12.4f} ({one.bits_per_step:5.2f})" for one in row))
    for wanted, (at, name) in product(SPEEDS, enumerate(names[1:], 1)):
        gains = [row[at].loss - row[0].loss for (speeds, _), row in zip(cells, rows, strict=True) if speeds == wanted]
        mean, error = mean_and_error(gains)
        print(f"speeds {wanted}: {names[0]} gains {mean:+.4f} +- {error:.4f} nats over {name}, {len(gains)} seeds")


if __name__ == "__main__":
    main()
