"""What the partner has shown in a meeting so far, and the only order and sizes in which it may show it.

Pure bookkeeping: each method takes one message in or raises what the partner did wrong. The machine that acts on it: peer/meeting.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from protocol.errors import BadContents, BadMessage
from protocol.messages import Chunk, Commitment, Hello, Part, Verdict
from protocol.terms import FragmentTerms


@dataclass(slots=True)
class PartnerSide:
    """Hello, sketch, commitment, payload, verdict: each once, in this order, of the sizes that the manifest implies."""

    terms: FragmentTerms
    hello: Hello | None = None
    commitment: Commitment | None = None
    verdict: Verdict | None = None
    _sketch_bytes: int = 0
    _payload_bytes: int = 0
    _payload: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def has_sketch(self) -> bool:
        """Whether the whole sketch is here (or the codec has none)."""
        return self._sketch_bytes == self.terms.sketch_bytes

    @property
    def has_payload(self) -> bool:
        """Whether the whole payload is here; it was checked against the commitment when its last byte came."""
        return self._payload_bytes == self.terms.payload_bytes

    def take_chunk(self, chunk: Chunk) -> None:
        """Count a chunk of the sketch (before the commitment) or of the payload (after it)."""
        if self.hello is None:
            raise BadMessage("bytes before a Hello")
        if chunk.part is Part.SKETCH and self.commitment is None:
            _need_next(chunk, self._sketch_bytes, self.terms.sketch_bytes)
            self._sketch_bytes += len(chunk.data)
        elif chunk.part is Part.PAYLOAD and self.commitment is not None:
            _need_next(chunk, self._payload_bytes, self.terms.payload_bytes)
            self._payload_bytes += len(chunk.data)
            self._payload.update(chunk.data)
            if self.has_payload and self._payload.digest() != self.commitment.payload_sha256:
                raise BadContents("the payload does not have the hash that was committed to")
        else:
            raise BadMessage(f"a chunk of the {chunk.part.name.lower()} out of turn")

    def take_commitment(self, commitment: Commitment, meeting_id: bytes) -> None:
        """Hold the partner to the payload that it is going to send."""
        if self.hello is None or self.commitment is not None or not self.has_sketch:
            raise BadMessage("a commitment out of turn")
        if commitment.meeting_id != meeting_id:
            raise BadMessage("a commitment of another meeting")
        commitment.verify(self.hello.sender)
        self.commitment = commitment

    def take_verdict(self, verdict: Verdict, meeting_id: bytes) -> None:
        """Note that the partner accepts our payload."""
        if self.commitment is None or not self.has_payload or self.verdict is not None:
            raise BadMessage("a verdict out of turn")
        if verdict.meeting_id != meeting_id:
            raise BadMessage("a verdict of another meeting")
        self.need_bitmap(verdict.failed_blocks)
        self.verdict = verdict

    def need_bitmap(self, failed_blocks: bytes, own: bytes = b"") -> None:
        """Raise BadMessage unless this can be a bitmap of this fragment's blocks, with every block of `own` (empty: none) in it."""
        if len(failed_blocks) not in (0, (self.terms.num_blocks + 7) // 8):
            raise BadMessage(f"a list of failed blocks of {len(failed_blocks)} bytes for {self.terms.num_blocks} blocks")
        if any(ours & ~theirs for ours, theirs in zip(own, failed_blocks or bytes(len(own)), strict=False)):
            raise BadMessage("a decision that leaves out blocks which failed here")


def union(first: bytes, second: bytes) -> bytes:
    """Unite two bitmaps of one fragment; an empty one stands for none."""
    if not first or not second:
        return first or second
    return bytes(a | b for a, b in zip(first, second, strict=True))


def _need_next(chunk: Chunk, done: int, limit: int) -> None:
    if chunk.offset != done or done + len(chunk.data) > limit:
        raise BadMessage(f"{len(chunk.data)} bytes of {chunk.part.name.lower()} at {chunk.offset}; {done} of {limit} are here")
