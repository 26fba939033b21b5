"""`peer export`: the model of the newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.home import Home

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it: a new folder, an empty one, or an earlier export.")]
Slow = Annotated[
    bool, typer.Option("--slow", help="Write the slow weights in place of the fast ones; after the end of a run both are the same.")
]

Text = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="PATH", exists=True, help="Text to measure the held-out loss on, where each peer of the run brings its own."
    ),
]
EvalBatches = Annotated[
    int | None,
    typer.Option(
        "--eval-batches", metavar="N", min=0, help="Held-out batches behind the loss on the card; 0 leaves it out. Default: 131,072 tokens."
    ),
]


def export(
    folder: Folder, home: HomeFolder = DEFAULT_HOME, slow: Slow = False, data: Text = None, eval_batches: EvalBatches = None
) -> None:
    """Write the trained model as a Hugging Face folder.

    It holds the newest checkpoint, in a form that transformers loads, and a card that says where it comes from and how well it
    predicts held-out text.
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
