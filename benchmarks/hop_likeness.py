"""How much honest holders of a stage differ in what they answer to the same micro-batch, and how long the gradients are.

    python -m benchmarks.hop_likeness [--stages 2] [--peers 4] [--seeds 1,2] [--set NAME=VALUE ...]

Staged runs of the simulator: of one hop in two, two holders answer. Printed for the parts of the run: the cosine of the two gradients
(least, lowest hundredth, median), the ratio of their lengths, the gap of the losses and the share of opposed tokens in per cent (highest
hundredth, most), the length of a gradient in the usual lengths of its receiver (highest hundredth, most), and how many pairs are unlike.
The limits of `peer/trainer/likeness.py` and `peer/trainer/magnitudes.py` come from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer.peer.pipeline import doubling
from gossamer.peer.trainer import magnitudes
from gossamer.peer.trainer.likeness import Likeness
from gossamer.peer.trainer.magnitudes import GradientLengths
from tests.attacks.staged import StagedTrial

PARTS = 4


shorten = GradientLengths.shorten
noted: list[float] = []  # lengths of gradients, in usual lengths


def note_length(lengths: GradientLengths, gradient: Tensor, share: float = 1.0) -> Tensor:
    """Note the length of a gradient in usual lengths; return the gradient as it is."""
    usual = float(np.median(lengths._recent)) if len(lengths._recent) >= magnitudes.LEARNED else 0.0  # earlier than the limit
    shorten(lengths, gradient, share)
    if usual:
        noted.append(lengths._recent[-1] / usual)
    return gradient


def row(name: str, found: Sequence[Likeness], lengths: Sequence[float]) -> str:
    """Return one line of the table."""
    cosines, ratios, gaps, opposed = (np.array([getattr(one, key) for one in found]) for key in ("cosine", "ratio", "loss_gap", "opposed"))
    long = np.array(lengths or [np.nan])
    return (
        f"{name:<22}{len(found):>7}{cosines.min():>8.3f}{np.quantile(cosines, 0.01):>8.3f}{np.median(cosines):>8.3f}"
        f"{np.quantile(ratios, 0.99):>9.2f}{ratios.max():>7.2f}{np.quantile(gaps, 0.99):>9.3f}{gaps.max():>8.3f}"
        f"{100 * np.quantile(opposed, 0.99):>9.1f}{100 * opposed.max():>7.1f}"
        f"{np.quantile(long, 0.99):>9.2f}{long.max():>7.2f}{sum(not one.is_honest for one in found):>8}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    doubling.EVERY = 2
    GradientLengths.shorten = note_length  # type: ignore[assignment, method-assign]
    heads = (
        ("pairs", 7), ("cosine", 8), ("1 %", 8), ("median", 8), ("ratio99", 9), ("most", 7), ("gap99", 9), ("most", 8),
        ("opp99", 9), ("most", 7), ("long99", 9), ("most", 7), ("unlike", 8),
    )  # fmt: skip
    print(f"{'steps':<22}" + "".join(f"{head:>{width}}" for head, width in heads))
    for seed in map(int, given.seeds.split(",")):
        noted.clear()
        trial = StagedTrial((given.stages, given.stages), given.peers, "all", seed, " ".join(given.set))
        trial.finish("honest-hops")
        steps, found, lengths = trial.population.scenario.num_steps, trial.stages.likenesses, noted
        for part in range(PARTS):
            first, last = part * steps // PARTS, (part + 1) * steps // PARTS
            share = slice(part * len(lengths) // PARTS, (part + 1) * len(lengths) // PARTS)
            some = [likeness for step, likeness in found if first <= step < last]
            print(row(f"{first + 1} to {last}, seed {seed}", some, lengths[share]), flush=True)


if __name__ == "__main__":
    main()
