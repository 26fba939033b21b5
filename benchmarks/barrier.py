"""How much longer a group waits than pairs when inner steps take uneven time, beside NoLoCo's Figure 5B (arXiv 2506.10911).

    python -m benchmarks.barrier [--rounds N]

Time of DiLoCo over time of NoLoCo at equal inner steps, communication free. `theirs` is a re-simulation of its model; the paper
itself says about 20 % at 1024 peers and 100 inner steps. About a minute.
"""

from __future__ import annotations

import argparse
from typing import Final

import numpy as np

from gossamer.peer.simulator.network import group_slowdown, pair_slowdown

THEIRS: Final = (  # peers, inner steps, ratio
    (16, 100, 1.07),
    (64, 100, 1.11),
    (256, 100, 1.15),
    (1024, 100, 1.19),
    (1024, 50, 1.28),
    (1024, 20, 1.49),
    (1024, 10, 1.73),
)


def main() -> None:
    """Print both tables side by side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=250, help="outer steps")
    rounds, worst = parser.parse_args().rounds, 0.0
    print(" peers  inner steps   group   pairs   ratio | theirs")
    for peers, inner_steps, theirs in THEIRS:
        random = np.random.default_rng(0)
        group, pairs = (slowdown(peers, inner_steps, rounds, random) for slowdown in (group_slowdown, pair_slowdown))
        worst = max(worst, abs(group / pairs - theirs))
        print(f"{peers:6d} {inner_steps:12d} {group:7.3f} {pairs:7.3f} {group / pairs:7.3f} | {theirs:6.2f}")
    print(f"largest difference {worst:.3f}")


if __name__ == "__main__":
    main()
