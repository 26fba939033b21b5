"""`peer export`: the model of the newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.home import Home

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Target folder: new, empty, or an earlier export.")]
Slow = Annotated[
    bool, typer.Option("--slow", help="Write the slow weights instead of the fast weights; after the end of a run both are equal.")
]

Text = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", exists=True, help="Text for the held-out loss, if each peer of the run brings its own text."),
]
EvalBatches = Annotated[
    int | None,
    typer.Option(
        "--eval-batches",
        metavar="N",
        min=0,
        help="Number of held-out batches for the loss on the model card; 0 omits it. Default: 131,072 tokens.",
    ),
]


def export(
    folder: Folder, home: HomeFolder = DEFAULT_HOME, slow: Slow = False, data: Text = None, eval_batches: EvalBatches = None
) -> None:
    """Write the trained model as a Hugging Face folder.

    The folder holds the newest checkpoint in a form that transformers loads, and a model card with its origin and held-out loss.
    """
    from gossamer.cli.screen import meter, show_reading  # rich
    from gossamer.peer.model.export import export_model  # torch: slow to import, and needed only now

    with meter(sys.stderr, "held-out loss", num_lines=1, unit="batches") as show:
        held_out = export_model(
            Home(home), folder, slow, data, eval_batches,
            follow=lambda *progress: show("measuring the model", *progress),
            reading=partial(show_reading, show),
        )  # fmt: skip
    print(f"wrote {folder}; held-out loss: {held_out}" + (f" ({held_out.reason})" if held_out.reason else ""), file=sys.stderr)
