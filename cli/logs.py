"""`peer logs`: the events of a peer and the log of its processes, whether it runs or not."""

from __future__ import annotations

import json
import platform
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.figures import sentence
from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.control_socket import newest_status
from gossamer.peer.machine.extras import installed_version
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.log_lines import LEVELS, Log, LogLine
from gossamer.peer.machine.status import VERSION
from gossamer.protocol.errors import BadSettings

FOLLOW_EVERY_S = 0.5
REPORT_LINES = 100
PACKAGES = ("torch", "hivemind", "grpcio", "transformers")

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")]
Level = Annotated[str, typer.Option("--level", metavar="NAME", help=f"Lowest level to show: {', '.join(LEVELS)}.")]
Grep = Annotated[str, typer.Option("--grep", metavar="PATTERN", help="Only lines that match this regular expression.")]
Lines = Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="Number of lines to show, counted from the end.")]
Report = Annotated[bool, typer.Option("--report", help="Print a report to paste into an issue, with names, addresses and invites removed.")]


def logs(
    home: HomeFolder = DEFAULT_HOME,
    follow: Follow = False,
    level: Level = "info",
    grep: Grep = "",
    lines: Lines = 100,
    report: Report = False,
) -> None:
    """Show the events of a peer and the log of its processes, newest last. Also works for a peer that has ended."""
    folder = Home(home)
    if report:
        print(redacted(report_text(folder), folder.path))
        return
    if level not in LEVELS:
        raise BadSettings(f"there is no level {level!r}", hint=f"one of {', '.join(LEVELS)}")
    if not folder.log.exists() and not folder.events.exists():
        raise BadSettings(f"no peer has run in {folder.path}", hint="pass its home folder with --home DIR")
    log = Log(folder)
    for line in deque(filtered(log, level, grep), maxlen=lines):
        print(line)
    while follow:
        time.sleep(FOLLOW_EVERY_S)
        for line in filtered(log, level, grep):
            print(line, flush=True)


def filtered(log: Log, level: str, grep: str = "") -> Iterator[LogLine]:
    """Yield the new lines of this level or above that match. Raises BadSettings if the pattern is not a regular expression."""
    try:
        pattern = re.compile(grep)
    except re.error as error:
        raise BadSettings(
            f"--grep {grep!r} is not a regular expression: {error}",
            hint="escape special characters with a backslash, or search for plain words",
        ) from error
    shown = LEVELS[LEVELS.index(level) :]
    return (line for line in log.lines() if line.level in shown and pattern.search(str(line)))


def report_text(folder: Home) -> str:
    """Return a report for an issue: versions, the last status, the last log lines."""
    versions = ", ".join(f"{name} {installed_version(name) or 'missing'}" for name in PACKAGES)
    machine = f"Gossamer {VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, {versions}"
    status = newest_status(folder)
    status.pop("addresses", None)
    state = [sentence(status, time.time()), json.dumps(status)] if status else ["no status was written yet"]
    return "\n".join([machine, *state, "", *map(str, deque(filtered(Log(folder), "info"), maxlen=REPORT_LINES))])


_SECRETS = (
    (re.compile(r"gossamer1\w+"), "INVITE"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "ADDRESS"),
    (re.compile(r"/ip6/[^/\s]+"), "/ip6/ADDRESS"),
    (re.compile(r"(?<![\w:])(?=[\da-f:]*::|(?:[\da-f]+:){5})[\da-f:]{3,}(?!\w)", re.IGNORECASE), "ADDRESS"),  # IPv6 as p2pd logs it, MAC
    (re.compile(r"/dns[46]?/[^/\s]+"), "/dns/NAME"),
    (re.compile(r"\b12D3Koo\w+(?=\w{6})"), "12D3Koo..."),  # the last six letters distinguish the peers
)


def redacted(text: str, home: Path) -> str:
    """Replace what identifies the operator: the home and user folders, addresses, invites, most of each peer id."""
    for folder, name in ((home, "HOME"), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    for pattern, name in _SECRETS:
        text = pattern.sub(name, text)
    return text
