"""Streaming DiLoCo's Table 4 (arXiv 2501.18512): Gbit/s for 50, 80, 90, 95 and 99 % of the time spent computing, beside the model's.

The paper does not say how many bits a parameter has on the wire. 13.4 reproduces 72 of the 75 entries and the other three within one point
of the grid that its values lie on (16 bits, read one point below the target).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gossamer.peer.simulator.network import Sending, Workload, compute_utilization, streaming

PAPER_BITS: Final = 13.4
GRID: Final = np.logspace(-1, 3, 50) * 1e9  # bits per second: the grid that the table's values lie on
TARGETS: Final = (0.5, 0.8, 0.9, 0.95, 0.99)
WORKLOADS: Final = {"1B": Workload(1e9, 24, 0.1), "10B": Workload(1e10, 48, 0.8), "100B": Workload(1e11, 108, 4.9)}
TABLE: Final = {
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}


def data_parallel(bits: float) -> Sending:
    """Send everything at every step."""
    return Sending(1, 1, bits)


def diloco(bits: float) -> Sending:
    """Send everything every 100 steps."""
    return Sending(1, 100, bits)


def sendings(workload: Workload, bits: float) -> tuple[Sending, ...]:
    """Return what each row of the table sends: data parallel, DiLoCo, streaming, with overlap, with a quarter of the bits too."""
    return (
        data_parallel(bits),
        diloco(bits),
        streaming(workload, bits),
        streaming(workload, bits, overlap_steps=1),
        streaming(workload, bits / 4, overlap_steps=1),
    )


def points(workload: Workload, sending: Sending) -> list[int]:
    """Return the first point of the grid that reaches each target."""
    reached = compute_utilization(workload, sending, GRID)
    return [int(np.argmax(reached >= target)) for target in TARGETS]


def paper_point(gigabits: float) -> int:
    """Return the point of the grid that a printed value stands for."""
    return int(np.argmin(np.abs(np.log(GRID / (gigabits * 1e9)))))


def grid_errors() -> list[int]:
    """Return by how many points of the grid each of the 75 entries is off."""
    errors = []
    for size, workload in WORKLOADS.items():
        for row, sending in zip(TABLE[size], sendings(workload, PAPER_BITS), strict=True):
            ours = points(workload, sending)
            errors += [point - paper_point(value) for point, value in zip(ours, row, strict=True)]
    return errors
