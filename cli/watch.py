"""`peer watch`: the peers of this machine in a full-screen terminal view."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder

Homes = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[HOME...]", help="Home folders of the peers to show. Default: that of --home.", show_default=False),
]


def watch(homes: Homes = None, home: HomeFolder = DEFAULT_HOME) -> None:
    """Show the peers of this machine in a full-screen terminal view: state, charts, partners. Press q to quit."""
    from gossamer.cli.full_screen import FullScreen  # textual: slow to import, and needed only now

    FullScreen(homes or [home]).run()
