"""`peer export`: the model of the newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options import DEFAULT_HOME, HomeFolder
from peer.home import Home

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it; made if it is not there.")]


def export(folder: Folder, home: HomeFolder = DEFAULT_HOME) -> None:
    """Write the trained model as a Hugging Face folder.

    It holds the newest checkpoint, in a form that transformers loads.
    """
    from peer.export import export_model  # torch: slow to import, and needed only now

    export_model(Home(home), folder)
    print(f"wrote {folder}", file=sys.stderr)
