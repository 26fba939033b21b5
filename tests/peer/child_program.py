"""A child process for tests, which does what the name in `config.data` says: `python -m tests.peer.child_program`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from peer.machine.child import Child
from protocol.errors import BadSettings, TransportError

NUM_CHATTER = 20_000


def main() -> int:
    child = Child()
    assert child.settings.config.data is not None
    behaviour, home = child.settings.config.data.name, child.settings.config.home
    child.report("test", {"pid": os.getpid(), "supervisor": child.settings.supervisor})
    try:
        return act(behaviour, child, home)
    except Exception as error:
        return child.fail(error)


def act(behaviour: str, child: Child, home: Path) -> int:
    match behaviour:
        case "obey":
            while not child.stop_requested():
                time.sleep(0.01)
            child.report("test", {"said": "goodbye"})
            return 0
        case "deaf":
            while True:
                time.sleep(0.01)
        case "print":
            sys.stdout.write("printed\n")
            sys.stdout.flush()
            os.write(1, b"written\n")
            return 0
        case "chatter":
            for number in range(NUM_CHATTER):
                child.report("test", {"number": number, "padding": "x" * 200})
            (home / "done").touch()
            while not child.stop_requested():
                time.sleep(0.01)
            return 0
        case "half":
            os.write(child._reports, b'{"kind": "te')
            os.kill(os.getpid(), signal.SIGKILL)
        case "operator":
            raise BadSettings("the port is busy", hint="choose another")
        case "network":
            raise TransportError("nobody there", hint="wait")
        case "bug":
            raise ValueError("out of cheese")
    return 3


if __name__ == "__main__":
    sys.exit(main())
