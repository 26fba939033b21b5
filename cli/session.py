"""One peer that runs from this shell: its progress on stderr, until its run ends, it leaves, or it cannot go on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from cli.figures import loss_text
from cli.ports import keep_port
from cli.screen import Screen, screen
from peer.machine.config import PeerConfig
from peer.machine.status import Status
from peer.supervisor.run import run_peer
from protocol.identity import Identity
from protocol.run.invite import Invite
from protocol.run.manifest import SignedManifest

Also = Callable[[Status, Screen], None]


def hold_session(
    config: PeerConfig, identity: Identity, manifest: SignedManifest | None, invite: Invite | None, also: Also | None = None
) -> None:
    """Run the peer, draw its status after each change, and call `also` with it. Raises what `run_peer` raises."""
    with screen(sys.stderr) as drawn:

        def watch(status: Status) -> None:
            drawn.show(status.peer_id[-6:], status.to_json())
            keep_port(config, status.addresses)
            if also is not None:
                also(status, drawn)

        status = asyncio.run(run_peer(config, identity, manifest, invite, watch))
    print(farewell(status, config), file=sys.stderr)


def farewell(status: Status, config: PeerConfig) -> str:
    """Return the last sentence: how it ended, and what can be done next."""
    figures = f"step {status.step} of {status.total_steps}, loss {loss_text(status.loss)}"
    if status.state == "done":
        return f"the run is over: {figures}\nhint: `peer export FOLDER --home {config.home}` writes the model"
    return f"left the run: {figures}\nhint: the same command, or `peer join --home {config.home}`, goes on from here"
