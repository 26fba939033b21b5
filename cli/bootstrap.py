"""`peer bootstrap`: a node of the directory that trains nothing, for newcomers to begin with."""

from __future__ import annotations

from cli.options import DEFAULT_HOME, DEFAULT_LISTEN, Announce, HomeFolder, Listen, Port, settings


def bootstrap(home: HomeFolder = DEFAULT_HOME, listen: Listen = DEFAULT_LISTEN, port: Port = 0, announce: Announce = None) -> None:
    """Show newcomers the way, without training.

    Takes part in the directory only. Prints its addresses.
    """
    settings(home, listen=listen, port=port, announce=announce)
