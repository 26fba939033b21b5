"""`peer backup` and `peer restore`: all that a peer has earned, in one encrypted file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine import backup as backups
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import bytes_text
from gossamer.protocol.errors import BadSettings, why_unreadable
from gossamer.protocol.identity import Identity

SHORTEST_PASSPHRASE = 8
Passphrase = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="File whose first line is the passphrase. Default: asked on the terminal."),
]


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup to write; it must not exist.")],
    home: HomeFolder = DEFAULT_HOME,
    passphrase_file: Passphrase = None,
    as_json: Json = False,
) -> None:
    """Write identity, newest checkpoint, invite, settings and records to one encrypted file.

    The peer may run meanwhile. `age` opens the file too. Without the passphrase nobody can.
    """
    need_extra("backup")
    folder = Home(home)
    if not folder.identity.exists():
        raise BadSettings(f"{folder.path} holds no peer", hint="--home DIR names another folder")
    backups.need_new_file(file)
    me = Identity.load_or_create(folder.identity).peer_id
    num_bytes = backups.write(folder, me, file, _passphrase(passphrase_file, is_new=True))
    if as_json:
        print(json.dumps({"file": str(file), "bytes": num_bytes, "peer_id": str(me), "generation": folder.read_generation()}))
    else:
        print(f"wrote {file} ({bytes_text(num_bytes)}): `peer restore {file} --home DIR` brings {me.short()} back", file=sys.stderr)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="The backup to read.")],
    home: HomeFolder = DEFAULT_HOME,
    passphrase_file: Passphrase = None,
    as_json: Json = False,
) -> None:
    """Restore a backup into a new home, on this machine or another one.

    The restored home replaces the old one: if the old one still runs, it stops as soon as it sees the new one in the run.
    """
    need_extra("backup")
    folder = Home(home)
    backups.need_new_home(folder)
    restored = backups.read(file, folder, _passphrase(passphrase_file, is_new=False))
    if restored.dropped:
        lines = ", ".join(f"{key} = {json.dumps(value)}" for key, value in restored.dropped.items())
        print(f"not restored, as they run commands or read files here: {lines}; `peer config` sets them again", file=sys.stderr)
    if as_json:
        print(json.dumps({"home": str(folder.path)} | asdict(restored)))
    else:
        print(f"restored {restored.peer_id} into {folder.path}; `peer join --home {folder.path}` goes on with it", file=sys.stderr)


def _passphrase(file: Path | None, *, is_new: bool) -> str:
    if file is not None:
        try:
            text = file.read_text().partition("\n")[0]
        except (OSError, ValueError) as error:
            raise BadSettings(f"the passphrase cannot be read from {file}: {why_unreadable(error)}", hint="name a text file") from error
    elif sys.stdin.isatty():
        asked = f"passphrase, at least {SHORTEST_PASSPHRASE} characters" if is_new else "passphrase"
        check = _long_enough if is_new else str  # before it asks for the same again
        text = typer.prompt(asked, hide_input=True, confirmation_prompt=is_new, err=True, value_proc=check)
    else:
        raise BadSettings("there is no terminal to ask for the passphrase", hint="--passphrase-file FILE names a file that holds it")
    return _long_enough(text) if is_new else text


def _long_enough(text: str) -> str:
    if len(text) < SHORTEST_PASSPHRASE:
        raise BadSettings(
            f"the passphrase has {len(text)} characters; it needs {SHORTEST_PASSPHRASE}",
            hint="several words are easy to keep and hard to guess",
        )
    return text
