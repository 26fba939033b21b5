"""`python -m gossamer.peer.trainer.rank_process`: a rank beside the first. It ends when the first rank ends, at any moment."""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import SimpleQueue

from gossamer.peer.machine.child import loading
from gossamer.protocol.errors import ExitCode


def listen(lines: SimpleQueue[bytes]) -> None:
    """Hear the first rank's orders; where it says no more, or is gone, end this process: there is nothing to save."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(ExitCode.DONE)


def main() -> int:
    """Do as ordered; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the supervisor decides
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=listen, args=(lines,), name="orders", daemon=True).start()
    with loading():
        from gossamer.peer.trainer.rank_service import serve
    try:
        serve(lines.get)
    except RuntimeError as error:  # this device, or another rank is gone: the first one says so, or is gone itself
        sys.stderr.write(f"rank: {error}\n")
        sys.stderr.flush()
    return ExitCode.OUR_FAULT


if __name__ == "__main__":
    os._exit(main())
