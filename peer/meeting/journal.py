"""The journal: which meetings this peer decided to count, on disk before anything is applied.

One JSON line per meeting, flushed to the disk before `commit` returns, so that a responder which lost the stream can still learn the
decision after we were killed and restarted (`Resolve`). It keeps the last few thousand; older partners have long given up asking.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

from gossamer.peer.machine.home import sync_folder
from gossamer.protocol.newest import keep_newest

KEPT = 4096  # meetings; the file holds at most twice as many


class Journal:
    """Decisions by meeting id. One process writes, on one event loop; the disk's work is done in threads, one line after the other."""

    def __init__(self, path: Path) -> None:
        """Open the journal, or begin one. Raises OSError."""
        self._path = path
        self._committed = _read(path)
        self._num_lines = 0
        self._descriptor = -1
        self._writing = asyncio.Lock()
        try:
            self._rewrite()
        except OSError:  # a full disk: the file that is there does as well, and a node that knows its decisions can tell them
            self._descriptor = _reopened(path)

    async def commit(self, meeting_id: bytes, failed_blocks: bytes) -> None:
        """Record that a meeting counts; durable when this returns. A second call for the same meeting changes nothing.

        Raises OSError, with nothing recorded. Not to be cancelled: the line may be on the disk all the same.
        """
        async with self._writing:
            if meeting_id in self._committed:
                return
            await asyncio.to_thread(self._append, _line(meeting_id, failed_blocks))
            keep_newest(self._committed, meeting_id, failed_blocks, KEPT)
            self._num_lines += 1
            if self._num_lines >= 2 * KEPT:
                with contextlib.suppress(OSError):  # the long file does as well, and is shortened another time
                    await asyncio.to_thread(self._rewrite)

    def failed_blocks(self, meeting_id: bytes) -> bytes | None:
        """Return the failed blocks of a meeting that counts, None for one that was never committed here (or long ago)."""
        return self._committed.get(meeting_id)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _append(self, line: bytes) -> None:
        end = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(0, "a line of the journal was cut short")
            os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)  # or the next line would be joined to what is left of this one
            raise

    def _rewrite(self) -> None:
        """Write what is kept to a new file, which takes the place of the old one whole or not at all."""
        whole = self._path.with_suffix(".new")
        descriptor = os.open(whole, os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY, 0o600)
        try:
            lines = [_line(meeting_id, failed) for meeting_id, failed in self._committed.items()]
            with open(descriptor, "wb", closefd=False) as file:
                file.writelines(lines)
            os.fsync(descriptor)
            whole.replace(self._path)
        except OSError:
            os.close(descriptor)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._num_lines = descriptor, len(lines)  # it has the name now, whatever happens to the folder
        sync_folder(self._path.parent)


def _read(path: Path) -> dict[bytes, bytes]:
    committed: dict[bytes, bytes] = {}
    if path.exists():
        for line in path.read_bytes().splitlines()[-KEPT:]:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # torn by a power cut: its meeting was not yet applied
                entry = json.loads(line)
                committed[bytes.fromhex(entry["meeting"])] = bytes.fromhex(entry["failed_blocks"])
    return committed


def _reopened(path: Path) -> int:
    """Open a journal to go on with it, without a last line that was torn. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
    try:
        whole = path.read_bytes()
        os.ftruncate(descriptor, whole.rfind(b"\n") + 1)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _line(meeting_id: bytes, failed_blocks: bytes) -> bytes:
    return json.dumps({"meeting": meeting_id.hex(), "failed_blocks": failed_blocks.hex()}).encode() + b"\n"
