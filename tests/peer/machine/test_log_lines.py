"""The log as it grows and is rotated."""

from __future__ import annotations

import stat
from pathlib import Path

from gossamer.peer.machine.log_lines import GrowingFile, keep_short


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = GrowingFile(path)
    assert tail.lines() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntwo\nthr")
        assert tail.lines() == [b"one", b"two"]
        file.write(b"ee\n")
        assert tail.lines() == [b"three"]
    assert tail.lines() == []


def test_it_goes_on_after_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    tail = GrowingFile(path)
    tail.lines()
    path.replace(tmp_path / "log.1")
    path.write_bytes(b"one, later, and longer than before\n")
    assert tail.lines() == [b"one, later, and longer than before"]


def test_a_log_that_processes_write_to_stays_short(tmp_path: Path) -> None:
    path = tmp_path / "peer.log"
    with path.open("ab", buffering=0) as child:
        child.write(b"old\n" * 10)
        keep_short(path, max_bytes=20)
        child.write(b"new\n")
        keep_short(path, max_bytes=20)
    assert path.read_bytes() == b"new\n"
    assert (tmp_path / "peer.log.1").read_bytes() == b"old\n" * 10
    assert stat.S_IMODE((tmp_path / "peer.log.1").stat().st_mode) == 0o600


def test_no_log_is_short(tmp_path: Path) -> None:
    keep_short(tmp_path / "peer.log")
