"""`peer leave`: ask the running peer to finish or drop its meeting, save, say goodbye and stop."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home

Finish = Annotated[
    bool, typer.Option("--finish", help="Take the time that it needs: let the meeting under way come to its end, then save, then leave.")
]


def leave(home: HomeFolder = DEFAULT_HOME, finish: Finish = False) -> None:
    """Stop the running peer cleanly.

    It finishes or drops its meeting, saves, and tells the others, within ten seconds. It can come back later.
    """
    ask(Home(home).path, {"verb": "leave", "finish": finish})
    when = "once the meeting under way has come to its end" if finish else "within seconds"
    print(f"leaving: the peer saves its state and stops {when}", file=sys.stderr)
