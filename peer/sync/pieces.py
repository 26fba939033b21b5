"""A content of known size on the disk while it is fetched: a file with every piece in its place, and a log of the pieces beside it.

A piece is written before it is logged, so after a crash every logged piece is there, and all others are fetched again. A power loss may
spoil logged pieces too. Each piece of a run's result can be verified, and so served, as soon as it has come: the name of a result is the
SHA-256 of the hashes of its pieces.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from gossamer.peer.sync.client import Source
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.messages.messages import Contents, ContentsKind

PIECE_BYTES = 64 * 1024  # a quarter of a second at 2 Mbit/s; the header of each costs half a thousandth of it
KEPT_S = 3600.0  # an older content is begun anew
HASH_BYTES = 32
ANOTHER_BY_NOW = "it has another result by now"
_HEAD = struct.Struct("<32sQ")  # owner of the content, and its size
_ENTRY = struct.Struct("<QQ")  # a piece that is there, and the global step of its source


class Pieces:
    """One content: which pieces are there. Made by `open`. Belongs to one event loop; every method returns at once."""

    def __init__(self, path: Path, num_bytes: int, data: int, log: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.global_steps: dict[int, int] = {}  # by piece: the global step of its source
        self._data = data
        self._log = log

    @classmethod
    def open(cls, path: Path, owner: bytes, num_bytes: int, kept_s: float = KEPT_S) -> Self:
        """Go on with a content of so many bytes, or begin one; one that is older than `kept_s` is begun anew. Raises OSError.

        `owner`: 32 bytes, such as the id of the run.
        """
        head, beside = _HEAD.pack(owner, num_bytes), _log_of(path)
        if not (path.exists() and _is_fresh(beside, head, kept_s)):
            remove(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(data, num_bytes)
            log = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            os.close(data)
            remove(path)
            raise
        pieces = cls(path, num_bytes, data, log)
        try:
            pieces._read(head)
        except OSError:
            pieces.close()
            raise
        return pieces

    @property
    def num_pieces(self) -> int:
        """Return how many pieces make up the whole."""
        return count(self.num_bytes)

    @property
    def is_whole(self) -> bool:
        """Whether every piece is there."""
        return len(self.global_steps) == self.num_pieces

    @property
    def done_bytes(self) -> int:
        """Return how much is there."""
        return sum(self.size(piece) for piece in self.global_steps)

    def size(self, piece: int) -> int:
        """Return the bytes of a piece; the last one is shorter."""
        return min(PIECE_BYTES, self.num_bytes - self.offset(piece))

    def offset(self, piece: int) -> int:
        """Return where a piece begins."""
        return piece * PIECE_BYTES

    def missing(self) -> Iterator[int]:
        """Yield the pieces that are not there yet, in order."""
        return (piece for piece in range(self.num_pieces) if piece not in self.global_steps)

    def put(self, run: range, data: bytes | memoryview, global_step: int) -> None:
        """Store neighbouring pieces, whole and verified. Raises OSError."""
        _need_all(os.pwrite(self._data, data, self.offset(run[0])), len(data))
        self._note(b"".join(_ENTRY.pack(piece, global_step) for piece in run))
        self.global_steps.update(dict.fromkeys(run, global_step))

    def forget(self, spoiled: Iterable[int]) -> None:
        """Have these pieces fetched again."""
        for piece in spoiled:
            del self.global_steps[piece]

    def get(self, offset: int, num_bytes: int) -> bytes:
        """Return these bytes, nothing where one of their pieces is not there."""
        run = range(offset // PIECE_BYTES, count(min(offset + num_bytes, self.num_bytes)))
        return os.pread(self._data, num_bytes, offset) if all(piece in self.global_steps for piece in run) else b""

    def close(self) -> None:
        """Close the files; they stay on the disk."""
        os.close(self._data)
        os.close(self._log)

    def _read(self, head: bytes) -> None:
        content = os.pread(self._log, os.fstat(self._log).st_size, 0)
        if not content:
            self._note(head)
        whole = len(content) - max(0, len(content) - _HEAD.size) % _ENTRY.size  # a crash may have cut the last entry
        os.ftruncate(self._log, max(_HEAD.size, whole))
        self.global_steps.update(entry for entry in _ENTRY.iter_unpack(content[_HEAD.size : whole]) if entry[0] < self.num_pieces)

    def _note(self, entries: bytes) -> None:
        """Append to the log. Raises OSError, with nothing appended: a part of an entry would spoil all that follow."""
        end = os.fstat(self._log).st_size
        try:
            _need_all(os.write(self._log, entries), len(entries))
        except OSError:
            os.ftruncate(self._log, end)
            raise


def _need_all(num_written: int, num_bytes: int) -> None:
    """Raise OSError where the system wrote less than asked, as on a disk that has just become full."""
    if num_written != num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def count(num_bytes: int) -> int:
    """Return how many pieces make up a content of so many bytes."""
    return -(-num_bytes // PIECE_BYTES)


def bits_bytes(num_pieces: int) -> int:
    """Return how many bytes `to_bits` writes."""
    return -(-num_pieces // 8)


def to_bits(pieces: Iterable[int], num_pieces: int) -> bytes:
    """Encode a set of pieces as a bit each, the lowest first."""
    bits = bytearray(bits_bytes(num_pieces))
    for piece in pieces:
        bits[piece // 8] |= 1 << piece % 8
    return bytes(bits)


def from_bits(bits: bytes, num_pieces: int) -> set[int]:
    """Decode what `to_bits` wrote; a piece whose bit is missing is not in the set."""
    return {piece for piece in range(min(num_pieces, 8 * len(bits))) if bits[piece // 8] >> piece % 8 & 1}


def remove(path: Path) -> None:
    """Remove a content and its log, if they are there."""
    for file in (_log_of(path), path):  # without its log a content is nothing, so that goes first
        file.unlink(missing_ok=True)


def rename(path: Path, to: Path) -> None:
    """Put a content, with its log, in the place of another one; it counts as fresh. Raises OSError."""
    os.replace(path, to)
    os.replace(_log_of(path), _log_of(to))
    os.utime(_log_of(to))
    os.utime(to)


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + ".log")


def _is_fresh(log: Path, head: bytes, kept_s: float) -> bool:
    try:
        with log.open("rb") as file:
            return file.read(_HEAD.size) == head and time.time() - os.fstat(file.fileno()).st_mtime < kept_s
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class RunResult:
    """A result that this peer has (`content` is its bytes), or fetches (`content` is its pieces)."""

    hashes: bytes  # SHA-256 of each piece, one after the other
    content: memoryview | Pieces
    name: bytes = field(init=False)  # hashed once, for each piece and request is compared with it

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", hashlib.sha256(self.hashes).digest())

    @classmethod
    def of(cls, data: memoryview) -> RunResult:
        """Hash a whole result; slow."""
        return cls(_hashes(data), data)

    def held(self) -> bytes:
        """Return which pieces are here, as the content of `RESULT_PIECES`."""
        num_pieces = len(self.hashes) // HASH_BYTES
        if isinstance(self.content, Pieces):
            return to_bits(self.content.global_steps, num_pieces)
        return ((1 << num_pieces) - 1).to_bytes(bits_bytes(num_pieces), "little")

    def spoiled(self) -> list[int]:
        """Return the pieces on the disk that do not have their hash, as after a power loss. Slow; only reads, so any thread may call it."""
        pieces = self.content
        if not isinstance(pieces, Pieces):
            return []
        held = ((piece, pieces.get(pieces.offset(piece), pieces.size(piece))) for piece in tuple(pieces.global_steps))
        return [piece for piece, data in held if not self._is_run(range(piece, piece + 1), memoryview(data))]

    def part(self, offset: int, num_bytes: int) -> memoryview:
        """Return these bytes. Raises Refused where they are not here."""
        whole = self.content
        data = memoryview(whole.get(offset, num_bytes)) if isinstance(whole, Pieces) else whole[offset : offset + num_bytes]
        if num_bytes and not data:
            raise Refused(RefusalCode.NOT_FOUND, "this piece of the result is not here")
        return data

    def check(self, source: PeerId, header: Contents) -> None:
        """Raise unless the header of a source announces bytes of this result."""
        if header.name != self.name:
            raise Refused(RefusalCode.NOT_FOUND, ANOTHER_BY_NOW)

    def verify(self, source: PeerId, run: range, data: bytes | memoryview) -> None:
        """Raise unless these bytes are these neighbouring pieces of this result."""
        if not self._is_run(run, memoryview(data)):
            raise BadMessage(f"{source.short()} gives a piece that is not in the result it names")

    def _is_run(self, run: range, data: memoryview) -> bool:
        return _hashes(data) == self.hashes[HASH_BYTES * run.start : HASH_BYTES * run.stop]


def _hashes(data: memoryview) -> bytes:
    starts = range(0, len(data), PIECE_BYTES)
    return b"".join(hashlib.sha256(data[start : start + PIECE_BYTES]).digest() for start in starts)


async def fetch_hashes(source: Source, name: bytes, num_bytes: int) -> bytes:
    """Fetch the hashes of a result of so many bytes. Raises as `Source.take`, Refused where the source has another result by now.

    Raises BadMessage for hashes that are not those of the result that the source names.
    """
    total_bytes, hashes = HASH_BYTES * count(num_bytes), b""
    while len(hashes) < total_bytes:
        await source.ask(ContentsKind.RESULT_HASHES, len(hashes), min(CHUNK_BYTES, total_bytes - len(hashes)))
        header, data = await source.take()
        if header.name != name:
            raise Refused(RefusalCode.NOT_FOUND, ANOTHER_BY_NOW)
        if header.total_bytes != total_bytes or not data:
            raise BadMessage(f"hashes of {header.total_bytes} bytes; those of this model's result have {total_bytes}")
        hashes += data
    if hashlib.sha256(hashes).digest() != name:
        raise BadMessage("hashes of another result than it names")
    return hashes


async def complete_result_name(source: Source, num_bytes: int) -> bytes:
    """Return the name of the result of which a source has all pieces, empty if it lacks some. Raises as `Source.take`."""
    num_pieces = count(num_bytes)
    await source.ask(ContentsKind.RESULT_PIECES, 0, bits_bytes(num_pieces))
    header, bits = await source.take()
    return header.name if len(from_bits(bits, num_pieces)) == num_pieces else b""
