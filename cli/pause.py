"""`peer pause`: pause the running peer, for a time or until `peer resume`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import duration_s
from gossamer.protocol.errors import BadSettings

Length = Annotated[str | None, typer.Argument(metavar="[TIME]", help="Duration, like 30m, 2h or 1d. Default: until `peer resume`.")]


def pause(time: Length = None, home: HomeFolder = DEFAULT_HOME) -> None:
    """Pause the running peer.

    The meeting in progress ends; the trainer saves its state and frees its memory, on the GPU too. The peer stays a member of the swarm.
    """
    answer = ask(Home(home).path, {"verb": "pause", "seconds": seconds(time)})
    print(f"{answer['state']}: {answer['reason']}\nhint: `peer resume` ends the pause", file=sys.stderr)


def seconds(length: str | None) -> float | None:
    """Read a duration. Raises BadSettings."""
    try:
        return duration_s(length) if length is not None else None
    except ValueError as error:
        raise BadSettings(f"{length!r} is not a duration: {error}", hint="for example 30m, 2h or 1d") from error
