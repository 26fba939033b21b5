"""`peer resume`: end a pause that was asked for."""

from __future__ import annotations

import sys

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home


def resume(home: HomeFolder = DEFAULT_HOME) -> None:
    """End a pause.

    The trainer goes on from where it saved, and catches up with the others. A pause by a setting ends only with that setting.
    """
    ask(Home(home).path, {"verb": "resume"})
    print("going on: the trainer starts again from where it saved", file=sys.stderr)
