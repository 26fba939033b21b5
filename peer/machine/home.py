"""The home folder of one peer: where its identity, manifest, checkpoints and events lie, and the lock that lets it run only once."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from protocol.errors import BadSettings

ANOTHER_HOME: Final = "choose another folder with --home DIR or GOSSAMER_HOME"


class Home:
    """Paths inside a peer's home folder. Making one touches nothing; `create` makes and checks the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.identity: Final = self.path / "identity.key"
        self.manifest: Final = self.path / "manifest.bin"  # signed by the run's host
        self.invite: Final = self.path / "invite.txt"
        self.peers: Final = self.path / "peers.json"  # address book
        self.checkpoints: Final = self.path / "checkpoints"
        self.journal: Final = self.path / "journal"
        self.cache: Final = self.path / "cache"  # tokenized text; may be deleted at any time
        self.events: Final = self.path / "events.jsonl"
        self.log: Final = self.path / "peer.log"
        self.running: Final = self.path / "running.json"  # pid, control socket, start time of the peer that runs now
        self._lock: Final = self.path / "lock"

    def create(self) -> None:
        """Make the folder, readable by its owner alone, unless it is there. Raises BadSettings if it cannot be written to."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.checkpoints.mkdir(mode=0o700, exist_ok=True)
            self._probe()
        except FileExistsError as error:
            raise BadSettings(f"the home {self.path} is not a folder", hint=ANOTHER_HOME) from error
        except OSError as error:
            raise BadSettings(f"the home {self.path} cannot be written to: {error.strerror}", hint=ANOTHER_HOME) from error

    def _probe(self) -> None:
        probe = self.path / f".probe-{os.getpid()}"
        try:
            probe.write_bytes(b"x")  # one byte: a full disk lets empty files pass
        finally:
            probe.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home for this process; the kernel lets go when the process ends, however it ends.

        Raises BadSettings, naming the process, while another one holds it: the same identity must not run twice.
        """
        descriptor = os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            self._take(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise BadSettings(
                f"a peer already runs from {self.path} (process {pid})",
                hint="stop it with `peer leave`, or give this one its own folder with --home DIR",
            ) from error
