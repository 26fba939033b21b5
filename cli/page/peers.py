"""The peers of some homes as the page shows them, queried over their control sockets at most once a second for all viewers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.cli.config import settings_in_force
from gossamer.cli.figures import last_sentence, sentence
from gossamer.cli.peers import COLUMNS, partner_cells
from gossamer.cli.status import rows
from gossamer.peer.machine.config import LIMITS, LocalSettings
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.states import RESUMES
from gossamer.peer.machine.status import Status
from gossamer.protocol.errors import BadSettings

LOOK_S = 0.9  # younger answers are reused
ANSWER_S = 3.0  # a slower peer is shown as not answering


class Peers:
    """The peers of these homes. Belongs to one event loop."""

    def __init__(self, homes: Sequence[Path]) -> None:
        self.homes = tuple(Home(home).path for home in homes)
        self._lock = asyncio.Lock()
        self._looked_s = 0.0
        self._seen: list[dict[str, Any]] = []

    async def look(self) -> list[dict[str, Any]]:
        """Return the data of each peer."""
        async with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._seen = await asyncio.gather(*(asyncio.to_thread(shown, home) for home in self.homes))
                self._looked_s = time.monotonic()
        return self._seen


def shown(home: Path) -> dict[str, Any]:
    """Return the data that the page shows of the peer of a home; for a stopped peer, its last state."""
    try:
        status, partners, history = (ask(home, {"verb": verb}, wait_s=ANSWER_S) for verb in ("status", "peers", "history"))
        runs, words = True, ""
    except BadSettings as silent:
        status, partners, history = Home(home).last_status(), {"peers": []}, {}
        if not status.keys() >= Status().to_json().keys():  # none, or written by an earlier release
            status = {}
        runs, words = False, str(silent)
    now_s = time.time()
    return {
        "home": str(home).replace(str(Path.home()), "~", 1),
        "runs": runs,
        "words": words,
        "status": status,
        "may_resume": runs and status["state"] == "paused" and RESUMES in status["way_out"],
        "sentence": (sentence if runs else last_sentence)(status, now_s) if status else words,
        "rows": rows(status, now_s) if status else {},
        "partners": [partner_cells(row, now_s) for row in sorted(partners["peers"], key=lambda row: -row["seen"])],
        "partner_columns": COLUMNS,
        "history": history,
        "limits": limits(home),
    }


def limits(home: Path) -> list[dict[str, Any]]:
    """Return the limits in force, each with its meaning and whether it is a switch."""
    try:
        values = settings_in_force(Home(home))
    except BadSettings:  # the file is unreadable; `peer config` reports why
        return []
    return [_limit(key, str(values[key])) for key in LIMITS]


def _limit(key: str, value: str) -> dict[str, Any]:
    setting = LocalSettings.model_fields[key]
    is_switch = setting.annotation is bool
    return {
        "key": key,
        "value": value.lower() if is_switch else value,
        "is_switch": is_switch,
        "meaning": setting.description or "",
    }
