"""Notices: what the operator should know at once, sent through a command or to a URL of the operator's choice (`peer config notify`).

A notice is one sentence. Nothing else leaves the machine by this way, and nothing at all unless `notify` is set.
"""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import re
import shlex
import time
import urllib.request
from collections.abc import Callable
from typing import Final, NamedTuple

from gossamer.peer.machine.config import WEB
from gossamer.peer.machine.events import Event, Warned
from gossamer.peer.machine.process_group import kill_group
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor.pauses import Pause
from gossamer.protocol.identity import short_id
from gossamer.protocol.tasks import cancel, spawn

ALONE_S: Final = 3600.0  # without a partner in sight before it is worth a notice
SEND_S: Final = 30.0  # that a command or a server may take
AGAIN_S: Final = 3600.0  # before a condition that ended and began again is worth another notice
MOST_WAITING: Final = 8  # notices; more are dropped
CLOSE_S: Final = 5.0  # at the end of the peer, for all that wait
TOPIC: Final = "notify"
_INERT: Final = re.compile(r"[^\w .,:%/@+-]")
VARIABLE: Final = "GOSSAMER_NOTICE"  # environment of the command: the kind of the notice


class Notice(NamedTuple):
    """Something the operator should know. `kind`: done, failed, limit, alone, warning or test."""

    kind: str
    text: str


class NoticeBoard:
    """Which notices a status is worth: each condition once, until it has ended. `now_s` is a monotonic clock."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()  # conditions in force that have had their notice: kind and topic
        self._told_s: dict[tuple[str, str], float] = {}  # when each condition last had one
        self._alone_since_s: float | None = None

    def look(self, status: Status, is_held_back: bool, now_s: float) -> list[Notice]:
        """Return the new notices. `is_held_back`: the peer pauses because of a limit, or cannot start its trainer."""
        conditions = {("warning", topic): words for topic, words in status.warned.items() if words and topic != TOPIC}
        if status.state in ("done", "failed"):
            conditions[status.state, ""] = f"{status.reason}; {status.way_out}"
        if is_held_back:
            conditions["limit", ""] = f"paused: {status.reason}; {status.way_out}"
        if self._is_alone(status, now_s):
            conditions["alone", ""] = f"no other peer in sight for {ALONE_S / 3600:.0f} hour; it trains on alone meanwhile"
        new = [key for key in conditions if key not in self._told and now_s - self._told_s.get(key, -math.inf) >= AGAIN_S]
        self._told = {key for key in conditions if key in self._told or key in new}
        self._told_s.update(dict.fromkeys(new, now_s))
        return [Notice(key[0], conditions[key]) for key in new]

    def _is_alone(self, status: Status, now_s: float) -> bool:
        if status.state != "training" or status.peers_seen:
            self._alone_since_s = None
            return False
        self._alone_since_s = now_s if self._alone_since_s is None else self._alone_since_s
        return now_s - self._alone_since_s >= ALONE_S


class Notices:
    """Sends notices, one after the other, beside everything else. `emit` gets a warning when one cannot be sent, and its end."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._board = NoticeBoard()
        self._failure = ""
        self._sending: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def look(self, status: Status, pause: Pause | None, way: str) -> None:
        """Begin to send what the status is worth, by the setting `notify`; nothing where that is empty."""
        self._send(way, status, self._board.look(status, pause is not None and pause.is_limit, time.monotonic()))

    def test(self, status: Status, way: str) -> None:
        """Forget a failure of the setting before, and begin to send a notice that says that they arrive; nothing where `way` is empty."""
        self._note("")
        self._send(way, status, [Notice("test", "notices about this peer come by this way")])

    async def close(self) -> None:
        """Wait for CLOSE_S until all are sent; drop the rest."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=CLOSE_S)
        await cancel(*self._sending)

    def _send(self, way: str, status: Status, notices: list[Notice]) -> None:
        for notice in notices if way else ():
            if len(self._sending) < MOST_WAITING:
                text = f"Gossamer: {status.run_name or 'a run'}, peer {short_id(status.peer_id)}: {notice.text}"
                spawn(self._send_in_turn(way, text, notice.kind), self._sending, "notice")

    async def _send_in_turn(self, way: str, text: str, kind: str) -> None:
        async with self._turn:
            self._note(await _sent(way, text, kind))

    def _note(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            self._emit(Warned(TOPIC, f"the notice could not be sent: {failure}; see `peer config notify`" if failure else ""))


async def _sent(way: str, text: str, kind: str) -> str:
    """Send one notice; return why it failed, or an empty string."""
    try:
        async with asyncio.timeout(SEND_S):
            return await (asyncio.to_thread(_post, way, text, kind) if way.startswith(WEB) else _run(way, text, kind))
    except TimeoutError:
        return f"it took longer than {SEND_S:.0f} s"


def _post(url: str, text: str, kind: str) -> str:
    """Post a text in the manner of ntfy: the body is the message."""
    request = urllib.request.Request(url, text.encode(), {"Title": f"Gossamer: {kind}", "Content-Type": "text/plain; charset=utf-8"})
    try:
        with urllib.request.urlopen(request, timeout=CLOSE_S):  # noqa: S310 (http or https: config.py checks it)
            return ""
    except http.client.HTTPException as error:
        return f"no web server answers there: {error!r}"
    except (OSError, ValueError) as error:
        return str(error)


async def _run(command: str, text: str, kind: str) -> str:
    """Run a command with the text as its last argument; its output goes nowhere.

    Only characters that no shell acts on are passed: strangers choose the names of runs, and the command may be `ssh`, which has a shell.
    """
    null = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            _INERT.sub("", text.replace("\n", " ")),
            stdin=null,
            stdout=null,
            stderr=null,
            env=os.environ | {VARIABLE: kind},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return str(error)
    try:
        code = await process.wait()
        return "" if code == 0 else f"the command ended with {code}"
    finally:
        if process.returncode is None:
            kill_group(process.pid)
            await process.wait()
