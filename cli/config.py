"""`peer config`: show the local settings of this peer, or change one; a running peer applies the change at once."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli.figures import fitted
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.config import COMMANDS, WEB, LocalSettings, no_such_setting, save_settings, saved_settings, with_setting
from gossamer.peer.machine.control_socket import NobodyRuns, ask
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings

Key = Annotated[str | None, typer.Argument(metavar="KEY", help="Show only this setting.")]
Value = Annotated[str | None, typer.Argument(metavar="VALUE", help="New value of the setting.")]
Unset = Annotated[bool, typer.Option("--unset", help="Reset the setting to its default.")]


def config(key: Key = None, value: Value = None, home: HomeFolder = DEFAULT_HOME, unset: Unset = False, as_json: Json = False) -> None:
    """Show the local settings of this peer, or change one.

    They are stored in `config.toml` in the home folder; options of `peer join` and `peer host` override them for one start. A running
    peer applies a change at once.
    """
    folder = Home(home)
    key = key.replace("-", "_") if key is not None else None
    if key is None and unset:
        raise BadSettings("--unset needs the setting's name", hint="`peer config` lists the settings")
    if key is not None and key not in LocalSettings.model_fields:
        raise no_such_setting(key)
    if value is not None and unset:
        raise BadSettings("give a value, or --unset, not both", hint="--unset gives the setting its default again")
    if key is not None and (unset or value is not None):
        if key in ("data", "model") and value is not None:
            value = str(Path(value).expanduser().absolute())  # the peer may run in another folder
        change(folder, key, value)
        if key in COMMANDS and value is not None and not value.startswith(WEB):
            warn_without_program(key, value)
    shown = settings_in_force(folder)
    if as_json:
        print(json.dumps(shown if key is None else {key: shown[key]}))
    elif key is not None:
        print(text_of(shown[key]))
    else:
        print(fitted(listing(shown), 4))


def change(folder: Home, key: str, value: str | None) -> None:
    """Change a setting, through the running peer if there is one. Raises BadSettings and changes nothing if the value is not valid."""
    try:
        ask(folder.path, {"verb": "set", "key": key, "value": value})
        print("the running peer has applied the change", file=sys.stderr)
    except NobodyRuns:
        changed = with_setting(saved_settings(folder), key, value)
        folder.create()
        save_settings(folder, changed)


def warn_without_program(key: str, command: str) -> None:
    """Warn of a command whose program is not here. It is no error: the peer may run with another search path."""
    program = next(iter(shlex.split(command)), "")
    if program and shutil.which(program) is None:
        url = "; a URL begins with https://" if key == "notify" else ""
        print(f"warning: there is no program {program!r} on this machine's search path{url}", file=sys.stderr)


def settings_in_force(folder: Home) -> dict[str, Any]:
    """Return every setting: of the running peer, else from `config.toml`, else the default."""
    try:
        return ask(folder.path, {"verb": "config"})
    except NobodyRuns:
        return LocalSettings.model_validate(saved_settings(folder)).model_dump(mode="json")


def listing(shown: dict[str, Any]) -> str:
    """Return all settings as text: value, default and meaning of each."""
    lines, defaults = [], LocalSettings().model_dump(mode="json")
    for key, field in LocalSettings.model_fields.items():
        note = "" if shown[key] == defaults[key] else f"   (default {text_of(defaults[key])})"
        lines += [f"{key} = {text_of(shown[key])}{note}", f"    {field.description}"]
    return "\n".join(lines)


def text_of(value: object) -> str:
    """Return a value as the command line takes it."""
    match value:
        case None | "" | []:
            return "(none)"
        case bool():
            return str(value).lower()
        case list():
            return ",".join(map(str, value))
    return str(value)
