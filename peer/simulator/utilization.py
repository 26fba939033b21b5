"""Compute utilization: the share of time that training spends computing when the link between sites is the only thing slow.

The simulator of Streaming DiLoCo (arXiv 2501.18512, section 3.1), as far as its text and its Table 4 tell: per inner step one forward
node per layer and two backward nodes (the first layer needs no activation gradient), a serial link, no latency. A layer that was sent
must have arrived before its forward node one step later, or `overlap_steps` after that. All bandwidths are simulated at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from peer.simulator.matching import MEETING_INTERVAL

Seconds = npt.NDArray[np.float64]  # one per bandwidth
GRID: Final = np.logspace(-1, 3, 50) * 1e9  # bits per second: the grid that Table 4's values lie on
NUM_PERIODS: Final = 6
WARM_PERIODS: Final = 2  # left out of the measurement


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained: a model of so many layers, all alike, and how long an inner step computes."""

    num_params: float
    num_layers: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Sending:
    """What crosses the link, and when. `layers_at` returns the layers (from 0) that are sent in the backward pass of a step."""

    layers_at: Callable[[int], frozenset[int]]
    period_steps: int  # after so many steps everything repeats
    bits_per_param: float
    overlap_steps: int = 0  # how many steps later than the next one it may arrive


def data_parallel(workload: Workload, bits_per_param: float) -> Sending:
    """Send everything at every step."""
    everything = frozenset(range(workload.num_layers))
    return Sending(lambda step: everything, 1, bits_per_param)


def diloco(workload: Workload, bits_per_param: float, inner_steps: int = 100) -> Sending:
    """Send everything every `inner_steps`."""
    everything = frozenset(range(workload.num_layers))
    return Sending(lambda step: frozenset() if step % inner_steps else everything, inner_steps, bits_per_param)


def streaming(
    workload: Workload, bits_per_param: float, inner_steps: int = 100, layers_per_fragment: int = 3, overlap_steps: int = 0
) -> Sending:
    """Send one strided fragment at a time, each every `inner_steps` or so."""
    num_fragments = max(1, round(workload.num_layers / layers_per_fragment))
    interval = max(1, round(inner_steps / num_fragments))

    def layers_at(step: int) -> frozenset[int]:
        if step % interval:
            return frozenset()
        return frozenset(range(step // interval % num_fragments, workload.num_layers, num_fragments))

    return Sending(layers_at, interval * num_fragments, bits_per_param, overlap_steps)


def gossip_utilization(workload: Workload, bits_per_param: float, inner_steps: int, bandwidths: Seconds) -> Seconds:
    """Return the share of time spent computing if every meeting had to end before its fragment meets again.

    Meetings on demand, in the background: the whole model every MEETING_INTERVAL * `inner_steps`. Only a link that cannot carry them at
    all costs time. (A real peer does not wait even then: it meets less often.)
    """
    interval_seconds = MEETING_INTERVAL * inner_steps * workload.step_seconds
    return np.minimum(1.0, interval_seconds * bandwidths / (workload.num_params * bits_per_param))


def compute_utilization(workload: Workload, sending: Sending, bandwidths: Seconds) -> Seconds:
    """Return the share of time spent computing at each bandwidth (bits per second)."""
    site = _Site(workload, sending, np.asarray(bandwidths, dtype=np.float64))
    period = max(sending.period_steps, 8)
    warm, total = WARM_PERIODS * period, NUM_PERIODS * period
    for step in range(warm):
        site.step(step)
    started = site.now.copy()
    for step in range(warm, total):
        site.step(step)
    return (total - warm) * workload.step_seconds / (site.now - started)


class _Site:
    """One site in training: the time now, when the link is free, and what is on its way, for every bandwidth."""

    def __init__(self, workload: Workload, sending: Sending, bandwidths: Seconds) -> None:
        layers, seconds = workload.num_layers, workload.step_seconds
        self._sending = sending
        self._num_layers = layers
        self._forward = seconds / (3 * layers)
        self._backward = 2 * seconds / 3 / (2 * layers - 1)
        self._step_seconds = seconds
        self._layer_seconds = sending.bits_per_param * workload.num_params / layers / bandwidths
        self._link = np.zeros_like(bandwidths)
        self._coming: list[list[tuple[int, Seconds]]] = [[] for _ in range(layers)]  # per layer: needed at step, arrives at
        self.now = np.zeros_like(bandwidths)

    def step(self, step: int) -> None:
        """Compute one inner step, waiting where something must have arrived first."""
        sent = self._sending.layers_at(step)
        if not sent and not any(needed <= step for coming in self._coming for needed, _ in coming):
            self.now = self.now + self._step_seconds
            return
        for layer in range(self._num_layers):
            self._wait(step, layer)
            self.now = self.now + self._forward
        for layer in reversed(range(self._num_layers)):
            self.now = self.now + self._backward * (2 if layer else 1)
            if layer in sent:
                self._link = np.maximum(self._link, self.now) + self._layer_seconds
                self._coming[layer].append((step + 1 + self._sending.overlap_steps, self._link))

    def _wait(self, step: int, layer: int) -> None:
        coming = self._coming[layer]
        while coming and coming[0][0] <= step:
            self.now = np.maximum(self.now, coming.pop(0)[1])
