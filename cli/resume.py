"""`peer resume`: end a pause that `peer pause` started."""

from __future__ import annotations

import sys

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home


def resume(home: HomeFolder = DEFAULT_HOME) -> None:
    """End a pause.

    The trainer continues from its checkpoint and catches up with the swarm. Only a change of settings ends a pause that settings caused.
    """
    ask(Home(home).path, {"verb": "resume"})
    print("resumed: the trainer restarts from its checkpoint", file=sys.stderr)
