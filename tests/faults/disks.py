"""Disk faults: failing, torn and corrupted writes, and processes that are killed while they write."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import CheckpointFailed, CheckpointRejected, Event
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.model.checkpoint import load_latest
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.saver import Saver
from gossamer.protocol.identity import Identity
from tests.full_disk import room_for
from tests.peer.small import fingerprint, small_manifest, small_replica
from tests.peer.trainer.test_replica_resume import NUM_STEPS, Story

SAVING = 12  # more system calls than saving a checkpoint takes
CALLS = ("open", "write", "fsync", "fdatasync", "rename", "replace", "mkdir")
MANIFEST = small_manifest(inner={"optimizer": "adamw"})
DEAD = 9
_SOMEBODY = Identity(b"s" * 32).peer_id


class Disk:
    """System calls of which the k-th kills the process or fails."""

    def __init__(self, moment: int, error: int | None) -> None:
        self.num_calls = 0
        self._moment, self._error = moment, error

    @contextmanager
    def fails(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._hurt(getattr(os, name)))
            yield

    def _hurt(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def hurt(*given: Any, **named: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._moment:
                if self._error is None:
                    os._exit(DEAD)
                raise OSError(self._error, os.strerror(self._error))
            return call(*given, **named)

        return hurt


def _in_a_child(work: Callable[[], None]) -> int:
    """Run a function in a forked process and return its exit code."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Kept:
    """A home with two checkpoints of a replica, and the hashes of both checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.home.create()
        self.replica = small_replica(folder / "payloads", MANIFEST)
        self.events: list[Event] = []
        self.saver = Saver(self.home, PeerConfig(home=self.home.path), self.events.append, time.monotonic)
        self.hashes: list[str] = []
        for _ in range(2):
            self.replica.inner_step()
            self.saver.save(self.replica)
            self.hashes.append(fingerprint(self.replica))
        self.replica.inner_step()
        self.newest = fingerprint(self.replica)

    def restored(self) -> str:
        """Return the hash of the checkpoint that a new process loads."""
        loaded = load_latest(self.home.checkpoints, MANIFEST.run_id)
        assert loaded is not None
        fresh = small_replica(self.home.path / "fresh", MANIFEST)
        Saver(self.home, PeerConfig(home=self.home.path), self.events.append, time.monotonic).restore(fresh, loaded)
        return fingerprint(fresh)


@cache
def _num_bytes() -> int:
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        kept = Kept(Path(folder))
        return max(path.stat().st_size for path in kept.home.checkpoints.rglob("*.safetensors"))


def refused(number: int) -> None:
    """Fail, tear or corrupt a write of a checkpoint, the journal or the address book: the old or the new version must load."""
    draws = random.Random(number)
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        hurt = draws.choice((_checkpoint_full, _checkpoint_error, _checkpoint_changed, _journal, _journal_at_start, _book))
        hurt(draws, Path(folder))


def killed(number: int) -> None:
    """Kill a process at a system call with which it writes a checkpoint, the journal or the address book."""
    draws = random.Random(number)
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        draws.choice((_checkpoint_killed, _journal_killed, _book_killed))(draws, Path(folder))


def _checkpoint_full(draws: random.Random, folder: Path) -> None:
    kept = Kept(folder)
    with room_for(draws.randrange(_num_bytes())):
        kept.saver.save(kept.replica)
    _expect_alarm_and_the_one_before(kept)


def _checkpoint_error(draws: random.Random, folder: Path) -> None:
    kept, moment = Kept(folder), draws.randint(1, SAVING)
    failing = Disk(moment, draws.choice((errno.ENOSPC, errno.EIO)))
    with failing.fails():
        kept.saver.save(kept.replica)
    if failing.num_calls >= moment and any(isinstance(event, CheckpointFailed) for event in kept.events):
        _expect_alarm_and_the_one_before(kept)
    else:
        assert kept.restored() == kept.newest


def _expect_alarm_and_the_one_before(kept: Kept) -> None:
    assert kept.saver.trouble and any(isinstance(event, CheckpointFailed) for event in kept.events), "nobody is told"
    assert kept.restored() in (kept.hashes[-1], kept.newest), "neither the one before nor the new one"
    kept.replica.inner_step()
    kept.saver.save(kept.replica)
    assert not kept.saver.trouble
    assert kept.restored() == fingerprint(kept.replica), "the next one is not whole"


def _checkpoint_killed(draws: random.Random, folder: Path) -> None:
    kept, moment = Kept(folder), draws.randint(1, SAVING)

    def work() -> None:
        with Disk(moment, None).fails():
            kept.saver.save(kept.replica)

    code = _in_a_child(work)
    assert code in (0, DEAD)
    assert kept.restored() in ((kept.newest,) if code == 0 else (kept.hashes[-1], kept.newest))
    kept.saver.save(kept.replica)
    assert kept.restored() == kept.newest


def _checkpoint_changed(draws: random.Random, folder: Path) -> None:
    kept = Kept(folder)
    newest = max(kept.home.checkpoints.iterdir(), key=lambda path: path.name)
    victim = draws.choice(sorted(newest.iterdir()))
    data = bytearray(victim.read_bytes())
    if draws.random() < 0.3:
        data = data[: draws.randrange(len(data))]
    else:
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    victim.write_bytes(data)
    assert kept.restored() == kept.hashes[0], "a damaged one was taken"
    assert any(isinstance(event, CheckpointRejected) for event in kept.events), "nobody is told"


def _refuses(draws: random.Random, room_bytes: int) -> AbstractContextManager[None]:
    if draws.random() < 0.5:
        return room_for(room_bytes)
    return Disk(draws.randint(1, 4), draws.choice((errno.ENOSPC, errno.EIO))).fails()


def _name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _journal(draws: random.Random, folder: Path) -> None:
    path, num_before, is_reported = folder / "journal", draws.randint(1, 5), False
    journal = _journal_of(path, num_before)
    try:
        with _refuses(draws, path.stat().st_size + draws.randrange(60)):
            asyncio.run(journal.commit(_name(99), b"\x01"))
        is_reported = True
    except OSError:
        assert journal.failed_blocks(_name(99)) is None
        asyncio.run(journal.commit(_name(100), b""))
    journal.close()
    if draws.random() < 0.3:  # power fails in the middle of a line
        with path.open("ab") as file:
            file.write(b'{"meeting": "' + b"0" * draws.randrange(30))
    _look_at_journal(path, num_before, is_reported)


def _journal_at_start(draws: random.Random, folder: Path) -> None:
    """Start a node on a full disk: it must know its decided meetings, and continue when there is space."""
    path, num_before = folder / "journal", draws.randint(1, 5)
    _journal_of(path, num_before).close()
    if draws.random() < 0.5:
        with path.open("ab") as file:
            file.write(b'{"meeting": "' + b"0" * draws.randrange(30))
    with room_for(draws.randrange(40)):
        journal = Journal(path)
        for number in range(num_before):
            assert journal.failed_blocks(_name(number)) == b"", "an earlier decision is lost"
        with contextlib.suppress(OSError):
            asyncio.run(journal.commit(_name(50), b""))
    asyncio.run(journal.commit(_name(99), b"\x01"))
    journal.close()
    _look_at_journal(path, num_before, True)


def _journal_killed(draws: random.Random, folder: Path) -> None:
    path, num_before = folder / "journal", draws.randint(1, 5)
    journal = _journal_of(path, num_before)

    def work() -> None:
        with Disk(draws.randint(1, 4), None).fails():
            asyncio.run(journal.commit(_name(99), b"\x01"))
            Journal(path)

    is_reported = _in_a_child(work) == 0
    journal.close()
    _look_at_journal(path, num_before, is_reported)


def _journal_of(path: Path, num_meetings: int) -> Journal:
    journal = Journal(path)
    for number in range(num_meetings):
        asyncio.run(journal.commit(_name(number), b""))
    return journal


def _look_at_journal(path: Path, num_before: int, is_reported: bool) -> None:
    again = Journal(path)
    for number in range(num_before):
        assert again.failed_blocks(_name(number)) == b"", "an earlier decision is lost"
    assert again.failed_blocks(_name(99)) == b"\x01" or not is_reported, "a decision that was told is lost"
    asyncio.run(again.commit(_name(101), b"\x02"))
    again.close()
    last = Journal(path)
    assert last.failed_blocks(_name(101)) == b"\x02"
    last.close()


def _books(draws: random.Random, path: Path) -> tuple[bytes, bytes]:
    """Write an address book; return it and a second one that is to replace it."""
    old, new = (draws.randbytes(draws.randint(50, 2500)).hex().encode() for _ in range(2))
    write_whole(path, old)
    return old, new


def _book(draws: random.Random, folder: Path) -> None:
    path = folder / "peers.json"
    old, new = _books(draws, path)
    try:
        with _refuses(draws, draws.randrange(len(new))):
            write_whole(path, new)
    except OSError:
        assert path.read_bytes() == old
    _look_at_book(draws, path, old, new)


def _book_killed(draws: random.Random, folder: Path) -> None:
    path = folder / "peers.json"
    old, new = _books(draws, path)

    def work() -> None:
        with Disk(draws.randint(1, 3), None).fails():
            write_whole(path, new)

    _in_a_child(work)
    _look_at_book(draws, path, old, new)


def _look_at_book(draws: random.Random, path: Path, old: bytes, new: bytes) -> None:
    assert path.read_bytes() in (old, new), "a torn file"
    write_whole(path, new)
    assert path.read_bytes() == new
    path.write_bytes(new[: draws.randrange(len(new))])
    AddressBook(_SOMEBODY).load(path, 0.0)  # with any content


def killed_and_resumed(number: int) -> None:
    """Kill -9 a process that trains and saves, at any time: a run resumed from its checkpoint must end bit-identical."""
    draws = random.Random(number)
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        home = Home(folder / "home")
        home.create()

        def saver() -> Saver:
            return Saver(home, PeerConfig(home=home.path), lambda event: None, time.monotonic)

        def train(replica: Replica) -> None:
            keeper = saver()
            while replica.own_steps < NUM_STEPS:
                Story(replica, meets=False).run(replica.own_steps + 1)
                keeper.save(replica)

        child = os.fork()
        if not child:
            try:
                torch.set_num_threads(1)
                train(small_replica(folder / "payloads", MANIFEST))
                os._exit(0)
            finally:
                os._exit(1)
        time.sleep(draws.uniform(0.02, _uninterrupted()[1]))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        again = small_replica(folder / "again", MANIFEST)
        loaded = load_latest(home.checkpoints, MANIFEST.run_id)
        if loaded is not None:
            saver().restore(again, loaded)
        Story(again, meets=False).run(NUM_STEPS)
        assert fingerprint(again) == _uninterrupted()[0], f"another end, from step {loaded and loaded.contents.step}"
        shutil.rmtree(folder / "home")


@cache
def _uninterrupted() -> tuple[str, float]:
    """Return the final hash of an uninterrupted run, and its approximate duration with checkpoints."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="whole-") as folder:
        kept = Kept(Path(folder))
        replica = small_replica(Path(folder) / "whole", MANIFEST)
        story = Story(replica, meets=False)
        for step in range(NUM_STEPS):
            story.run(step + 1)
            kept.saver.save(kept.replica)
        return fingerprint(replica), time.monotonic() - began_s
