"""Options that several verbs share, so that each means the same everywhere. Others are generated: cli/generated_options.py."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_HOME = Path("~/.gossamer")
INVITE_VARIABLE = "GOSSAMER_INVITE"

HomeFolder = Annotated[
    Path, typer.Option("--home", envvar="GOSSAMER_HOME", metavar="DIR", help="Home folder of this peer: key, checkpoints and logs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout; everything else goes to stderr.")]

Uses = Annotated[
    int | None,
    typer.Option(
        "--uses",
        metavar="N",
        min=1,
        help="How many peers an invite for anybody admits. Default: 16. This peer counts them, and closes the invite, while it runs.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="PATH", exists=True, help="Text file, or folder of text files. Default: the data that the manifest names."
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics", metavar="[ADDRESS:]PORT", help="Serve metrics for Prometheus on this port; the default address is 127.0.0.1."
    ),
]


def origin() -> dict[str, str]:
    """Return the keys of a JSON result that say what made it: the version of this software, and the command."""
    from gossamer.peer.machine.status import VERSION  # with the events that a status is folded from: not for every verb

    return {"version": VERSION, "command": shlex.join(["peer", *sys.argv[1:]])}
