"""`python -m gossamer.peer.supervisor`: the supervisor of a program that uses the library, started by that program.

The program's events come on stdin, after one line with its request; settings leave on stdout. Its last line there is the error that ends
the peer, if there is one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys

from gossamer.peer.machine.home import Home
from gossamer.peer.machine.log_lines import FORMAT
from gossamer.peer.machine.port import keep_port
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor.guest import GuestProcess
from gossamer.peer.supervisor.supervisor import run_peer
from gossamer.protocol.errors import ExitCode, GossamerError, classified, description
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest


async def run() -> int:
    """Run the peer that the program asks for; return the exit code."""
    guest = GuestProcess()
    try:
        await _run_peer_of(guest)
    except Exception as error:
        if not isinstance(error, GossamerError):
            logging.exception("internal error")
        shown = classified(error, "the log says more")
        guest.notify(json.dumps(description(shown)).encode() + b"\n")
        return int(shown.exit_code)
    return int(ExitCode.DONE)


async def _run_peer_of(guest: GuestProcess) -> None:
    asked = await guest.request()
    config = asked.config
    manifest = SignedManifest.from_bytes(asked.manifest) if asked.manifest else None
    invite = Invite.from_text(asked.invite) if asked.invite else None

    def watch(status: Status) -> None:
        keep_port(config, status.addresses)

    await run_peer(config, Identity.load_or_create(Home(config.home).identity), manifest, invite, watch, guest)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the program's own: it leaves, and we with it
    logging.basicConfig(format=FORMAT)
    exit_code = asyncio.run(run())
    sys.stderr.flush()
    os._exit(exit_code)
