"""How much longer a tree all-reduce takes than a pair's exchange, beside NoLoCo's Figure 5A (arXiv 2506.10911).

    python -m benchmarks.latency [--trials N]

Log-normal send times; a local pair sends to the root and back, as the paper counts it (a symmetric swap takes half of that). The figure
has no table: `theirs` is a re-simulation of its model, consistent with the figure's axis. About a minute.
"""

from __future__ import annotations

import argparse
from typing import Final

import numpy as np

from gossamer.peer.simulator.network import Links, swap_seconds, tree_seconds

SIZES: Final = (4, 16, 64, 256, 1024)
THEIRS: Final = {
    0.0: (2.0, 4.0, 6.0, 8.0, 10.0),
    0.5: (2.1, 4.5, 7.0, 9.7, 12.3),
    1.0: (2.2, 5.2, 8.6, 12.6, 16.9),
    1.5: (2.4, 5.8, 10.4, 16.5, 23.9),
    2.0: (2.5, 6.4, 12.6, 20.3, 31.2),
    2.5: (2.4, 6.9, 13.8, 24.1, 38.2),
}


def ratios(variation: float, trials: int) -> list[float]:
    """Return tree over pair for each swarm size; `trials` are for the largest, smaller ones get as many draws."""
    links, random = Links(1.0, variation), np.random.default_rng(0)
    pair = 2.0 * swap_seconds(links, 0.0, 2_000_000, random)
    return [tree_seconds(links, 0.0, size, trials * SIZES[-1] // size, random) / pair for size in SIZES]


def main() -> None:
    """Print both tables side by side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    print(f"tree / pair for {', '.join(map(str, SIZES))} peers: ours | theirs")
    worst = 0.0
    for variation, theirs in THEIRS.items():
        ours = ratios(variation, trials)
        worst = max(worst, *(abs(one / other - 1.0) for one, other in zip(ours, theirs, strict=True)))
        print(
            f"std/mean {variation:3.1f}   {' '.join(f'{value:6.2f}' for value in ours)} | {' '.join(f'{value:5.1f}' for value in theirs)}"
        )
    print(f"largest difference {100 * worst:.1f} %")


if __name__ == "__main__":
    main()
