"""End a command with everything that it has started."""

from __future__ import annotations

import contextlib
import os
import signal


def kill_group(leader: int) -> None:
    """Kill all processes of a group at once. `leader`: the id of the process that was started with a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
