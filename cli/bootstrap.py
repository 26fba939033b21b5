"""`peer bootstrap`: a bootstrap node, which helps new peers to find the run and does not train."""

from __future__ import annotations

from gossamer.cli.generated_options import Given, takes
from gossamer.cli.join import InviteFile, InviteText, load_invite
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Metrics
from gossamer.cli.screen import Screen
from gossamer.cli.session import hold_session, settings, undone_if_it_fails
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status

OPTIONS = ("listen", "port", "announce", "relay", "max_connections", "max_upload", "max_download", "monthly_traffic", "keep_trying")


@takes("given", PeerConfig, *OPTIONS)
def bootstrap(
    invite: InviteText = None, invite_file: InviteFile = None, home: HomeFolder = DEFAULT_HOME, *, given: Given, metrics: Metrics = None
) -> None:
    """Run a bootstrap node: help new peers to find the run, without training.

    Takes part in the run's directory and sends the manifest to joining peers. Prints its own addresses on stdout, one per line.
    """
    config = settings(home, given, trains=False)
    folder = Home(config.home)
    printed: set[str] = set()

    def print_addresses(status: Status, drawn: Screen) -> None:
        for address in status.addresses:
            if address not in printed:
                printed.add(address)
                drawn.data(address)

    with undone_if_it_fails(folder):
        identity, read = load_invite(folder, invite, invite_file, "bootstrap")
        hold_session(config, identity, None, read, print_addresses, metrics)
