"""`peer leave`: ask the running peer to finish or drop its meeting, save, say goodbye and stop."""

from __future__ import annotations

import sys

from cli.options import DEFAULT_HOME, HomeFolder
from peer.machine.control_socket import ask
from peer.machine.home import Home


def leave(home: HomeFolder = DEFAULT_HOME) -> None:
    """Stop the running peer cleanly.

    It finishes or drops its meeting, saves, and tells the others. It can come back later.
    """
    ask(Home(home).path, {"verb": "leave"})
    print("leaving: the peer saves its state and stops within seconds", file=sys.stderr)
