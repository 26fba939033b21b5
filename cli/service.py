"""`peer service`: let systemd start the peer at boot and restart it after a crash."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from gossamer.cli.figures import last_sentence, sentence
from gossamer.cli.join import InviteFile, InviteText, load_invite, need_text_run
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.cli.session import undone_if_it_fails
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.systemd import lingers, need_user_manager, systemctl, unit_file, unit_text
from gossamer.protocol.errors import BadSettings

Action = Literal["install", "remove", "status"]
What = Annotated[Action, typer.Argument(metavar="ACTION", help="install, remove or status.", show_default=False)]
Print = Annotated[bool, typer.Option("--print", help="With install: print the unit file and change nothing.")]


def service(
    action: What,
    invite: InviteText = None,
    invite_file: InviteFile = None,
    home: HomeFolder = DEFAULT_HOME,
    only_print: Print = False,
    as_json: Json = False,
) -> None:
    """Install this peer as a service of systemd's user manager, remove it, or show its status.

    `install` starts the peer now and at each login, in a sandbox; `remove` stops it and keeps the home folder.
    """
    folder = Home(home)
    match action:
        case "install" if only_print:
            print(unit_text(folder.path), end="")
        case "install":
            install(folder, invite, invite_file)
        case "remove":
            remove(folder)
        case "status":
            show(folder, as_json=as_json)


def install(folder: Home, invite: str | None, invite_file: Path | None = None) -> None:
    """Write and print the unit, and let systemd start it. Raises BadInvite or BadSettings."""
    if holder := folder.holder():
        raise BadSettings(
            f"a peer already runs from {folder.path} ({holder})",
            hint=f"stop it with `peer leave --home {folder.path}` first: the service starts the peer itself",
        )
    with undone_if_it_fails(folder):
        _, read = load_invite(folder, invite, invite_file, "service install")
        need_text_run(folder)
        need_user_manager()
        if read is not None:
            write_whole(folder.invite, read.to_text().encode() + b"\n")
    file = unit_file(folder.path)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = unit_text(folder.path)
    file.write_text(text)
    print(text, end="")
    print(f"written to {file}", file=sys.stderr)
    systemctl("daemon-reload")
    systemctl("enable", "--now", file.name)
    print("the peer runs: `peer status` shows its state, `peer logs` its log", file=sys.stderr)
    if not lingers():
        print("hint: the service stops when you log out; `loginctl enable-linger` keeps it running and starts it at boot", file=sys.stderr)


def remove(folder: Home) -> None:
    """Stop the service and remove its unit; keep the home folder. Raises BadSettings if no service is installed."""
    file = need_unit(folder)
    systemctl("disable", "--now", file.name)
    file.unlink()
    systemctl("daemon-reload")
    print(f"stopped the peer and removed {file}; its key and state stay in {folder.path}", file=sys.stderr)


def show(folder: Home, *, as_json: bool) -> None:
    """Print the state of the service and of the peer, or its last state. Raises BadSettings if no service is installed."""
    file = need_unit(folder)
    if file.read_text() != unit_text(folder.path):
        print(
            "hint: another release or environment wrote this unit; `peer service remove`, then `peer service install` renews it",
            file=sys.stderr,
        )
    try:
        latest, described = ask(folder.path, {"verb": "status"}), sentence
    except BadSettings:  # no peer runs
        latest, described = folder.last_status(), last_sentence
    shown = systemctl("show", "--property=ActiveState,SubState,NRestarts", file.name)
    unit = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if as_json:
        print(json.dumps({"unit": str(file), "systemd": unit} | {key: latest.get(key) for key in ("state", "reason", "since")}))
        return
    again = f"started again {unit.get('NRestarts', '0')} times"
    print(f"service    {unit.get('ActiveState', 'unknown')} ({unit.get('SubState', '')}), {again}; {file}")
    print(f"peer       {described(latest, time.time()) if latest else 'has not written a status yet'}")


def need_unit(folder: Home) -> Path:
    """Return the unit's file. Raises BadSettings if it does not exist."""
    file = unit_file(folder.path)
    if not file.exists():
        raise BadSettings(f"no service is installed for {folder.path}", hint="`peer service install` installs one")
    return file
