"""The journal: which meetings this peer decided to count, on disk before anything is applied.

One JSON line per meeting, flushed to the disk before `commit` returns, so that a responder which lost the stream can still learn the
decision after we were killed and restarted (`Resolve`). It keeps the last few thousand; older partners have long given up asking.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

KEPT = 4096


class Journal:
    """Decisions by meeting id. One process writes; not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._committed: dict[bytes, bytes] = {}
        if path.exists():
            self._load()
        self._descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def commit(self, meeting_id: bytes, failed_blocks: bytes) -> None:
        """Record that a meeting counts; durable when this returns. A second call for the same meeting changes nothing."""
        if meeting_id in self._committed:
            return
        self._committed[meeting_id] = failed_blocks
        os.write(self._descriptor, _line(meeting_id, failed_blocks))
        os.fdatasync(self._descriptor)

    def failed_blocks(self, meeting_id: bytes) -> bytes | None:
        """Return the failed blocks of a meeting that counts, None for one that was never committed here."""
        return self._committed.get(meeting_id)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _load(self) -> None:
        for line in self._path.read_bytes().splitlines()[-KEPT:]:
            try:
                entry = json.loads(line)
                self._committed[bytes.fromhex(entry["meeting"])] = bytes.fromhex(entry["failed_blocks"])
            except (ValueError, KeyError, TypeError):
                continue  # a line torn by a power cut: its meeting was not yet applied
        self._rewrite()

    def _rewrite(self) -> None:
        whole = self._path.with_suffix(".new")
        with whole.open("wb") as file:
            file.writelines(_line(meeting_id, failed) for meeting_id, failed in self._committed.items())
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self._path)


def _line(meeting_id: bytes, failed_blocks: bytes) -> bytes:
    return json.dumps({"meeting": meeting_id.hex(), "failed_blocks": failed_blocks.hex()}).encode() + b"\n"
