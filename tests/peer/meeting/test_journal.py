"""The journal: a decision is on disk before it is sent, and neither a crash nor a full disk loses an earlier one."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.peer.meeting import journal as module
from gossamer.peer.meeting.journal import Journal
from tests.full_disk import room_for


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal(path)
    yield journal
    journal.close()


def commit(journal: Journal, meeting_id: bytes, failed_blocks: bytes) -> None:
    asyncio.run(journal.commit(meeting_id, failed_blocks))


def reopened(path: Path, number: int) -> bytes | None:
    """Read a decision as a process does that starts after the first one died."""
    journal = Journal(path)
    failed_blocks = journal.failed_blocks(name(number))
    journal.close()
    return failed_blocks


def test_a_decision_is_flushed_before_commit_returns(journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[bytes]()
    flush = os.fdatasync

    def watched(descriptor: int) -> None:
        flush(descriptor)
        flushed.append(path.read_bytes())

    monkeypatch.setattr(os, "fdatasync", watched)
    commit(journal, name(1), b"\x05")
    assert name(1).hex().encode() in flushed[-1] and flushed[-1].endswith(b"\n")
    assert reopened(path, 1) == b"\x05"  # the first was not closed, as in a killed process


def test_an_empty_bitmap_differs_from_no_decision(journal: Journal) -> None:
    commit(journal, name(1), b"")
    assert journal.failed_blocks(name(1)) == b"" and journal.failed_blocks(name(2)) is None


def test_the_first_decision_about_a_meeting_stands(journal: Journal, path: Path) -> None:
    commit(journal, name(1), b"\x01")
    written = path.read_bytes()
    commit(journal, name(1), b"\x02")
    assert journal.failed_blocks(name(1)) == b"\x01" and path.read_bytes() == written


@pytest.mark.parametrize("num_lost", [1, 2, 20, 60])
def test_a_torn_last_line_costs_only_itself(journal: Journal, path: Path, num_lost: int) -> None:
    for number in (1, 2):
        commit(journal, name(number), b"\x07")
    path.write_bytes(path.read_bytes()[:-num_lost])
    again = Journal(path)
    assert again.failed_blocks(name(1)) == b"\x07"
    commit(again, name(3), b"\x03")  # is not appended to the torn line
    again.close()
    assert reopened(path, 1) == b"\x07" and reopened(path, 3) == b"\x03"


def test_lines_that_are_not_records_are_skipped(journal: Journal, path: Path) -> None:
    commit(journal, name(1), b"")
    path.write_bytes(b'\xff\xfe\n[]\n7\n{"meeting": 7}\n{"meeting": "zz", "failed_blocks": ""}\n\n' + path.read_bytes())
    assert reopened(path, 1) == b""


def test_the_file_keeps_the_newest_records_and_stays_bounded(journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 8)
    for number in range(50):
        commit(journal, name(number), bytes([number]))
        assert len(path.read_bytes().splitlines()) <= 16
    assert [number for number in range(50) if journal.failed_blocks(name(number)) is not None] == list(range(42, 50))
    assert reopened(path, 49) == b"\x31" and reopened(path, 42) == b"\x2a" and reopened(path, 41) is None


def test_a_failed_write_records_nothing(journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(journal, name(1), b"\x01")
    written = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(OSError, match="no space left"):
            commit(journal, name(2), b"\x02")
    assert journal.failed_blocks(name(2)) is None and path.read_bytes() == written
    commit(journal, name(2), b"\x03")  # there is space again
    assert reopened(path, 2) == b"\x03"


def test_a_rewrite_that_fails_halfway_loses_no_later_decision(journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is in place but its folder cannot be flushed: later decisions must go to the new file."""
    monkeypatch.setattr(module, "KEPT", 4)
    flush, num_calls = os.fsync, 0

    def failing(descriptor: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= 2:  # the new file is flushed, its folder is not
            raise OSError(5, "input/output error")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for number in range(9):
        commit(journal, name(number), b"\x09")
    monkeypatch.setattr(os, "fsync", flush)
    assert num_calls >= 2
    assert reopened(path, 8) == b"\x09"


@pytest.mark.real_time
async def test_concurrent_decisions_are_written_in_order_in_a_thread(journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, writers, order = os.fdatasync, set[threading.Thread](), list[int]()

    def watched(descriptor: int) -> None:
        assert len(writers) == 0, "two at once"
        writers.add(threading.current_thread())
        flush(descriptor)
        assert writers.pop() is not threading.main_thread(), "the loop waited for the disk"

    async def write(number: int) -> None:
        await journal.commit(name(number), b"")
        order.append(number)

    monkeypatch.setattr(os, "fdatasync", watched)
    await asyncio.gather(*map(write, range(20)))
    written = [json.loads(line)["meeting"] for line in path.read_bytes().splitlines()]  # noqa: ASYNC240
    assert order == list(range(20)) and written == [name(number).hex() for number in range(20)]


def test_a_journal_on_a_full_disk_is_readable_and_writable_again_once_there_is_space(path: Path) -> None:
    first = Journal(path)
    commit(first, name(1), b"\x01")
    first.close()
    with path.open("ab") as file:
        file.write(b'{"meeting": "00')  # power went in the middle of a line
    with room_for(0):
        journal = Journal(path)
        assert journal.failed_blocks(name(1)) == b"\x01"
        with pytest.raises(OSError):
            commit(journal, name(2), b"")
    assert journal.failed_blocks(name(2)) is None
    commit(journal, name(3), b"\x03")
    journal.close()
    assert reopened(path, 1) == b"\x01" and reopened(path, 2) is None and reopened(path, 3) == b"\x03"
