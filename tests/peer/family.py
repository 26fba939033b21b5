"""The processes of a real peer, by what they are."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil

from gossamer.peer.machine.home import Home
from gossamer.peer.supervisor.children import PROGRAMS


def family(home: Path) -> dict[str, psutil.Process]:
    """Return the supervisor of the peer that runs from a home, as `peer`, and its `node` and `trainer`, those that are there."""
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.Error, OSError, ValueError):  # it is just coming or going
        found["peer"] = psutil.Process(json.loads(Home(home).running.read_text())["pid"])
        for child in found["peer"].children():
            command = child.cmdline()
            found |= {name: child for name, program in PROGRAMS.items() if program in command}
    return found


def everybody(home: Path) -> list[psutil.Process]:
    """Return the peer that runs from a home and all that it has started, p2pd and the ranks of a trainer too; itself first."""
    peer = family(home)["peer"]
    return [peer, *peer.children(recursive=True)]


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of these have ended before so many seconds have passed."""
    return not psutil.wait_procs(processes, timeout=seconds)[1]
