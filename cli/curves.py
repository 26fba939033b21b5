"""Loss curves as a picture: checks before a long training, and the curves of a demo's peers, from their event logs.

Pictures need matplotlib, which nothing else needs: install the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.peer.machine.events import EvalDone, StepDone, read_events
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTH = 0.85  # weight of the previous mean when a loss is added: the losses of one second come from few batches

Curve = list[tuple[int, float]]  # inner steps and nats per token


def need_plot(path: Path) -> None:
    """Raise OperatorError when no picture can be written to this path. Call it before a long training."""
    need_extra("plot")
    if not path.absolute().parent.is_dir():
        raise BadSettings(f"the folder of {path} is not there", hint="make it first, or give another --plot FILE.png")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadSettings(f"{path} is not a picture that can be written", hint="end its name in .png, .svg or .pdf")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a file. Raises BadSettings when the file cannot be written."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BadSettings(f"{path} cannot be written: {error.strerror}", hint="give another --plot FILE.png") from error


def curves(home: Path) -> tuple[Curve, Curve]:
    """Return training losses, smoothed, and held-out losses of a peer by its own inner steps."""
    training: Curve = []
    held_out: Curve = []
    for event in read_events(Home(home).events):
        match event:
            case StepDone(step=step, loss=loss) if loss == loss:
                training.append((step, SMOOTH * training[-1][1] + (1 - SMOOTH) * loss if training else loss))
            case EvalDone(step=step, loss=loss) if loss == loss:
                held_out.append((step, loss))
    return training, held_out


def draw_curves(homes: Mapping[str, Path], alone: str, file: Path) -> None:
    """Draw the curves of these peers, by name; the one named `alone` stands out. Raises BadSettings when the file cannot be written."""
    from matplotlib.figure import Figure  # no pyplot: no windows, no global state

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, (name, home) in enumerate(homes.items()):
        training, held_out = curves(home)
        color, style = ("black", "--") if name == alone else (f"C{number}", "-")
        axes.plot(*_columns(training), linewidth=1.4, label=name, color=color, linestyle=style)
        axes.plot(*_columns(held_out), "o", markersize=4, color=color)
    axes.set(xlabel="inner steps of the peer", ylabel="nats per token", title="loss: lines while training, dots held out")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, file)


def _columns(curve: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    points = list(curve)
    return [step for step, _ in points], [loss for _, loss in points]
