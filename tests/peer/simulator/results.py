"""Results as simulations return them, made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gossamer.peer.simulator.results import Point, Result

CURVE = tuple(Point(10.0 * n, 1000 * n, 500.0 * n, 5.0 / n, 0.001 * n, 5.1 / n) for n in range(1, 6))
RESULT = Result(
    method="noloco",
    codec="modulo4",
    peers=2,
    steps=50,
    tokens=5000,
    eval_loss=(2.0, 2.25),
    eval_loss_averaged=2.1,
    weight_std=0.00125,
    output_distance=0.002,
    meetings=12,
    bits_per_param=4.14,
    wall_seconds=3.5,
    solo=1,
    attackers=0,
    hostile=0,
    hostile_merged=0,
    dropped=0,
    refused=0,
    sent_bytes=2.5e6,
    bits_per_step=0.1,
    virtual_steps=50.0,
    train_seconds=2.5,
    curve=CURVE,
)


def result(**fields: Any) -> Result:
    return replace(RESULT, **fields)
