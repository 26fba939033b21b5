"""What a partner sends: each part once, in the one legal order, of exactly the size in the manifest.

test_machine_misbehaved.py tests each violation of that where it ends a meeting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gossamer.peer.meeting.actions import PartnerSide, union
from gossamer.protocol.errors import BadMessage, PeerMisbehaved
from gossamer.protocol.messages.messages import Chunk, Commitment, Part, Verdict, exchange_digest
from gossamer.protocol.messages.terms import FragmentTerms
from tests.protocol.samples import ALICE, HELLO, MEETING_ID

SIZES = FragmentTerms(sketch_bytes=64, payload_bytes=1000, num_blocks=20)
SKETCH, PAYLOAD = b"s" * 64, bytes(range(250)) * 4
NO_SKETCH = hashlib.sha256().digest()


def commitment_to(sketch: bytes) -> Commitment:
    """A commitment to a partner without a sketch."""
    digest = exchange_digest(hashlib.sha256(sketch).digest(), NO_SKETCH, hashlib.sha256(PAYLOAD).digest())
    return Commitment(MEETING_ID, digest).signed(ALICE)


COMMITMENT = commitment_to(SKETCH)

Step = Callable[[PartnerSide], None]


def hello(side: PartnerSide) -> None:
    side.hello = HELLO


def commitment(side: PartnerSide) -> None:
    side.take_commitment(COMMITMENT, MEETING_ID)


def payload(side: PartnerSide) -> None:
    side.take_chunk(Chunk(Part.PAYLOAD, 0, PAYLOAD))


def verdict(side: PartnerSide) -> None:
    side.take_verdict(Verdict(MEETING_ID, bytes(3)), MEETING_ID)


def after(*steps: Step) -> PartnerSide:
    side = PartnerSide(SIZES)
    for step in steps:
        step(side)
    return side


def chunks(part: Part, whole: bytes, num_bytes: int) -> list[Step]:
    """Return a step for each chunk of so many bytes."""

    def chunk(start: int) -> Step:
        return lambda side: side.take_chunk(Chunk(part, start, whole[start : start + num_bytes]))

    return [chunk(start) for start in range(0, len(whole), num_bytes)]


IN_HALVES = [*chunks(Part.SKETCH, SKETCH, 32), commitment, *chunks(Part.PAYLOAD, PAYLOAD, 500), verdict]


@given(st.permutations(IN_HALVES))
def test_halves_are_accepted_in_no_other_order(steps: list[Step]) -> None:
    assume(steps != IN_HALVES)
    with pytest.raises(PeerMisbehaved):
        after(hello, *steps)


@pytest.mark.parametrize("num_bytes", [1, 7, 64, 300, 1000])
def test_chunks_are_of_any_size(num_bytes: int) -> None:
    side = after(hello, *chunks(Part.SKETCH, SKETCH, num_bytes), commitment)
    *most, last = chunks(Part.PAYLOAD, PAYLOAD, num_bytes)
    for step in most:
        step(side)
    assert not side.has_payload
    last(side)
    assert side.has_payload


def test_without_a_sketch_the_commitment_comes_first() -> None:
    side = PartnerSide(FragmentTerms(0, 1000, 0))
    hello(side)
    assert side.has_sketch and not side.has_payload
    with pytest.raises(BadMessage):
        side.take_chunk(Chunk(Part.SKETCH, 0, b"x"))
    side.take_commitment(commitment_to(b""), MEETING_ID)
    payload(side)
    side.take_verdict(Verdict(MEETING_ID), MEETING_ID)
    assert side.has_payload and side.verdict is not None


@pytest.mark.parametrize("changed", ["the partner's", "ours"])
def test_a_sketch_that_was_changed_in_transit_is_detected(changed: str) -> None:
    """Peers that encode against different sketches would decode and merge different values."""
    side = after(hello)
    side.take_chunk(Chunk(Part.SKETCH, 0, SKETCH[:-1] + b"x" if changed == "the partner's" else SKETCH))
    if changed == "ours":
        side.our_sketch = hashlib.sha256(b"what we sent, and another came").digest()
    commitment(side)
    with pytest.raises(BadMessage, match="sketches"):
        payload(side)


def test_a_decision_must_contain_every_block_that_failed_here() -> None:
    side = PartnerSide(SIZES)
    side.need_bitmap(b"\x03\x00\x80", own=b"\x01\x00\x80")
    side.need_bitmap(b"\x03\x00\x80")
    side.need_bitmap(b"", own=bytes(3))
    for left_out in (b"\x02\x00\x80", b""):
        with pytest.raises(BadMessage, match="leaves out"):
            side.need_bitmap(left_out, own=b"\x01\x00\x00")


def test_an_empty_bitmap_stands_for_none_in_a_union() -> None:
    assert union(b"", b"") == b"" and union(b"\x01", b"") == union(b"", b"\x01") == b"\x01"
    assert union(b"\x01\x80", b"\x02\x80") == b"\x03\x80"
