"""The payload folder: the bytes of meetings in flight, shared by node and trainer through memory-mapped files.

It lives inside the peer's private runtime folder (memory-backed where the machine has room), so removing that folder removes all of it:
no shared-memory segment can be left behind. Each file has one writer, and is complete before its name is told to the other side.
A full disk raises OSError.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.peer.link.records import File, Writer, payload_name

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class PayloadFolder:
    """Files of the meetings in flight, by name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def path(self, name: str) -> Path:
        """Return where a file lies."""
        return self._folder / name

    def write(self, name: str, data: Buffer) -> None:
        """Write a whole file. One of that name is replaced, not written over: whoever has mapped it keeps what it had."""
        self.remove(name)
        self._write(name, os.O_EXCL, data)

    def append(self, name: str, data: Buffer) -> None:
        """Add to the end of a file, which is made when missing."""
        self._write(name, os.O_APPEND, data)

    def _write(self, name: str, flag: int, data: Buffer) -> None:
        descriptor = os.open(self._at(name), os.O_CREAT | os.O_WRONLY | flag, 0o600)
        try:
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def read(self, name: str) -> memoryview:
        """Map a file. The view stays valid after the file is removed; an empty or missing file gives an empty view.

        The mapping is private: writing to the view is legal (torch wants a writable buffer) and reaches nobody.
        """
        return mapped(self.path(name))

    def _at(self, name: str) -> str:
        return f"{self._folder}/{name}"  # pathlib takes longer than the kernel

    def free_bytes(self) -> int:
        """Return how much more finds room here."""
        return shutil.disk_usage(self._folder).free

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(name))

    def remove_meeting(self, meeting: int) -> None:
        """Remove every file of a meeting."""
        for file in File:
            self.remove(payload_name(meeting, file))

    def clear(self, writer: Writer) -> None:
        """Remove every file that this writer has left: when it starts, nothing of its own can be in flight."""
        for pattern in writer.value:
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)


def mapped(path: Path) -> memoryview:
    """Map a file, as `PayloadFolder.read` does."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return memoryview(b"")
