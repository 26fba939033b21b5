from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.partner_side import PartnerSide, union
from protocol.errors import BadContents, BadMessage, PeerMisbehaved
from protocol.identity import Identity
from protocol.messages import Chunk, Commitment, Hello, Message, Part, Verdict
from protocol.terms import FragmentTerms
from tests.peer.two_sides import SEEDS, SKETCHED, Table

TERMS = FragmentTerms(64, 900, 20)
MEETING_ID = b"m" * 16
PAYLOAD = bytes(range(250)) * 4
PARTNER = Identity(SEEDS[1])


def hello() -> Hello:
    _, responder = Table(SKETCHED).run()
    message = responder.sent[0]
    assert isinstance(message, Hello)
    return message


HELLO = hello()
COMMITMENT = Commitment(MEETING_ID, hashlib.sha256(PAYLOAD[:900]).digest()).signed(PARTNER)


def take(side: PartnerSide, message: Message) -> None:
    match message:
        case Chunk():
            side.take_chunk(message)
        case Commitment():
            side.take_commitment(message, MEETING_ID)
        case Verdict():
            side.take_verdict(message, MEETING_ID)


def chunks(part: Part, data: bytes, size: int) -> list[Message]:
    return [Chunk(part, start, data[start : start + size]) for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 64, 300, 900])
def test_everything_in_order(size: int) -> None:
    side = PartnerSide(TERMS, hello=HELLO)
    for message in (*chunks(Part.SKETCH, b"s" * 64, size), COMMITMENT, *chunks(Part.PAYLOAD, PAYLOAD[:900], size), Verdict(MEETING_ID)):
        assert side.verdict is None
        take(side, message)
    assert side.has_sketch and side.has_payload and side.verdict is not None


def test_a_codec_without_a_sketch_has_it_at_once() -> None:
    side = PartnerSide(FragmentTerms(0, 10, 0), hello=HELLO)
    assert side.has_sketch and not side.has_payload
    with pytest.raises(BadMessage):
        side.take_chunk(Chunk(Part.SKETCH, 0, b"x"))


def test_the_last_byte_brings_the_verdict_on_the_hash() -> None:
    side = PartnerSide(TERMS, hello=HELLO)
    for message in (*chunks(Part.SKETCH, b"s" * 64, 64), COMMITMENT, *chunks(Part.PAYLOAD, PAYLOAD[:899], 899)):
        take(side, message)
    with pytest.raises(BadContents):
        side.take_chunk(Chunk(Part.PAYLOAD, 899, b"\xfe"))


ORDER = [*chunks(Part.SKETCH, b"s" * 64, 32), COMMITMENT, *chunks(Part.PAYLOAD, PAYLOAD[:900], 450), Verdict(MEETING_ID)]


@given(st.permutations(range(len(ORDER))))
def test_no_other_order_is_accepted(order: list[int]) -> None:
    side = PartnerSide(TERMS, hello=HELLO)
    if order == sorted(order):
        return
    with pytest.raises(PeerMisbehaved):
        for index in order:
            take(side, ORDER[index])


def test_bitmaps() -> None:
    side = PartnerSide(TERMS, hello=HELLO)
    side.need_bitmap(b"")
    side.need_bitmap(b"\x01\x00\x08", own=b"\x01\x00\x00")
    side.need_bitmap(b"\x01\x00\x00")
    side.need_bitmap(b"", own=b"\x00\x00\x00")
    for bitmap, own in ((b"\x01", b""), (bytes(4), b""), (b"\x02\x00\x00", b"\x01\x00\x00"), (b"", b"\x01\x00\x00")):
        with pytest.raises(BadMessage):
            side.need_bitmap(bitmap, own)


def test_union() -> None:
    assert union(b"", b"") == b""
    assert union(b"\x01", b"") == union(b"", b"\x01") == b"\x01"
    assert union(b"\x05\x00", b"\x02\x80") == b"\x07\x80"
