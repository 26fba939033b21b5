"""Pieces on the disk: what is there stays there, through crashes, and only for the content that it belongs to."""

from __future__ import annotations

import asyncio
import errno
import math
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.pieces import HASH_BYTES, KEPT_S, Pieces, RunResult, bits_bytes, to_bits
from gossamer.peer.sync.state_source import StateSource
from gossamer.protocol.messages.messages import ContentsKind
from tests.processor_time import takes_at_most
from tests.protocol.samples import FETCH, TERMS

OWNER, SIZE = b"r" * 32, 2 * files.PIECE_BYTES + 100
DATA = os.urandom(SIZE)


def put(pieces: Pieces, *which: int) -> None:
    for piece in which:
        pieces.put(range(piece, piece + 1), DATA[pieces.offset(piece) :][: pieces.size(piece)], 40 + piece)


def test_a_content_is_put_together_in_any_order(tmp_path: Path) -> None:
    with closing(Pieces.open(tmp_path / "folder" / "state", OWNER, SIZE)) as pieces:
        put(pieces, 2, 0)
        assert list(pieces.missing()) == [1] and not pieces.is_whole and pieces.done_bytes == files.PIECE_BYTES + 100
        put(pieces, 1)
        assert pieces.is_whole and pieces.path.read_bytes() == DATA and pieces.global_steps == {0: 40, 1: 41, 2: 42}
        files.remove(pieces.path)
        assert not list(pieces.path.parent.iterdir())


def test_what_a_crash_left_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        put(pieces, 1)
    log = tmp_path / "state.log"
    log.write_bytes(log.read_bytes() + b"half an en")
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        assert list(pieces.missing()) == [0, 2]
        put(pieces, 0)
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        assert pieces.global_steps == {0: 40, 1: 41}
        put(pieces, 2)
        assert path.read_bytes() == DATA


@pytest.mark.parametrize("other", ["owner", "size", "age", "log"])
def test_another_content_is_begun_anew(tmp_path: Path, other: str) -> None:
    path, log = tmp_path / "state", tmp_path / "state.log"
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        put(pieces, 0, 1)
    if other == "age":
        os.utime(log, (log.stat().st_atime, log.stat().st_mtime - KEPT_S - 1))
    elif other == "log":
        log.write_bytes(b"no log at all")
    owner, size = b"o" * 32 if other == "owner" else OWNER, SIZE + 1 if other == "size" else SIZE
    with closing(Pieces.open(path, owner, size)) as pieces:
        assert not pieces.global_steps and path.stat().st_size == size


def test_a_log_without_its_content_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        put(pieces, 0, 1, 2)
    path.rename(tmp_path / "to")  # where a crash interrupts `rename`
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        assert list(pieces.missing()) == [0, 1, 2]


@pytest.mark.parametrize(("kept_s", "is_kept"), [(math.inf, True), (KEPT_S, False)])
def test_an_old_content_is_kept_where_the_caller_wants_it(kept_s: float, is_kept: bool, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        put(pieces, 0, 1, 2)
    for file in (path, tmp_path / "state.log"):
        os.utime(file, (file.stat().st_mtime - 10 * KEPT_S,) * 2)
    with closing(Pieces.open(path, OWNER, SIZE, kept_s)) as pieces:
        assert pieces.is_whole is is_kept


def test_a_piece_of_which_the_disk_took_a_part_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes full takes what still fits, without an error."""
    pwrite, write, path = os.pwrite, os.write, tmp_path / "state"
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        put(pieces, 0)
        monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1000], offset))
        with pytest.raises(OSError, match="No space left"):
            put(pieces, 1)
        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(OSError, match="No space left"):
            put(pieces, 1)
        assert list(pieces.missing()) == [1, 2]
        monkeypatch.setattr(os, "write", write)
        put(pieces, 2)
    with closing(Pieces.open(path, OWNER, SIZE)) as pieces:
        assert pieces.global_steps == {0: 40, 2: 42}


def test_a_content_that_cannot_be_begun_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A joining peer tries again each second."""
    opened, real = list[int](), os.open

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", lambda *args: opened.append(real(*args)) or opened[-1])
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        Pieces.open(tmp_path / "state", OWNER, SIZE)
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("num_pieces", [1, 7, 8, 9, 100])
def test_a_whole_result_has_all_pieces(num_pieces: int) -> None:
    assert RunResult(bytes(HASH_BYTES * num_pieces), memoryview(b"")).held() == to_bits(range(num_pieces), num_pieces)


def test_what_peers_that_wait_for_each_other_ask_often_costs_little_with_a_large_model(tmp_path: Path) -> None:
    """16 GiB: they ask several times a second which result another one has or fetches."""
    num_pieces = 1 << 18
    nothing: Any = SimpleNamespace(partner=FETCH.opening.sender)
    hashes, terms = bytes(HASH_BYTES * num_pieces), replace(TERMS, state_bytes=files.PIECE_BYTES << 18)
    fetched = Pieces(tmp_path / "state", terms.state_bytes, -1, -1)
    fetched.global_steps = dict.fromkeys(range(num_pieces), 40)
    coming = RunResult(hashes, fetched)

    async def ask() -> None:
        source = StateSource(nothing, nothing, Lifecycle(), terms, nothing, coming=coming)
        request = replace(FETCH, kind=ContentsKind.RESULT_PIECES, offset=0, num_bytes=0)
        part = await source.answer(nothing, request, 0.0)
        assert (part.total_bytes, part.name) == (bits_bytes(num_pieces), coming.name)

    assert takes_at_most(0.005, RunResult(hashes, memoryview(b"")).held)
    assert takes_at_most(0.01, lambda: asyncio.run(ask()))
