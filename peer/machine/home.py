"""The home folder of one peer: where its identity, manifest, checkpoints and events lie, and the lock that lets it run only once.

Small files are written beside the old one and then replace it, so a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import need_private
from gossamer.protocol.limits import MOST_GENERATIONS

CHECKPOINT: Final = re.compile(r"step-(\d{8,})(?:\.(\d+))?")  # name of a finished one: its step, and which of several
SENTENCE: Final = {"state", "reason", "since", "way_out"}  # keys of a status that every message about it needs
ANOTHER_HOME: Final = "choose another folder with --home DIR or GOSSAMER_HOME"


class HomeInUse(BadSettings):
    """A peer already runs from this home."""


class Home:
    """Paths inside a peer's home folder. The constructor does no I/O; `create` makes and checks the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.identity: Final = self.path / "identity.key"
        self.generation: Final = self.path / "generation"  # grows with each restore from a backup; absent: never restored
        self.manifest: Final = self.path / "manifest.bin"  # signed by the run's host
        self.config: Final = self.path / "config.toml"  # local settings; may be absent
        self.invite: Final = self.path / "invite.txt"
        self.credential: Final = self.path / "credential"  # in this peer's name, by the issuer of the invite; absent until that gave it
        self.revocations: Final = self.path / "revocations"  # signed revocations of invites and members
        self.invites: Final = self.path / "invites.json"  # uses of the invites for anybody that this peer has issued
        self.members: Final = self.path / "members.json"  # who has used them
        self.peers: Final = self.path / "peers.json"  # address book
        self.partners: Final = self.path / "partners.json"  # record of each partner
        self.forgiven: Final = self.path / "forgiven"  # peer ids whose records the operator wants forgotten, one a line; absent: none
        self.checkpoints: Final = self.path / "checkpoints"
        self.relays: Final = self.path / "relays"  # that this peer last used, one address a line; empty: it was reachable directly
        self.journal: Final = self.path / "journal"
        self.downloads: Final = self.path / "downloads"  # incomplete downloads from other peers
        self.left_checkpoints: Final = self.path / "checkpoints-left"  # in a staged run: of a stage that this peer held before
        self.stage: Final = self.path / "stage"  # in a staged run: that this peer holds, counted from one
        self.left_stage: Final = self.path / "stage-left"  # likewise: that it held before, until the first checkpoint of this one
        self.filled: Final = self.path / "filled"  # id of the run in which this peer has moved to an empty stage; absent: none
        self.cache: Final = self.path / "cache"  # tokenized text; may be deleted at any time
        self.tokenizer: Final = self.path / "tokenizer"  # of the run, if it was given with --model
        self.base: Final = self.path / "base"  # link to the folder with the frozen weights of a fine-tuning run
        self.traffic: Final = self.path / "traffic.json"  # bytes of this month
        self.events: Final = self.path / "events.jsonl"
        self.log: Final = self.path / "peer.log"
        self.port: Final = self.path / "port"  # of the last start
        self.status: Final = self.path / "status.json"  # last status, written every 30 s and at the end
        self.run: Final = self.path / "run.json"  # what this peer has seen of the whole run, written every 30 s and at the end
        self.running: Final = self.path / "running.json"  # pid, control socket, start time of the peer that runs now
        self._lock: Final = self.path / "lock"

    def create(self) -> None:
        """Make the folder, readable by its owner alone, unless it is there. Raises BadSettings unless it is ours alone to use."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            need_private(self.path, "the home")
            self.checkpoints.mkdir(mode=0o700, exist_ok=True)
            for file in (self.events, self.log, self.status, self.running, self.peers, self.config, self.revocations, self.traffic):
                with contextlib.suppress(FileNotFoundError):
                    file.chmod(0o600)  # an earlier release left what the umask allowed
            with tempfile.TemporaryFile(dir=self.path, buffering=0) as probe:
                probe.write(b"x")  # one byte: an empty file succeeds on a full disk
        except FileExistsError as error:
            raise BadSettings(f"the home {self.path} is not a folder", hint=ANOTHER_HOME) from error
        except OSError as error:
            raise BadSettings(f"the home {self.path} cannot be written to: {error.strerror}", hint=ANOTHER_HOME) from error

    def clear(self, *kept: Path) -> None:
        """Remove everything in the folder but `kept`, and the folder itself if nothing is kept. No peer may run from it."""
        for path in self.path.iterdir():
            if path in kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not kept:
            self.path.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the home for this process; the kernel releases the lock when the process ends.

        Raises HomeInUse that names the process, while another one holds it: the same identity must not run twice. Raises BadSettings if
        the lock cannot be taken.
        """
        with contextlib.ExitStack() as stack:
            try:
                descriptor = os.open(self._lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)  # it is written to
                stack.callback(os.close, descriptor)
                is_ours = try_lock(descriptor, fcntl.LOCK_EX)
            except OSError as error:  # of a lock: some network file systems have none
                raise BadSettings(f"the lock {self._lock} cannot be opened and locked: {error.strerror}", hint=ANOTHER_HOME) from error
            if not is_ours:
                raise HomeInUse(
                    f"a peer already runs from {self.path} ({_holder(descriptor)})",
                    hint=f"stop it with `peer leave --home {self.path}`, or give this one its own folder with --home DIR",
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {time.time():.0f} {socket.gethostname()}\n".encode(), 0)
            yield

    def holder(self) -> str:
        """Return which process holds the home and since when; empty if none does. Raises OSError if the lock may not be read."""
        try:
            descriptor = os.open(self._lock, os.O_RDONLY)
        except FileNotFoundError:
            return ""
        try:
            return "" if try_lock(descriptor, fcntl.LOCK_SH) else _holder(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Wait until no other process reads, changes and writes a file that `peer` commands and the running peer both write.

        Blocks for as long as such an update takes. Raises OSError where the folder cannot be opened or locked.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read_generation(self) -> int:
        """Return the home's generation, which each restore from a backup raises: of two homes of one identity the higher one goes on.

        Raises BadSettings where the file holds anything else.
        """
        with contextlib.suppress(FileNotFoundError):
            text = self.generation.read_text().strip()
            if not (text.isascii() and text.isdecimal() and int(text) <= MOST_GENERATIONS):
                raise BadSettings(
                    f"{self.generation} does not hold a number up to {MOST_GENERATIONS}",
                    hint="write the generation that `peer restore` gave",
                )
            return int(text)
        return 0

    def write_generation(self, generation: int) -> None:
        """Keep the generation. Raises BadSettings beyond MOST_GENERATIONS, OSError when the disk refuses."""
        if generation > MOST_GENERATIONS:
            raise BadSettings(
                f"generation {generation} of the home is beyond {MOST_GENERATIONS}",
                hint="check this machine's clock; if it is right, update Gossamer, or begin with a new home and a new invite",
            )
        write_whole(self.generation, f"{generation}\n".encode())

    def last_status(self) -> dict[str, Any]:
        """Return the last status that the peer wrote, as `peer status --json` shows it; empty if there is none that says its state."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            status = json.loads(self.status.read_text())
            return status if isinstance(status, dict) and status.keys() >= SENTENCE else {}
        return {}


def finished_checkpoints(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the finished checkpoints in a folder by step and number, the newest first. They are not checked."""
    with contextlib.suppress(FileNotFoundError):
        found = {(int(match[1]), int(match[2] or 0)): path for path in folder.iterdir() if (match := CHECKPOINT.fullmatch(path.name))}
        return dict(sorted(found.items(), reverse=True))
    return {}


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock an open file, as fcntl.LOCK_EX or LOCK_SH; return whether no other process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(lock: int) -> str:
    """Return the holder from the lock file, with its host: several containers may share a home."""
    pid, _, rest = os.pread(lock, 256, 0).decode(errors="replace").partition(" ")
    since_s, _, host = rest.strip().partition(" ")
    if not (pid.isdecimal() and since_s.isdecimal()):
        return "an unknown process"
    return f"process {pid} on {host}, since {time.strftime('%Y-%m-%d %H:%M', time.localtime(int(since_s)))}"


def write_whole(path: Path, content: bytes, *, is_synced: bool = True) -> None:
    """Write a file that only its owner can read; a crash of the process, or a power cut, leaves all of it or the old one.

    `is_synced`: False does not wait for the disk, which may take seconds beside a checkpoint; a power cut may then leave an empty file.
    Raises OSError, with the old file untouched.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)  # what a crash left may have another mode
    with open(beside, "xb", opener=private) as file:
        file.write(content)
        if is_synced:
            file.flush()
            os.fsync(file.fileno())  # some file systems take the new name to the disk before the content
    beside.replace(path)


def private(path: str, flags: int) -> int:
    """Open a file as `opener` of open(); a new one is its owner's alone, whatever the umask."""
    return os.open(path, flags, 0o600)


def sync_path(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable: a power cut loses what was not synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
