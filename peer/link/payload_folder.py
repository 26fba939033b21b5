"""The payload folder: the bytes of meetings in progress, which node and trainer share through memory-mapped files.

It lies inside the peer's private runtime folder, in memory where the machine has room, so removing that folder removes everything. Each
file has one writer, and is complete before the other side learns its name. A full disk raises OSError.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.peer.link.messages import File, HopFile, Writer, hop_file, payload_name

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class PayloadFolder:
    """Files of the meetings in progress, by name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return self._folder / name

    def write(self, name: str, data: Buffer) -> None:
        """Write a whole file. An existing file of that name is replaced, not overwritten: its mappings stay as they were."""
        self.remove(name)
        self._write(name, os.O_EXCL, data)

    def append(self, name: str, data: Buffer) -> None:
        """Append to a file; create it when missing."""
        self._write(name, os.O_APPEND, data)

    def _write(self, name: str, flag: int, data: Buffer) -> None:
        descriptor = os.open(f"{self._folder}/{name}", os.O_CREAT | os.O_WRONLY | flag, 0o600)
        try:
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def read(self, name: str) -> memoryview:
        """Map a file, as `mapped`."""
        return mapped(self.path(name))

    def free_bytes(self) -> int:
        """Return the free space."""
        return shutil.disk_usage(self._folder).free

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._folder}/{name}")

    def remove_meeting(self, meeting: int) -> None:
        """Remove every file of a meeting."""
        for file in File:
            self.remove(payload_name(meeting, file))

    def remove_hop(self, hop: int) -> None:
        """Remove every file of a hop."""
        for file in HopFile:
            self.remove(hop_file(hop, file))

    def clear(self, writer: Writer) -> None:
        """Remove every file of a writer, while nothing that it has written for is in progress."""
        for pattern in writer.value:
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)


def mapped(path: Path) -> memoryview:
    """Map a file. The view outlives the file, is writable (for torch) without changing it, and is empty for an empty or missing file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return memoryview(b"")
