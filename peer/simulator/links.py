"""How long a swarm takes to exchange something once: a meeting of pairs, a ring and a tree all-reduce, under log-normal links.

The latency model of NoLoCo (arXiv 2506.10911, section 5.3): a message takes a time drawn anew each time; here plus its bytes over the
bandwidth. Latency-bound and not pipelined, so it flatters neither large messages nor small ones. All functions draw for many trials or
pairs at once, in chunks, so that a million peers fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
CHUNK_DRAWS: Final = 1 << 22  # 32 MiB at a time
EXACT_RING_PEERS: Final = 1024  # beyond, the time per hop is taken from a ring of this size: it has settled by then
NUM_HANDSHAKES: Final = 4  # sends one after the other in a meeting: both Hellos, Commit, Committed
NUM_SWAPS: Final = 4  # sends both ways at once: sketch, commitment, payload, verdict


@dataclass(frozen=True, slots=True)
class Links:
    """Links between any two peers: one-way latency with its mean and relative spread, and bandwidth in bits per second."""

    latency_s: float = 0.05
    variation: float = 0.5  # standard deviation of the latency over its mean
    bandwidth: float = 1e8

    def draw(self, random: np.random.Generator, shape: tuple[int, ...], num_bytes: float = 0.0) -> Seconds:
        """Draw the time that messages of this size take."""
        sigma_squared = math.log1p(self.variation**2)
        times: Seconds = random.normal(-sigma_squared / 2, math.sqrt(sigma_squared), shape)
        np.exp(times, out=times)
        times *= self.latency_s
        times += 8.0 * num_bytes / self.bandwidth
        return times


def swap_seconds(links: Links, num_bytes: float, num_pairs: int, random: np.random.Generator) -> float:
    """Return the mean time in which two peers send each other a message: the longer of two sends."""
    return _mean(links.draw(random, (count, 2), num_bytes).max(1) for count in _chunks(num_pairs, 2))


def meeting_seconds(links: Links, num_bytes: float, num_pairs: int, random: np.random.Generator) -> float:
    """Return the mean time of a whole meeting, handshake and verdicts included; `num_bytes` is the payload of each side."""

    def meetings(count: int) -> Seconds:
        handshakes: Seconds = links.draw(random, (count, NUM_HANDSHAKES)).sum(1)
        swaps: Seconds = links.draw(random, (count, NUM_SWAPS, 2)).max(2).sum(1)
        return handshakes + swaps + 8.0 * num_bytes / links.bandwidth

    return _mean(meetings(count) for count in _chunks(num_pairs, NUM_HANDSHAKES + 2 * NUM_SWAPS))


def tree_seconds(links: Links, num_bytes: float, num_peers: int, num_trials: int, random: np.random.Generator) -> float:
    """Return the mean time of a binary tree all-reduce: up, each parent waiting for both children, and down to the last leaf."""
    return _mean(_tree(links, num_bytes, num_peers, count, random) for count in _chunks(num_trials, 2 * num_peers))


def _tree(links: Links, num_bytes: float, num_peers: int, num_trials: int, random: np.random.Generator) -> Seconds:
    depth = math.ceil(math.log2(num_peers))
    ready = np.zeros((num_trials, 2**depth))
    for _ in range(depth):
        ready = (ready + links.draw(random, ready.shape, num_bytes)).reshape(num_trials, -1, 2).max(2)
    for _ in range(depth):
        ready = np.repeat(ready, 2, axis=1)
        ready += links.draw(random, ready.shape, num_bytes)
    last: Seconds = ready.max(1)
    return last


def ring_seconds(links: Links, num_bytes: float, num_peers: int, num_trials: int, random: np.random.Generator) -> float:
    """Return the mean time of a ring all-reduce: 2(N - 1) hops, each peer passing on 1/N of the message when it has it."""
    if num_peers < 2:
        return 0.0
    simulated = min(num_peers, EXACT_RING_PEERS)
    hops, piece = 2 * (num_peers - 1), num_bytes / num_peers
    times = []
    for _ in range(num_trials):
        ready = np.zeros(simulated)
        for _ in range(2 * (simulated - 1)):
            # A peer sends its next piece once it has received the one before; the send begins when both ends are there.
            ready = np.maximum(np.roll(ready, 1) + links.draw(random, ready.shape, piece), ready)
        times.append(ready.max())
    return float(np.mean(times)) * hops / (2 * (simulated - 1))


def _chunks(total: int, draws_each: int) -> Iterator[int]:
    most = max(1, CHUNK_DRAWS // draws_each)
    for start in range(0, total, most):
        yield min(most, total - start)


def _mean(parts: Iterator[Seconds]) -> float:
    total, count = 0.0, 0
    for part in parts:
        total, count = total + float(part.sum()), count + len(part)
    return total / count
