"""`peer pause`, `peer resume` and `peer leave`: what the running peer is asked to do."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.units import duration_s
from gossamer.protocol.errors import BadSettings

Length = Annotated[str | None, typer.Argument(metavar="TIME", help="Duration, like 30m, 2h or 2 days. Default: until `peer resume`.")]
Finish = Annotated[
    bool, typer.Option("--finish", help="Let the meeting in progress finish before saving and leaving, however long it takes.")
]


def pause(time: Length = None, home: HomeFolder = DEFAULT_HOME) -> None:
    """Pause the running peer.

    The meeting in progress ends; the trainer saves its state and frees its memory, on the GPU too. The peer stays a member of the swarm.
    """
    try:
        seconds = duration_s(time) if time is not None else None
    except ValueError as error:
        raise BadSettings(f"{time!r} is not a duration: {error}", hint="for example 30m, 2h or 2 days") from error
    answer = ask(home, {"verb": "pause", "seconds": seconds})
    print(f"{answer['state']}: {answer['reason']}\nhint: `peer resume` ends the pause", file=sys.stderr)


def resume(home: HomeFolder = DEFAULT_HOME) -> None:
    """End a pause.

    The trainer continues from its checkpoint and catches up with the swarm. Only a change of settings ends a pause that settings caused.
    """
    answer = ask(home, {"verb": "resume"})
    if answer["was_paused"]:
        print("resumed: the trainer starts again and goes on from its checkpoint", file=sys.stderr)
    else:
        print(f"it was not paused: {answer['state']}, {answer['reason']}", file=sys.stderr)


def leave(home: HomeFolder = DEFAULT_HOME, finish: Finish = False) -> None:
    """Stop the running peer cleanly.

    Within ten seconds it finishes or drops its meeting, saves, and notifies the other peers; a large model takes longer to save. It can
    rejoin later.
    """
    ask(home, {"verb": "leave", "finish": finish})
    when = "after the meeting in progress" if finish else "within seconds"
    print(f"leaving: the peer saves its state and stops {when}", file=sys.stderr)
