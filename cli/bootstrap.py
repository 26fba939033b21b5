"""`peer bootstrap`: show newcomers of a run the way, without training."""

from __future__ import annotations

import asyncio
import sys

from cli.join import InviteText, read_invite
from cli.options import DEFAULT_HOME, DEFAULT_LISTEN, Announce, HomeFolder, Listen, Port
from cli.screen import screen
from cli.session import keep_port, settings
from peer.machine.config import PeerConfig
from peer.machine.home import Home
from peer.machine.status import Status
from protocol.run.invite import Invite


def bootstrap(
    invite: InviteText = None,
    home: HomeFolder = DEFAULT_HOME,
    listen: Listen = DEFAULT_LISTEN,
    port: Port = None,
    announce: Announce = None,
) -> None:
    """Show newcomers of a run the way, without training.

    Takes part in the run's directory and gives its manifest to newcomers. Prints its own addresses, one a line, on stdout.
    """
    config = settings(home, listen=listen, port=port, announce=announce)
    _, read = read_invite(Home(config.home), invite)
    hold_seed(config, read)


def hold_seed(config: PeerConfig, invite: Invite | None) -> None:
    """Run the seed and draw its state. Raises what `run_seed` raises."""
    from peer.node.seed import run_seed  # hivemind: slow to import, and needed only now

    with screen(sys.stderr) as drawn:
        printed: set[str] = set()

        def watch(status: Status) -> None:
            keep_port(config, status.addresses)
            for address in status.addresses:
                if address not in printed:
                    printed.add(address)
                    drawn.data(address)
            drawn.show(status.peer_id[-6:], status.to_json())

        asyncio.run(run_seed(config, invite, watch))
    print("the seed has left", file=sys.stderr)
