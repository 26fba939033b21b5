"""`peer export`: the model of the newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options import DEFAULT_HOME, HomeFolder
from peer.home import Home

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it: a new folder, an empty one, or an earlier export.")]
Slow = Annotated[
    bool, typer.Option("--slow", help="Write the slow weights in place of the fast ones; after the end of a run both are the same.")
]


def export(folder: Folder, home: HomeFolder = DEFAULT_HOME, slow: Slow = False) -> None:
    """Write the trained model as a Hugging Face folder.

    It holds the newest checkpoint, in a form that transformers loads, and a card that says where it comes from.
    """
    from peer.export import export_model  # torch: slow to import, and needed only now

    written = export_model(Home(home), folder, use_slow_weights=slow)
    print(f"wrote {written}", file=sys.stderr)
