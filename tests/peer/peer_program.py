"""One whole peer as a process of its own: `python -m tests.peer.peer_program HOME SETTINGS`, SETTINGS being local settings as JSON.

Writes each new state as a line on stdout, ends with the error and its hint on stderr, and with the exit code of the `peer` command.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from gossamer.peer.machine.config import peer_config
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor.supervisor import run_peer
from gossamer.protocol.errors import ExitCode, GossamerError
from gossamer.protocol.identity import Identity


def main() -> int:
    shown = ("", "")

    def watch(status: Status) -> None:
        nonlocal shown
        if shown != (shown := (status.state, status.reason)):
            sys.stdout.write(f"{status.state}: {status.reason}\n")
            sys.stdout.flush()

    try:
        config = peer_config({"home": Path(sys.argv[1]), **json.loads(sys.argv[2])})
        home = Home(config.home)
        home.create()
        identity = Identity.load_or_create(home.identity)
        asyncio.run(run_peer(config, identity, None, None, watch))
    except GossamerError as error:
        sys.stderr.write(f"error: {error}\nhint: {error.hint}\n")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
