"""Runs as they could have come out, for the tests of tables and pictures."""

from __future__ import annotations

from typing import Any

from benchmarks.side_by_side.results import Point, Run, Setting


def made_run(system: str, mbit_per_s: float = 0.0, *, fault: str = "none", seed: int = 0, **different: Any) -> Run:
    values: dict[str, Any] = {
        "outcome": "finished",
        "commit": "1234567",
        "date": "2026-11-22",
        "ready_s": 9.0,
        "wall_s": 100.0,
        "all_training_s": 0.5,
        "own_steps": [300] * 4,
        "trained_s": [90.0, 91.0, 92.0, 93.0],
        "done_s": [95.0, 96.0, 97.0, 100.0],
        "train_s": [80.0] * 4,
        "blocked_s": [8.0] * 4,
        "sent_mb": [10.0, 20.0, 30.0, 40.0],
        "cpu_s": [60.0] * 4,
        "pause_s": (1.5, 0.0),
        "losses": [1.71, 1.72, 1.73, 1.74],
        "loss_average": 1.7,
        "curve": [Point(2.0, 5.0, 4.0, 0.5), Point(50.0, 150.0, 2.0, 12.0), Point(100.0, 300.0, 1.8, 25.0)],
    }
    return Run(Setting(system, mbit_per_s, fault, seed=seed), **values | different)
