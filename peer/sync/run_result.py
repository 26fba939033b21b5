"""The result of a run, as it passes from peer to peer: each piece can be verified, and so served, as soon as it has come.

The name of a result is the SHA-256 of the hashes of its pieces, so no piece can be forged. Peers that fetch it serve each other what they
have, so one upload is not the bottleneck of an ending. How they fetch: peer/sync/result_agreement.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.client import Source
from gossamer.peer.sync.pieces import Pieces
from gossamer.protocol.errors import BadContents, BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.messages.messages import Contents, ContentsKind

HASH_BYTES = 32


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
        starts = range(0, len(data), files.PIECE_BYTES)
        return cls(b"".join(hashlib.sha256(data[start : start + files.PIECE_BYTES]).digest() for start in starts), data)

    def held(self) -> bytes:
        """Return which pieces are here, as the content of `RESULT_PIECES`."""
        num_pieces = len(self.hashes) // HASH_BYTES
        return files.to_bits(self.content.clocks if isinstance(self.content, Pieces) else range(num_pieces), num_pieces)

    def part(self, offset: int, num_bytes: int) -> memoryview:
        """Return these bytes. Raises Refused where they are not here."""
        whole = self.content
        data = memoryview(whole.get(offset, num_bytes)) if isinstance(whole, Pieces) else whole[offset : offset + num_bytes]
        if num_bytes and not data:
            raise Refused(RefusalCode.NOT_FOUND, "I do not have this piece of the result")
        return data

    def check(self, source: PeerId, header: Contents, piece: int) -> None:
        """Raise unless the header of a source announces this piece of this result."""
        if header.name != self.name:
            raise Refused(RefusalCode.NOT_FOUND, "it has another result by now")
        if header.sha256 != self.hashes[HASH_BYTES * piece : HASH_BYTES * (piece + 1)]:
            raise BadContents(f"{source.short()} gives a piece that is not in the result it names")


async def fetch_hashes(source: Source, name: bytes, num_bytes: int) -> bytes:
    """Fetch the hashes of a result of so many bytes. Raises as `Source.take`, and BadContents for those of another result."""
    total_bytes, hashes = HASH_BYTES * files.count(num_bytes), b""
    while len(hashes) < total_bytes:
        await source.ask(ContentsKind.RESULT_HASHES, len(hashes), min(CHUNK_BYTES, total_bytes - len(hashes)))
        header, data = await source.take()
        if header.total_bytes != total_bytes or not data:
            raise BadMessage(f"hashes of {header.total_bytes} bytes; those of this model's result have {total_bytes}")
        hashes += data
    if hashlib.sha256(hashes).digest() != name:
        raise BadContents("hashes of another result than it names")
    return hashes


async def whole_coming(source: Source, num_bytes: int) -> bytes:
    """Return the name of the result of which a source has all pieces, empty if it lacks some. Raises as `Source.take`."""
    num_pieces = files.count(num_bytes)
    await source.ask(ContentsKind.RESULT_PIECES, 0, files.bits_bytes(num_pieces))
    header, bits = await source.take()
    return header.name if len(files.from_bits(bits, num_pieces)) == num_pieces else b""
