"""The running loop's time: only goes forward, whatever is done to the machine's clock. Tests give the loop a virtual one."""

from __future__ import annotations

import asyncio


def loop_s() -> float:
    """Return the running event loop's time, seconds."""
    return asyncio.get_running_loop().time()
