"""End the peers of a demo when the demo process ends, even if it was killed.

The demo puts its process id into the environment of its children. A `peer` command that finds this id asks the kernel for SIGTERM, which
is a clean leave, when its parent dies. Linux only: elsewhere a killed demo leaves its peers running.
"""

from __future__ import annotations

import os
import signal
import sys

VARIABLE = "GOSSAMER_PARENT"


def exits_with_this_process() -> dict[str, str]:
    """Return the environment variable for a child that must end with this process."""
    return {VARIABLE: str(os.getpid())}


def follow_parent() -> None:
    """Leave when the parent dies, if the environment asks for it; leave at once if the parent is already dead."""
    parent = os.environ.pop(VARIABLE, "")
    if not parent or sys.platform != "linux":
        return
    from gossamer.peer.machine.child import signal_at_parents_death  # slow to import, and needed only by children of a demo

    signal_at_parents_death(signal.SIGTERM)
    if str(os.getppid()) != parent:
        os.kill(os.getpid(), signal.SIGTERM)
