"""Small files that are there whole or as they were: written beside the old one, which they then replace."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file; a crash of the process leaves all of it or the old one. `private`: only its owner can read it.

    Raises OSError, with the old file untouched.
    """
    beside = path.with_suffix(".new")
    beside.unlink(missing_ok=True)  # what a crash left may have another mode
    with open(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666), "wb") as file:
        file.write(content)
    beside.replace(path)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable: a power cut takes away a file whose name was not synced, however well its content was."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
