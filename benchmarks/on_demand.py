"""Meetings on demand with token weights beside scheduled pairs without them, at 4:1 and at equal speeds, seed by seed.

    python -m benchmarks.on_demand [--inner-steps N] [--seeds N ...] [--keep FILE]

Eight peers, 300 inner steps at mean speed, fp32, meetings that take one step. The aim: lower loss where half of the peers are four times
slower, and no loss at equal speeds. Three minutes of a core per run; 12 runs with the defaults.
"""

from __future__ import annotations

from itertools import product

from benchmarks.four_bits import BASE
from benchmarks.runs import Run, mean_and_error, parser, run_all

SCHEDULED: Run = {"matching": "scheduled", "token_weights": "false"}
SPEEDS = ("4:1", "1")


def main() -> None:
    """Print every pair of runs, then the means."""
    options = parser("Meetings on demand beside scheduled ones.")
    options.add_argument("--inner-steps", default="25")
    given = options.parse_args()
    cells = list(product(SPEEDS, given.seeds))
    common: Run = {**BASE, "codec": "fp32", "inner_steps": given.inner_steps}
    runs: list[Run] = [{**common, **how, "speeds": speeds, "seed": str(seed)} for speeds, seed in cells for how in ({}, SCHEDULED)]
    outcomes = run_all(runs, given)
    pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
    print(f"{'speeds':>6} {'seed':>4} {'on demand':>10} {'scheduled':>10} {'gain':>8}   (mean loss of the peers, nats per token)")
    for (speeds, seed), (demand, scheduled) in zip(cells, pairs, strict=True):
        print(f"{speeds:>6} {seed:>4} {demand.loss:>10.4f} {scheduled.loss:>10.4f} {scheduled.loss - demand.loss:>+8.4f}")
    for wanted in SPEEDS:
        gains = [scheduled.loss - demand.loss for (speeds, _), (demand, scheduled) in zip(cells, pairs, strict=True) if speeds == wanted]
        mean, error = mean_and_error(gains)
        print(f"speeds {wanted}: on demand gains {mean:+.4f} +- {error:.4f} nats over {len(gains)} seeds")


if __name__ == "__main__":
    main()
