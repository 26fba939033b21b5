"""`peer join`: join a run with an invite, or continue the run that the home folder holds."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli import options
from gossamer.cli.generated_options import EVERY, Given, takes
from gossamer.cli.manifests import START_AGAIN
from gossamer.cli.session import hold_session, settings, undone_if_it_fails
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.held_manifest import checked_invite, held_manifest
from gossamer.peer.machine.held_stage import need_stage
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadInvite, BadSettings, why_unreadable
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import need_text

InviteText = Annotated[
    str | None,
    typer.Argument(
        metavar="INVITE",
        envvar=options.INVITE_VARIABLE,
        help="The invite: one word that begins with gossamer1. Without it, continue the run that the home folder holds. "
        "Other users of this machine can read it until the command has started; --invite-file hides it.",
    ),
]

InviteFile = Annotated[
    Path | None,
    typer.Option(
        "--invite-file",
        envvar="GOSSAMER_INVITE_FILE",
        metavar="FILE",
        help="Read the invite from this file, or /dev/stdin; waits until there is one in the file.",
    ),
]
STDIN = Path("/dev/stdin")
LOOK_S = 0.5  # between two looks for a file with an invite


@takes("given", PeerConfig, *EVERY, "keep_trying", "stage")
def join(
    invite: InviteText = None,
    invite_file: InviteFile = None,
    home: options.HomeFolder = options.DEFAULT_HOME,
    *,
    given: Given,
    metrics: options.Metrics = None,
) -> None:
    """Join a run and train in it.

    Until the run ends, `peer leave`, or Ctrl-C.
    """
    config = settings(home, given)
    folder = Home(config.home)
    with undone_if_it_fails(folder):
        identity, read = load_invite(folder, invite, invite_file)
        need_text_run(folder, config.stage)
        hold_session(config, identity, None, read, metrics=metrics)


def need_text_run(folder: Home, stage: int | None = None) -> None:
    """Raise BadManifest if the home holds a program run, which only its program trains; BadSettings without this stage.

    A home may hold no manifest yet.
    """
    if (held := held_manifest(folder)) is not None:
        manifest = need_text(held.manifest(), START_AGAIN)
        need_stage(manifest, folder, stage)


def load_invite(folder: Home, text: str | None, file: Path | None = None, verb: str = "join") -> tuple[Identity, Invite | None]:
    """Return this peer's identity and the checked invite, None to continue the run of the home; waits for the invite's file.

    Raises BadInvite, or BadSettings where the home holds another run.
    """
    text = given_text(text, file)
    os.environ.pop(options.INVITE_VARIABLE, None)  # the peer's processes read the home's copy
    ask = f"ask a member of the run for an invite: peer {verb} gossamer1..."
    return checked_invite(folder, text, ask, "give the new run its own folder with --home DIR")


def given_text(text: str | None, file: Path | None) -> str | None:
    """Return the invite that the operator gave, if any; waits for its file. Raises BadInvite or BadSettings."""
    if text is not None and file is not None:
        raise BadSettings("both an invite and --invite-file were given", hint="leave out one of them")
    if text is not None and not text.strip():
        raise BadInvite("the invite is empty", hint="pass the word that begins with gossamer1")
    if file is None:
        return text
    if file == STDIN:
        return _from_stdin()
    if not _is_written(file):
        print(f"waiting for an invite in {file}: {'it is empty' if file.exists() else 'there is no such file yet'}", file=sys.stderr)
    while not _is_written(file):
        time.sleep(LOOK_S)
    return _read(file)


def _from_stdin() -> str:
    """Return what this command gets on stdin, which nobody fills later if it is closed or ends without an invite. Raises BadInvite."""
    if sys.stdin is not None:
        print(f"reading the invite from stdin{', until Ctrl-D' if sys.stdin.isatty() else ''}", file=sys.stderr, flush=True)
        if text := _read(STDIN):
            return text
    what = "stdin is closed" if sys.stdin is None else "stdin has ended, and held no invite"
    raise BadInvite(what, hint="pipe the invite to this command, or name the file that holds it: --invite-file FILE")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInvite(f"{file} cannot be read: {why_unreadable(error)}", hint="the file must hold one line, the invite") from error


def _is_written(file: Path) -> bool:
    """Return whether a file is there; an empty one is that of a shell, whose command will write to it: `peer invite > FILE`."""
    with suppress(FileNotFoundError):
        return file.stat().st_size > 0 or not file.is_file()
    return False
