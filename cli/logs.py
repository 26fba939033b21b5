"""`peer logs`: what happened in a peer, and what its processes said, whether it runs or not."""

from __future__ import annotations

import importlib.metadata
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
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.log_lines import LEVELS, Log, LogLine, at_least
from gossamer.peer.machine.status import VERSION
from gossamer.protocol.errors import BadSettings

FOLLOW_EVERY_S = 0.5
REPORT_LINES = 100
PACKAGES = ("torch", "hivemind", "grpcio", "transformers")

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")]
Level = Annotated[str, typer.Option("--level", metavar="NAME", help=f"Least that a line must matter: {', '.join(LEVELS)}.")]
Grep = Annotated[str, typer.Option("--grep", metavar="PATTERN", help="Only lines that match this regular expression.")]
Lines = Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="How many of the last lines.")]
Report = Annotated[bool, typer.Option("--report", help="Print a report to paste into an issue; names, addresses and invites are out.")]


def logs(
    home: HomeFolder = DEFAULT_HOME,
    follow: Follow = False,
    level: Level = "info",
    grep: Grep = "",
    lines: Lines = 100,
    report: Report = False,
) -> None:
    """Show what happened in a peer and what its processes said, the newest last. Works on a peer that has ended too."""
    folder = Home(home)
    if report:
        print(redacted(report_text(folder), folder.path))
        return
    if level not in LEVELS:
        raise BadSettings(f"there is no level {level!r}", hint=f"one of {', '.join(LEVELS)}")
    if not folder.log.exists() and not folder.events.exists():
        raise BadSettings(f"no peer has run in {folder.path}", hint="name its folder with --home")
    log = Log(folder)
    for line in deque(wanted(log, level, grep), maxlen=lines):
        print(line)
    while follow:
        time.sleep(FOLLOW_EVERY_S)
        for line in wanted(log, level, grep):
            print(line, flush=True)


def wanted(log: Log, level: str, grep: str) -> Iterator[LogLine]:
    """Yield the new lines that pass both filters. Raises BadSettings for a pattern that is none."""
    try:
        pattern = re.compile(grep)
    except re.error as error:
        raise BadSettings(f"--grep {grep!r} is not a regular expression: {error}", hint="plain words are one") from error
    return (line for line in at_least(log.lines(), level) if pattern.search(str(line)))


def report_text(folder: Home) -> str:
    """Return what somebody who wants to help asks for: versions, the last status, the last lines."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    machine = f"Gossamer {VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, {versions}"
    status = folder.last_status()
    status.pop("addresses", None)
    state = [sentence(status, time.time()), json.dumps(status)] if status else ["no status was written yet"]
    return "\n".join([machine, *state, "", *map(str, deque(at_least(Log(folder).lines(), "info"), maxlen=REPORT_LINES))])


_SECRETS = (
    (re.compile(r"gossamer1\w+"), "INVITE"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "ADDRESS"),
    (re.compile(r"/ip6/[^/\s]+"), "/ip6/ADDRESS"),
    (re.compile(r"/dns[46]?/[^/\s]+"), "/dns/NAME"),
    (re.compile(r"\b12D3Koo\w+(?=\w{6})"), "12D3Koo..."),  # the last six letters still tell peers apart
)


def redacted(text: str, home: Path) -> str:
    """Take out what says who and where somebody is: the home and user folders, addresses, invites, the most of peer ids."""
    for folder, name in ((home, "HOME"), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    for pattern, name in _SECRETS:
        text = pattern.sub(name, text)
    return text
