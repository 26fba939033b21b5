"""`python -m gossamer.peer.trainer.rank_process`: a rank beside the first. It ends as soon as the first rank ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import SimpleQueue

from gossamer.peer.machine.child import loading
from gossamer.protocol.errors import ExitCode


def listen(lines: SimpleQueue[bytes]) -> None:
    """Queue the first rank's orders; at the end of stdin end this process, which has nothing to save."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(ExitCode.DONE)


def main() -> int:
    """Carry out orders; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the supervisor decides
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=listen, args=(lines,), name="orders", daemon=True).start()
    with loading():
        import transformers.modeling_utils  # noqa: F401 - each model needs it; a program run does not

        from gossamer.peer.trainer.rank import follow
    try:
        follow(lines.get)
    except RuntimeError as error:  # this device, or another rank is gone: the first rank reports it, or is gone itself
        sys.stderr.write(f"rank: {error}\n")
        sys.stderr.flush()
    return ExitCode.OUR_FAULT


if __name__ == "__main__":
    os._exit(main())
