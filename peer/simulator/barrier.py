"""What waiting costs when inner steps take uneven time: all for the slowest, or each pair for the slower one.

The model of NoLoCo's Figure 5B (arXiv 2506.10911): the time of an inner step is log-normal, communication is free. A pair goes on
together after its meeting, so that delays spread from pair to pair. The figures of the paper come out with log-variance 0.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

STEP_LOG_VARIANCE: Final = 0.5
CHUNK_DRAWS: Final = 1 << 22
TOTAL_DRAWS: Final = 1 << 25  # of a round's slowest peer: a million peers take seconds
MAX_PAIR_PEERS: Final = 4096  # how pairs wait hardly depends on how many there are
MIN_PAIR_PEERS: Final = 64

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Time of a run over the time that its inner steps take, for a group that waits for its slowest and for pairs."""

    group: float
    pairs: float

    @property
    def ratio(self) -> float:
        """Return the group's time over the pairs'."""
        return self.group / self.pairs


def waiting(num_peers: int, inner_steps: int, num_rounds: int, random: np.random.Generator) -> Waiting:
    """Simulate `num_rounds` outer steps, or as many as there are draws for.

    A large group takes fewer rounds, for these do not depend on each other. Delays of pairs spread from round to round, so there
    are fewer pairs first, and fewer rounds only where that is not enough.
    """
    most = min(num_peers, MAX_PAIR_PEERS)
    num_paired = min(most, max(MIN_PAIR_PEERS, TOTAL_DRAWS // (inner_steps * num_rounds)))
    return Waiting(
        group_slowdown(num_peers, inner_steps, _affordable(num_peers, inner_steps, num_rounds), random),
        pair_slowdown(num_paired, inner_steps, _affordable(num_paired, inner_steps, num_rounds), random),
    )


def _affordable(num_peers: int, inner_steps: int, num_rounds: int) -> int:
    return max(2, min(num_rounds, TOTAL_DRAWS // (num_peers * inner_steps)))


def group_slowdown(num_peers: int, inner_steps: int, num_rounds: int, random: np.random.Generator) -> float:
    """Return how much longer a run takes when all wait for the slowest at each outer step."""
    slowest = worked = 0.0
    for _ in range(num_rounds):
        times = _round(num_peers, inner_steps, random)
        slowest, worked = slowest + float(times.max()), worked + float(times.mean())
    return slowest / worked


def pair_slowdown(num_peers: int, inner_steps: int, num_rounds: int, random: np.random.Generator) -> float:
    """Return how much longer a run takes when random pairs go on together; with an odd number one peer sits out each time."""
    clocks, worked = np.zeros(num_peers), 0.0
    for _ in range(num_rounds):
        times = _round(num_peers, inner_steps, random)
        clocks, worked = clocks + times, worked + float(times.mean())
        order, half = random.permutation(num_peers), num_peers // 2
        one, two = order[:half], order[half : 2 * half]
        clocks[one] = clocks[two] = np.maximum(clocks[one], clocks[two])
    return float(clocks.mean()) / worked


def _round(num_peers: int, inner_steps: int, random: np.random.Generator) -> Floats:
    """Draw how long each peer takes for `inner_steps` steps."""
    total, sigma = np.zeros(num_peers), math.sqrt(STEP_LOG_VARIANCE)
    most = max(1, CHUNK_DRAWS // num_peers)
    for start in range(0, inner_steps, most):
        times = random.normal(0.0, sigma, (min(most, inner_steps - start), num_peers))
        total += np.exp(times, out=times).sum(0)
    return total
