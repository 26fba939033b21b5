"""The results of simulations: figures of the trained swarm, and its curve over virtual time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

SEED: Final = "seed"  # the axis of a sweep over which others are averaged
JSON_KEYS: Final = (
    *("method", "codec", "peers", "steps", "tokens", "eval_loss", "eval_loss_averaged"),
    *("weight_std", "output_distance", "meetings", "bits_per_param", "wall_seconds", "refused"),
    *("eval_tokens", "eval_seconds", "train_seconds"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """The swarm at one time of its training: a point of the curve."""

    steps: float  # virtual time, in steps at mean speed
    tokens: int  # over all peers
    sent_bytes: float  # per peer, as in Result
    train_loss: float  # nats per token, mean over all inner steps since the point before
    weight_std: float
    eval_loss: float | None  # mean over the replicas, or of their mean weights; None where it is not measured

    @property
    def loss(self) -> float:
        """Return the held-out loss, or the training loss where that is not measured."""
        return self.train_loss if self.eval_loss is None else self.eval_loss


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation's outcome; the first names are the keys of `peer simulate --json`."""

    method: str
    codec: str
    peers: int
    steps: int  # mean inner steps per peer
    tokens: int  # trained on, over all peers
    eval_loss: tuple[float, ...]  # held-out loss of each honest peer's weights, nats per token
    eval_loss_averaged: float  # of the mean of the peers' weights
    weight_std: float  # of the peers' weights about their mean, root mean square
    output_distance: float  # Jensen-Shannon distance of the peers' outputs on held-out text, nats per token
    meetings: int  # meetings of pairs, or exchanges of the whole group, that counted
    bits_per_param: float  # that a peer sends when all fragments are exchanged once
    wall_seconds: float
    refused: int  # meetings that counted for neither side because a merge gate refused a message
    attackers: int  # peers; no figure of a loss or of weights is of theirs
    hostile: int  # messages of attackers to honest peers
    hostile_merged: int
    dropped: int  # meetings that counted for neither side because a peer left
    solo: int  # outer steps without a partner
    sent_bytes: float  # per peer; one copy per exchange: a lower bound for groups
    bits_per_step: float  # that a peer sends per parameter and inner step; a lower bound for groups
    virtual_steps: float  # how long it took, in steps at mean speed
    train_seconds: float
    curve: tuple[Point, ...]
    eval_tokens: int = 0  # held-out ones, on which each peer and their average were measured
    eval_seconds: float = 0.0  # of wall_seconds: for measuring

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> Self:
        """Make a result of what `asdict` and JSON have made of one."""
        values = dict(kept) | {"eval_loss": tuple(kept["eval_loss"]), "curve": tuple(Point(**point) for point in kept["curve"])}
        return cls(**values)

    @property
    def eval_loss_mean(self) -> float:
        """Return the mean of the peers' held-out losses."""
        return sum(self.eval_loss) / len(self.eval_loss)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {key: getattr(self, key) for key in JSON_KEYS}


@dataclass(frozen=True, slots=True)
class Row:
    """One simulation of a sweep: its point on the grid, and its result or its failure."""

    point: Mapping[str, Any]
    result: Result | None
    failure: str = ""

    @property
    def name(self) -> str:
        """Return a short name of the point."""
        if not self.point and self.result:
            return self.result.method
        return ", ".join(f"{name} {value_text(value)}" for name, value in self.point.items())


def value_text(value: Any) -> str:
    """Return a setting's value as on the command line."""
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Average:
    """Runs of a sweep that differ in their seed alone."""

    point: Mapping[str, Any]  # without the seed
    results: tuple[Result, ...]  # of the seeds that did not diverge
    num_diverged: int

    def over_seeds(self, value: Callable[[Result], float]) -> tuple[float, float]:
        """Return the mean of a figure over the seeds, and its standard deviation; 0 for one seed, NaN without any."""
        values = [value(result) for result in self.results]
        if not values:
            return math.nan, math.nan
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def name(self) -> str:
        """Return a short name of the point."""
        return ", ".join(f"{name} {value_text(value)}" for name, value in self.point.items()) or "all seeds"


def over_seeds(rows: Sequence[Row]) -> list[Average]:
    """Group the rows of a sweep that differ in their seed alone; none for a sweep without seeds."""
    groups: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    for row in rows if rows and SEED in rows[0].point else ():
        groups.setdefault(tuple((name, value) for name, value in row.point.items() if name != SEED), []).append(row)
    return [
        Average(dict(point), tuple(row.result for row in some if row.result), sum(row.result is None for row in some))
        for point, some in groups.items()
    ]
