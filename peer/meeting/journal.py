"""The journal: the meetings that count, on disk before they are applied.

One JSON line per meeting, flushed to disk before `commit` returns. So a responder that lost the stream can learn the decision (`Resolve`)
even after this process was killed and restarted. The journal keeps the last few thousand meetings, far more than a responder may ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

from gossamer.peer.machine.home import sync_path
from gossamer.protocol.newest import keep_newest

KEPT = 4096  # meetings; the file holds at most twice as many


class Journal:
    """Decisions by meeting id. For one process and one event loop; threads write to disk, one line after another."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal. Raises OSError."""
        self._path = path
        self._committed = _read(path)
        self._num_lines = 0
        self._descriptor = -1
        self._writing = asyncio.Lock()
        try:
            self._rewrite()
        except OSError:  # a full disk: the existing file still answers Resolve
            self._descriptor = _reopened(path)

    async def commit(self, meeting_id: bytes, failed_blocks: bytes) -> None:
        """Record that a meeting counts, durably. A second call for the same meeting changes nothing.

        Raises OSError if nothing was recorded. Must not be cancelled: the line may be on disk nevertheless.
        """
        async with self._writing:
            if meeting_id in self._committed:
                return
            await asyncio.to_thread(self._append, _line(meeting_id, failed_blocks))
            keep_newest(self._committed, meeting_id, failed_blocks, KEPT)
            self._num_lines += 1
            if self._num_lines >= 2 * KEPT:
                with contextlib.suppress(OSError):  # a later commit rewrites it
                    await asyncio.to_thread(self._rewrite)

    def failed_blocks(self, meeting_id: bytes) -> bytes | None:
        """Return the failed blocks of a meeting that counts; None if it was not committed here, or is too old."""
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
                os.ftruncate(self._descriptor, end)  # so that the next line is not appended to a torn one
            raise

    def _rewrite(self) -> None:
        """Replace the file atomically by one with the kept decisions only."""
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
        self._descriptor, self._num_lines = descriptor, len(lines)  # it is in place, even if syncing the folder fails
        sync_path(self._path.parent)


def _read(path: Path) -> dict[bytes, bytes]:
    committed: dict[bytes, bytes] = {}
    if path.exists():
        for line in path.read_bytes().splitlines()[-KEPT:]:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # torn by a power cut: its meeting was not applied
                entry = json.loads(line)
                committed[bytes.fromhex(entry["meeting"])] = bytes.fromhex(entry["failed_blocks"])
    return committed


def _reopened(path: Path) -> int:
    """Open the existing journal for appending and cut off a torn last line. Raises OSError."""
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
