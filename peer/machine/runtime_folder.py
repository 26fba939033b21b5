"""The runtime folder of one running peer: private, short-lived, with a short path; holds the control sockets and the payloads in flight.

It lies in memory (/dev/shm) if there is room for the payloads, else in the temporary folder, else in the peer's home, which may be the only
writable place in a container. Its owner holds a lock on a file inside. The kernel releases that lock when the owner dies, so the next peer
distinguishes a live folder from an orphan, even across containers that share /dev/shm but not process numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gossamer.peer.machine.home import try_lock
from gossamer.protocol.errors import BadSettings

PREFIX = "gossamer-"
LOCK_NAME = "lock"
MEMORY_FOLDER = Path("/dev/shm")
PAYLOAD_BYTES = 64 << 20  # room wanted for payloads before the model's size is known
MAX_PATH_BYTES = 80  # a Unix socket's path holds 104 bytes at least (108 on Linux); the rest is for the names inside
ORPHAN_AGE_S = 60.0  # a younger folder may be one whose owner is about to lock it


@contextlib.contextmanager
def runtime_folder(bytes_needed: int, last_resort: Path | None = None) -> Iterator[Path]:
    """Make a private folder with room for `bytes_needed`, remove orphans of dead peers, and remove the folder at the end.

    `last_resort` is used if no other place has room. Raises BadSettings if none has. Call it in the process that outlives the others.
    """
    parent = place_for(bytes_needed, last_resort)
    _remove_orphans(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getuid()}-", dir=parent))  # mode 0700
    with held(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a runtime folder inside, so that no other peer takes it for an orphan."""
    descriptor = os.open(folder / LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def place_for(bytes_needed: int, last_resort: Path | None) -> Path:
    """Return where a runtime folder with this much room would be made: in memory, else on disk. Raises BadSettings."""
    candidates = [MEMORY_FOLDER, *_temporary(), *([last_resort] if last_resort else [])]
    for place in candidates:
        # Twice the need: other peers on this machine use the same free space.
        if len(os.fsencode(place)) + len(PREFIX) + 24 <= MAX_PATH_BYTES and _free_bytes(place) >= 2 * bytes_needed:
            return place
    places = ", ".join(str(place) for place in dict.fromkeys(candidates))
    raise BadSettings(
        f"no room for {2 * bytes_needed} bytes of payloads in flight: looked in {places}",
        hint="free some space there, or set TMPDIR to a folder with room and a path under 50 characters",
    )


def _temporary() -> list[Path]:
    try:
        return [Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 - mkdtemp makes a private folder inside
    except FileNotFoundError:  # no temporary folder is writable
        return []


def _free_bytes(place: Path) -> int:
    if not os.access(place, os.W_OK | os.X_OK):
        return -1
    return shutil.disk_usage(place).free


def _remove_orphans(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > ORPHAN_AGE_S and not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        return True  # of another user
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)
