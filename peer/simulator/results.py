"""What a simulation found out: its curve and its result, as numbers and as a picture.

The picture needs matplotlib, which nothing else here needs: install the extra `plot`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gossamer.protocol.errors import BadSettings

JSON_KEYS: Final = (
    *("method", "codec", "peers", "steps", "tokens", "eval_loss", "eval_loss_averaged"),
    *("weight_std", "output_distance", "meetings", "bits_per_param", "wall_seconds", "refused"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """The swarm at one time of its training."""

    steps: float  # virtual time, in steps at mean speed
    tokens: int  # over all peers
    sent_bytes: float  # per peer; as in Result
    train_loss: float  # nats per token, mean over all inner steps since the point before
    weight_std: float
    eval_loss: float | None  # mean over the replicas; None where it was not asked for

    @property
    def loss(self) -> float:
        """Return the held-out loss, or the training loss where that was not asked for."""
        return self.train_loss if self.eval_loss is None else self.eval_loss


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation's outcome; the first names are the keys of `peer simulate --json`."""

    method: str
    codec: str
    peers: int
    steps: int  # mean inner steps per peer
    tokens: int  # trained on, over all peers
    eval_loss: tuple[float, ...]  # held-out loss of each peer's weights, nats per token
    eval_loss_averaged: float  # of the mean of the peers' weights
    weight_std: float  # of the peers' weights about their mean, root mean square
    output_distance: float  # Jensen-Shannon distance of the peers' outputs on held-out text, nats per token
    meetings: int  # meetings of pairs, or exchanges of the whole group, that counted
    bits_per_param: float  # what a peer sends when everything is exchanged once
    wall_seconds: float
    refused: int  # meetings that counted for neither side, for the merge gate of one refused the other's message
    dropped: int  # meetings that counted for neither side, for a peer went away
    solo: int  # outer steps without a partner
    sent_bytes: float  # per peer; one copy per exchange: the least that a group can send
    bits_per_step: float  # what a peer sends per parameter and inner step; one copy per exchange: the least that a group can send
    virtual_steps: float  # how long it took, in steps at mean speed
    train_seconds: float
    curve: tuple[Point, ...]

    @property
    def eval_loss_mean(self) -> float:
        """Return the mean of the peers' held-out losses."""
        return sum(self.eval_loss) / len(self.eval_loss)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {key: getattr(self, key) for key in JSON_KEYS}


@dataclass(frozen=True, slots=True)
class Row:
    """One simulation of a sweep: its point on the grid, and its result or what broke."""

    point: Mapping[str, Any]
    result: Result | None
    failure: str = ""

    @property
    def name(self) -> str:
        """Return the point in short."""
        if not self.point and self.result:
            return self.result.method
        return ", ".join(f"{name} {value_text(value)}" for name, value in self.point.items())


def value_text(value: Any) -> str:
    """Return a setting's value as people write it."""
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def need_plot(path: Path) -> None:
    """Raise BadSettings when a picture could not be written there: before a long training, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadSettings("--plot needs matplotlib, which is not installed", hint="pip install 'gossamer-peer[plot]'")
    if not path.absolute().parent.is_dir():
        raise BadSettings(f"the folder of {path} is not there", hint="make it first, or give another --plot FILE.png")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadSettings(f"{path} is not a picture that can be written", hint="end its name in .png, .svg or .pdf")


def plot_rows(rows: Iterable[Row], path: Path) -> None:
    """Draw each row that has a curve under its name: loss against tokens and bytes sent, and how far apart the peers are.

    Raises BadSettings when there is none, or the file cannot be written.
    """
    results = {row.name: row.result for row in rows if row.result and row.result.curve}
    if not results:
        raise BadSettings(f"there is nothing to draw, so {path} was not written: no simulation came to its end", hint="lower learning_rate")
    from matplotlib.figure import Figure  # no pyplot: no windows, no global state

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    by_tokens, by_bytes, spread = figure.subplots(1, 3)
    for name, result in results.items():
        losses = [point.loss for point in result.curve]
        by_tokens.plot([point.tokens for point in result.curve], losses, label=name)
        by_bytes.plot([point.sent_bytes / 1e6 for point in result.curve], losses, label=name)
        spread.plot([point.steps for point in result.curve], [point.weight_std for point in result.curve], label=name)
    for axes, across, upwards in (
        (by_tokens, "tokens, all peers", "held-out loss, nats per token"),
        (by_bytes, "MB sent per peer", "held-out loss, nats per token"),
        (spread, "steps at mean speed", "spread of the weights (rms)"),
    ):
        axes.set_xlabel(across)
        axes.set_ylabel(upwards)
        axes.grid(alpha=0.3)
    firsts = [result.curve[0].loss for result in results.values() if math.isfinite(result.curve[0].loss)]
    for axes in (by_tokens, by_bytes) if firsts else ():
        axes.set_ylim(top=1.05 * max(firsts))  # what diverged must not hide the rest
    figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadSettings(f"{path} cannot be written: {error.strerror}", hint="give another --plot FILE.png") from error
