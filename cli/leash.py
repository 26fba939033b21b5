"""How the peers of a demo leave when the demo is gone, even when it was killed and could not stop them.

The demo names itself in the environment of its children; a `peer` command that finds such a name asks the kernel for a SIGTERM, which is
a clean leave, at its parent's death. Linux only: elsewhere a killed demo leaves its peers running.
"""

from __future__ import annotations

import os
import signal
import sys

VARIABLE = "GOSSAMER_PARENT"


def leashed() -> dict[str, str]:
    """Return what to add to the environment of a child that should not outlive this process."""
    return {VARIABLE: str(os.getpid())}


def follow_parent() -> None:
    """Leave when the parent dies, if it has asked for that; at once if it is dead already."""
    parent = os.environ.pop(VARIABLE, "")
    if not parent or sys.platform != "linux":
        return
    from gossamer.peer.machine.child import signal_at_parents_death  # slow to import, and no verb of a person's needs it

    signal_at_parents_death(signal.SIGTERM)
    if str(os.getppid()) != parent:
        os.kill(os.getpid(), signal.SIGTERM)
