"""The control socket: how `peer status`, `peer pause` and the demo control a running peer. One JSON line asks, one JSON line answers.

The socket lies in the peer's private runtime folder, so only its owner can reach it; `running.json` in the home folder names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from gossamer.peer.machine.export_text import export_text
from gossamer.peer.machine.home import Home, write_whole
from gossamer.protocol.errors import BadSettings

SOCKET_NAME = "control.sock"
ANSWER_S = 10.0
LINE_BYTES = 1 << 16

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers a request. BadSettings raised in it becomes an error reply."""


class NobodyRuns(BadSettings):
    """No peer runs from this home."""


@contextlib.asynccontextmanager
async def serving(home: Home, runtime: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer requests while the body runs, and write the socket's path into the home folder."""
    import asyncio  # slow to import, and clients do not need it

    path = runtime / SOCKET_NAME

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ANSWER_S):
                request = json.loads(await reader.readline())
                try:
                    reply = answer(request) if isinstance(request, dict) else {"error": "a request is a JSON object"}
                except BadSettings as error:
                    reply = {"error": str(error), "hint": error.hint}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path=str(path), limit=LINE_BYTES)
    write_whole(home.running, json.dumps({"pid": os.getpid(), "control": str(path), "started": time.time()}).encode())
    try:
        yield
    finally:
        server.close()
        home.running.unlink(missing_ok=True)


def _what_next(folder: Home) -> str:
    """Return what an operator can do about a home from which no peer runs."""
    last = folder.last_status()
    if last.get("state") == "done":
        return f"the run is complete: {export_text(str(folder.path), is_staged=bool(last.get('stage')))}"
    if program := last.get("program"):
        return f"start the program of this run, {program}, again with this home: it goes on from there"
    if last.get("own_steps"):
        return f"`peer join --home {folder.path}` starts it again: it goes on from its newest checkpoint"
    return "start one with `peer join` or `peer host`, or pass its home folder with --home DIR"


def ask(home: Path, request: dict[str, Any], *, wait_s: float = ANSWER_S) -> dict[str, Any]:
    """Ask the peer that runs from `home` and return its answer.

    Raises NobodyRuns if none runs there, BadSettings if it does not answer or refuses. Blocks for at most `wait_s`.
    """
    folder = Home(home)
    nobody = NobodyRuns(f"no peer is running in {folder.path}", hint=_what_next(folder))
    try:
        path = str(json.loads(folder.running.read_text())["control"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise nobody from error
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(wait_s)
            connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = connection.makefile("rb").readline()
        if not line:  # the peer has just ended
            raise nobody
        answer: dict[str, Any] = json.loads(line)
    except (TimeoutError, ValueError) as error:
        hint = f"see {folder.log}; if the process hangs, stop it and start the peer again"
        raise BadSettings(f"the peer in {folder.path} does not answer", hint=hint) from error
    except OSError as error:  # the peer was killed and left its socket
        raise nobody from error
    if "error" in answer:
        raise BadSettings(str(answer["error"]), hint=str(answer.get("hint", "")))
    return answer


def newest_status(home: Home) -> dict[str, Any]:
    """Return the status of the peer that runs from `home`; of one that does not answer, the last one that it wrote, or nothing."""
    try:
        return ask(home.path, {"verb": "status"})
    except BadSettings:
        return home.last_status()
