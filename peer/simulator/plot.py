"""Curves of simulations as a picture: loss against tokens and against bytes sent, and how far apart the peers are.

Needs matplotlib, which nothing else here needs: install the extra `plot`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peer.simulator.history import Point, Result
from protocol.errors import BadSettings


def need_plot(path: Path) -> None:
    """Raise BadSettings when a picture could not be written there: before a long training, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadSettings("--plot needs matplotlib, which is not installed", hint="pip install 'gossamer-peer[plot]'")
    if not path.absolute().parent.is_dir():
        raise BadSettings(f"the folder of {path} is not there", hint="make it first, or give another --plot FILE.png")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadSettings(f"{path} is not a picture that can be written", hint="end its name in .png, .svg or .pdf")


def plot(results: Mapping[str, Result], path: Path) -> None:
    """Draw the curves of each result under its name. Raises BadSettings when there are none, or the file cannot be written."""
    results = {name: result for name, result in results.items() if result.curve}
    if not results:
        raise BadSettings(f"there is nothing to draw, so {path} was not written: no simulation came to its end", hint="lower learning_rate")
    from matplotlib.figure import Figure  # no pyplot: no windows, no global state

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    by_tokens, by_bytes, spread = figure.subplots(1, 3)
    for name, result in results.items():
        losses = [_loss(point) for point in result.curve]
        by_tokens.plot([point.tokens for point in result.curve], losses, label=name)
        by_bytes.plot([point.sent_bytes / 1e6 for point in result.curve], losses, label=name)
        spread.plot([point.steps for point in result.curve], [point.weight_std for point in result.curve], label=name)
    _label(by_tokens, "tokens, all peers", "held-out loss, nats per token")
    _label(by_bytes, "MB sent per peer", "held-out loss, nats per token")
    _label(spread, "steps at mean speed", "spread of the weights (rms)")
    firsts = [loss for result in results.values() if math.isfinite(loss := _loss(result.curve[0]))]
    for axes in (by_tokens, by_bytes) if firsts else ():
        axes.set_ylim(top=1.05 * max(firsts))  # what diverged must not hide the rest
    figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BadSettings(f"{path} cannot be written: {error.strerror}", hint="give another --plot FILE.png") from error


def _loss(point: Point) -> float:
    return point.train_loss if point.eval_loss is None else point.eval_loss


def _label(axes: Any, horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.3)
