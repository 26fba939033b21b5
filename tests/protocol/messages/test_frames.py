from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.frames import BODIES, from_frame, to_frame
from gossamer.protocol.messages.messages import (
    Chunk,
    Commit,
    Commitment,
    Committed,
    Contents,
    ContentsKind,
    FetchRequest,
    Hello,
    Lane,
    Message,
    Opening,
    Outcome,
    Part,
    Refusal,
    Resolve,
    RunPhase,
    Verdict,
)
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.replies import PeerList
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.wire import peer_pb2
from tests.mutations import mutated_bytes
from tests.protocol.samples import CREDENTIAL, HELLO, ISSUED, MESSAGES, changed
from tests.wire.golden import varint


def exactly(num_bytes: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=num_bytes, max_size=num_bytes)


PEERS = exactly(32).map(lambda key: PeerId(bytes.fromhex("002408011220") + key))
SIGNATURES = exactly(64)
MEETINGS = exactly(16)
STEPS = st.integers(0, limits.STEPS)
SIZES = st.integers(0, limits.TRANSFER_BYTES)
FRAGMENTS = st.integers(0, limits.FRAGMENTS)
KINDS = st.sampled_from(ContentsKind)
PARTS = st.integers(0, limits.CHUNK_BYTES)
BITMAPS = st.binary(max_size=40)
SECONDS = st.integers(0, limits.UNIX_SECONDS)
NAMED = st.builds(Credential, PEERS, PEERS, st.none(), SECONDS, exactly(32), SIGNATURES)
HELD = st.builds(Credential, PEERS, st.none(), PEERS, SECONDS, exactly(32), SIGNATURES, SIGNATURES)
CREDENTIALS = st.none() | NAMED | HELD
VERSIONS = st.integers(0, limits.VERSIONS)
RECORDS = st.lists(st.binary(max_size=limits.RECORD_BYTES), max_size=limits.PASSED_RECORDS).map(tuple)
STAGES, NONCES = st.integers(0, limits.STAGES), exactly(16)
OPENINGS = st.builds(Opening, VERSIONS, exactly(32), PEERS, PEERS, NONCES, st.just(b"") | NONCES, STAGES, CREDENTIALS, RECORDS)
ANY_MESSAGE = st.one_of(
    st.builds(
        Hello,
        opening=OPENINGS,
        fragment=st.integers(0, limits.FRAGMENTS),
        codec=st.integers(0, limits.CODECS),
        tokens=st.integers(0, limits.TOKENS),
        global_step=STEPS,
        sketch_bytes=SIZES,
        payload_bytes=SIZES,
        phase=st.sampled_from(RunPhase),
        signature=SIGNATURES,
    ),
    st.builds(Refusal, st.sampled_from(RefusalCode), st.text(max_size=limits.REFUSAL_DETAIL_CHARS)),
    st.builds(Chunk, st.sampled_from(Part), SIZES, st.binary(min_size=1, max_size=500)),
    st.builds(Commitment, MEETINGS, exactly(32), SIGNATURES),
    st.builds(Verdict, MEETINGS, BITMAPS),
    st.builds(Commit, MEETINGS, BITMAPS),
    st.builds(Committed, MEETINGS),
    st.builds(Resolve, exactly(32), MEETINGS),
    st.builds(Outcome, MEETINGS, st.booleans(), BITMAPS),
    st.builds(FetchRequest, OPENINGS, KINDS, SIZES, PARTS, FRAGMENTS, SIGNATURES),
    st.builds(Lane, OPENINGS, STEPS, st.sampled_from(RunPhase), st.integers(0, limits.WINDOW), SIGNATURES),
    st.builds(Contents, KINDS, SIZES, exactly(32), STEPS, st.just(b"") | exactly(32), SIGNATURES),
)


@given(ANY_MESSAGE)
@settings(max_examples=500)
def test_every_message_survives_a_round_trip(message: Message) -> None:
    assert from_frame(to_frame(message)) == message


@pytest.mark.parametrize("name", ["hello", "lane", "fetch_request"])
def test_a_first_message_without_its_opening_is_rejected(name: str) -> None:
    frame = peer_pb2.Frame.FromString(to_frame(MESSAGES[name]))
    getattr(frame, name).ClearField("opening")
    with pytest.raises(BadMessage, match="a peer id must be 38 bytes"):
        from_frame(frame.SerializeToString())


@given(st.binary(max_size=300))
@settings(max_examples=1000)
def test_random_bytes_raise_bad_message_or_decode(data: bytes) -> None:
    refused_or_read(data)


def refused_or_read(data: bytes) -> None:
    """Check that each decoded message can be encoded again, so that no malformed message passes."""
    try:
        message = from_frame(data)
    except (BadMessage, Refused):
        return
    assert from_frame(to_frame(message)) == message


@pytest.mark.parametrize("name", MESSAGES)
def test_mutated_frames_raise_bad_message_or_decode(name: str) -> None:
    generator, frame = random.Random(name), to_frame(MESSAGES[name])
    for _ in range(2000):
        refused_or_read(mutated_bytes(frame, generator))


@pytest.mark.parametrize("name", MESSAGES)
def test_every_truncation_is_rejected(name: str) -> None:
    frame = to_frame(MESSAGES[name])
    for end in range(len(frame)):
        with pytest.raises(BadMessage):
            from_frame(frame[:end])


def test_dataclasses_and_protobuf_have_the_same_fields() -> None:
    assert set(BODIES) == {field.name for field in peer_pb2.Frame.DESCRIPTOR.fields}
    for kind in (*BODIES.values(), Credential, PeerList, MemberRecord):
        wire = getattr(peer_pb2, kind.__name__).DESCRIPTOR
        assert [field.name for field in fields(kind)] == [field.name for field in wire.fields]


@pytest.mark.parametrize(
    ("kind", "wire"),
    [(RunPhase, peer_pb2.Phase), (Part, peer_pb2.Part), (ContentsKind, peer_pb2.ContentsKind)],
)
def test_enums_and_protobuf_have_the_same_values(kind: Any, wire: Any) -> None:
    named = {name.split("_", 1)[1]: number for name, number in wire.items()}
    named.pop("UNSPECIFIED", None)
    assert named == {member.name: member.value for member in kind}


def wire_frame(**bodies: Any) -> bytes:
    return peer_pb2.Frame(**bodies).SerializeToString()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty frame"),
        (wire_frame(refusal=peer_pb2.Refusal()), "0 is not a valid RefusalCode"),
        (wire_frame(chunk=peer_pb2.Chunk(data=b"x")), "0 is not a valid Part"),
        (wire_frame(contents=peer_pb2.Contents(sha256=bytes(32), signature=bytes(64))), "0 is not a valid ContentsKind"),
        (wire_frame(committed=peer_pb2.Committed()), "meeting_id has 0 bytes"),
        (wire_frame(refusal=peer_pb2.Refusal(code=1, detail="x" * 201)), "detail is 201"),  # type: ignore[arg-type]
        (b"\x12\x04\x08\x01\x12\x01\xff", "not a Frame"),  # a Refusal whose detail is not UTF-8
        (b"\x0b" * 5000, "not a Frame"),  # nested groups
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_field_values_are_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        from_frame(data)


def test_unknown_message_types_of_a_newer_peer_are_refused() -> None:
    for data in (b"\x7a\x01x", wire_frame(contents=peer_pb2.Contents(kind=99, sha256=bytes(32), signature=bytes(64)))):  # type: ignore[arg-type]
        with pytest.raises(Refused) as caught:
            from_frame(data)
        assert caught.value.code is RefusalCode.OTHER
    refusal = from_frame(wire_frame(refusal=peer_pb2.Refusal(code=99, detail="why")))  # type: ignore[arg-type]
    assert refusal == Refusal(RefusalCode.OTHER, "why")


def test_unsigned_messages_are_not_encoded() -> None:
    with pytest.raises(BadMessage, match="a Hello without a signature"):
        to_frame(replace(HELLO, signature=b""))
    for incomplete in (ISSUED, replace(CREDENTIAL, signature=b"")):
        with pytest.raises(BadMessage, match="a Credential without a signature"):
            to_frame(changed(HELLO, credential=incomplete))


def test_the_largest_chunk_decodes_and_a_larger_frame_is_not_parsed() -> None:
    chunk = Chunk(Part.PAYLOAD, limits.TRANSFER_BYTES, bytes(limits.CHUNK_BYTES))
    assert from_frame(to_frame(chunk)) == chunk
    assert len(to_frame(chunk)) - limits.CHUNK_BYTES < 32  # the framing overhead
    with pytest.raises(BadMessage, match="at most"):
        from_frame(bytes(limits.FRAME_BYTES + 1))


def test_a_frame_of_only_tiny_fields_is_rejected() -> None:
    empty_records = b"\x7a\x00" * (limits.FRAME_BYTES // 2 - 8)
    with pytest.raises(BadMessage):
        from_frame(b"\x0a" + varint(len(empty_records)) + empty_records)
