"""A child process for tests, which does what the name in `config.data` says: `python -m tests.peer.child_program`."""

from __future__ import annotations

import os
import signal
import sys
import time

from gossamer.peer.machine.child import Child, run_child
from gossamer.peer.machine.events import ProcessReported, SoloStep
from gossamer.protocol.errors import BadSettings, TransportError

NUM_CHATTER = 20_000
LONG = 2 << 20  # characters, more than a line of an event may have
STDOUT = os.dup(1)  # before it is moved away


def main() -> int:
    return run_child(act)


def act(child: Child) -> None:
    assert child.settings.config.data is not None
    behaviour, home = child.settings.config.data.name, child.settings.config.home
    child.emit(ProcessReported(str(os.getpid()), ""))
    match behaviour:
        case "obey":
            while not child.stop_requested():
                time.sleep(0.01)
            child.emit(ProcessReported("goodbye", ""))
        case "deaf":
            while True:
                time.sleep(0.01)
        case "print":
            sys.stdout.write("printed\n")
            sys.stdout.flush()
            os.write(1, b"written\n")
        case "chatter":
            for number in range(NUM_CHATTER):
                child.emit(SoloStep(number, "x" * 200))
            (home / "done").touch()
            while not child.stop_requested():
                time.sleep(0.01)
        case "half":
            child.emit(SoloStep(1, ""))
            os.write(STDOUT, b'{"event": "So')
            os.kill(os.getpid(), signal.SIGKILL)
        case "verbose":
            child.emit(SoloStep(1, "x" * LONG))
            raise BadSettings("y" * LONG, hint="be brief")
        case "operator":
            raise BadSettings("the port is busy", hint="choose another")
        case "network":
            raise TransportError("nobody there", hint="wait")
        case "bug":
            raise ValueError("out of cheese")


if __name__ == "__main__":
    sys.exit(main())
