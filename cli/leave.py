"""`peer leave`: ask the running peer to finish or drop its meeting, save, notify the others and stop."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home

Finish = Annotated[
    bool, typer.Option("--finish", help="Let the meeting in progress finish before saving and leaving, however long it takes.")
]


def leave(home: HomeFolder = DEFAULT_HOME, finish: Finish = False) -> None:
    """Stop the running peer cleanly.

    Within ten seconds it finishes or drops its meeting, saves, and notifies the other peers. It can rejoin later.
    """
    ask(Home(home).path, {"verb": "leave", "finish": finish})
    when = "after the meeting in progress" if finish else "within seconds"
    print(f"leaving: the peer saves its state and stops {when}", file=sys.stderr)
