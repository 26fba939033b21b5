"""Finished runs, one JSON object per line, from which tables and pictures are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

FAULTS = ("none", "kill", "slow", "cut")


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a run."""

    system: str
    mbit_per_s: float = 0.0  # 0: no limit
    fault: str = "none"
    total_steps: int = 300
    seed: int = 0
    num_peers: int = 4
    every_steps: int = 10
    gossamer_every: str = ""
    task: str = ""

    def __str__(self) -> str:
        line = f"{self.mbit_per_s:g} Mbit/s" if self.mbit_per_s else "unshaped"
        own = f", inner_steps {self.gossamer_every}" if self.gossamer_every else ""
        task = f"{self.task}: " if self.task else ""
        return f"{task}{self.system}, {line}, fault {self.fault}, {self.total_steps} steps, seed {self.seed}{own}"


@dataclass(frozen=True, slots=True)
class Point:
    """The state of all peers together at one time."""

    wall_s: float
    own_steps: float  # mean over the peers
    loss: float  # of the training batches since the point before, mean over the peers
    sent_mb: float  # mean over the peers


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run. Lists have one entry per peer. Seconds count from readiness, for Gossamer from the first inner step."""

    setting: Setting
    outcome: str  # finished; stopped, after the time given to it; hangs: ...; failed: what the first that failed said
    commit: str
    date: str
    ready_s: float  # from the start of the processes to that moment
    wall_s: float  # to the end of the last peer that was to end
    all_training_s: float  # to the first step of the last peer
    own_steps: list[int]
    trained_s: list[float]  # to its last inner step
    done_s: list[float]  # to its end; 0 for one that has not ended
    train_s: list[float]
    blocked_s: list[float]
    sent_mb: list[float]
    cpu_s: list[float]
    pause_s: tuple[float, float]  # longest time between two reports of those without a fault: before the fault, and after it
    losses: list[float | None]  # held-out, nats per token; None for a peer without a checkpoint
    loss_average: float | None  # of the mean of the weights of those without a fault; None where the run was stopped
    meetings: dict[str, int] = field(default_factory=dict)  # Gossamer's by outcome, each counted at both partners; and solo steps
    reasons: dict[str, int] = field(default_factory=dict)  # of those that were neither completed nor busy
    transfers: int = 0  # states that were taken over from others
    curve: list[Point] = field(default_factory=list)

    @property
    def full_wall_s(self) -> float:
        """Return the duration of the whole run; extrapolated for a stopped run; NaN for a run without an end."""
        if self.outcome.startswith("hangs"):
            return math.nan
        if self.outcome != "stopped":
            return self.wall_s
        made = min(self.own_steps)
        return self.wall_s * self.setting.total_steps / made if made else math.inf

    @property
    def blocked(self) -> float:
        """Return the share of the training time that went to the exchange."""
        return sum(self.blocked_s) / max(1e-9, sum(self.train_s))

    @property
    def sent(self) -> float:
        """Return the MB sent per peer; extrapolated for a stopped run."""
        made = min(self.own_steps) if self.outcome == "stopped" else self.setting.total_steps
        return sum(self.sent_mb) / len(self.sent_mb) * self.setting.total_steps / max(1, made)

    @property
    def cpu_per_step(self) -> float:
        """Return the processor seconds of all processes over the inner steps of all peers."""
        return sum(self.cpu_s) / max(1, sum(self.own_steps))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Read what `to_line` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        read = json.loads(line)
        setting, curve = Setting(**read.pop("setting")), [Point(*point) for point in read.pop("curve")]
        return cls(**read | {"setting": setting, "curve": curve, "pause_s": tuple(read["pause_s"])})

    def to_line(self) -> str:
        """Write it as one line."""
        curve = [[round(value, 4) for value in asdict(point).values()] for point in self.curve]
        return json.dumps(asdict(self) | {"curve": curve}) + "\n"


def keep(path: Path, run: Run) -> None:
    """Append a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(run.to_line())


def kept(path: Path) -> dict[Setting, Run]:
    """Read all runs; the last one of each setting."""
    if not path.exists():
        return {}
    runs = (Run.from_line(line) for line in path.read_text().splitlines() if line.strip())
    return {run.setting: run for run in runs}


def chosen(runs: Iterable[Run], **wanted: object) -> list[Run]:
    """Return the runs whose settings have these values."""
    return [run for run in runs if all(getattr(run.setting, name) == value for name, value in wanted.items())]
