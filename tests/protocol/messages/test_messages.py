from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, BadSignature, PeerMisbehaved, RefusalCode, Refused
from gossamer.protocol.messages.messages import (
    Commitment,
    Contents,
    ContentsKind,
    FetchRequest,
    Hello,
    HopAnswer,
    Lane,
    Refusal,
    RunPhase,
    refusal_of,
)
from tests.protocol.samples import (
    ALICE,
    BOB,
    CREDENTIAL,
    FETCH,
    HELLO,
    LANE,
    MESSAGES,
    NONCE,
    OPENING,
    OTHER_RUN_ID,
    RECORD,
    UNSIGNED_HELLO,
    changed,
)

WRONG: list[tuple[str, str, Any]] = [
    ("opening", "protocol_version", -1),
    ("opening", "protocol_version", limits.VERSIONS + 1),
    ("opening", "run_id", b"r" * 31),
    ("opening", "nonce", b""),
    ("opening", "nonce", b"n" * 17),
    ("opening", "partner_nonce", b"p" * 15),
    ("hello", "fragment", limits.FRAGMENTS + 1),
    ("hello", "codec", -1),
    ("hello", "tokens", limits.TOKENS + 1),
    ("hello", "global_step", limits.STEPS + 1),
    ("hello", "sketch_bytes", -1),
    ("hello", "payload_bytes", limits.TRANSFER_BYTES + 1),
    ("opening", "stage", limits.STAGES + 1),
    ("opening", "stage", -1),
    ("lane", "window", limits.WINDOW + 1),
    ("hop_forward", "number", limits.HOPS + 1),
    ("hop_forward", "micro_batch", b"b" * 15),
    ("hop_forward", "micro_batch", b""),
    ("hop_answer", "window", limits.WINDOW + 1),
    ("hop_answer", "global_step", -1),
    ("hop_notice", "number", -1),
    ("opening", "records", (b"a", b"b", b"c", b"d")),
    ("opening", "records", (b"a" * (limits.RECORD_BYTES + 1),)),
    ("hello", "signature", b"s" * 63),
    ("refusal", "detail", "x" * 201),
    ("chunk", "offset", -1),
    ("chunk", "offset", limits.TRANSFER_BYTES + 1),
    ("chunk", "data", b""),
    ("chunk", "data", bytes(limits.CHUNK_BYTES + 1)),
    ("commitment", "meeting_id", b"m" * 15),
    ("commitment", "sha256", b"d" * 33),
    ("commitment", "signature", b"s"),
    ("verdict", "meeting_id", b""),
    ("verdict", "failed_blocks", bytes(limits.CHUNK_BYTES + 1)),
    ("commit", "meeting_id", b"m"),
    ("commit", "failed_blocks", bytes(limits.CHUNK_BYTES + 1)),
    ("committed", "meeting_id", b"m" * 17),
    ("resolve", "run_id", b""),
    ("resolve", "meeting_id", b""),
    ("outcome", "meeting_id", b""),
    ("outcome", "failed_blocks", bytes(limits.CHUNK_BYTES + 1)),
    ("fetch_request", "signature", b"s"),
    ("contents", "total_bytes", -1),
    ("contents", "sha256", b"d"),
    ("contents", "global_step", limits.STEPS + 1),
    ("contents", "signature", b"s"),
]


@pytest.mark.parametrize(("name", "field", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_no_message_accepts_an_invalid_value(name: str, field: str, value: object) -> None:
    with pytest.raises(BadMessage, match=field.rstrip("s") if field != "data" else "carries"):
        replace(OPENING if name == "opening" else MESSAGES[name], **{field: value})  # type: ignore[arg-type]


CHANGES: dict[str, Any] = {
    "protocol_version": 2,
    "partner_nonce": NONCE,
    "stage": 2,
    "run_id": OTHER_RUN_ID,
    "sender": BOB.peer_id,
    "receiver": ALICE.peer_id,
    "nonce": b"o" * 16,
    "credential": None,
    "records": (),
}
HELLO_CHANGES: dict[str, Any] = CHANGES | {
    "fragment": 0,
    "codec": 3,
    "tokens": 1,
    "global_step": 121,
    "sketch_bytes": 65,
    "payload_bytes": 2001,
    "phase": RunPhase.FINISH,
    "own_steps": 1,
}
REQUEST_CHANGES: dict[str, Any] = CHANGES | {
    "kind": ContentsKind.MANIFEST,
    "offset": 0,
    "num_bytes": 5,
    "fragment": 1,
}
LANE_CHANGES: dict[str, Any] = CHANGES | {"global_step": 121, "phase": RunPhase.FINISH, "window": 3}


@pytest.mark.parametrize(
    ("message", "changes"), [(HELLO, HELLO_CHANGES), (FETCH, REQUEST_CHANGES), (LANE, LANE_CHANGES)], ids=["hello", "request", "lane"]
)
def test_a_signature_covers_every_field(message: Hello | FetchRequest | Lane, changes: dict[str, Any]) -> None:
    assert set(changes) == {field.name for part in (message, message.opening) for field in fields(part)} - {"opening", *message.UNSIGNED}
    message.verify(ALICE.peer_id)
    for field, value in changes.items():
        with pytest.raises(BadSignature):
            changed(message, **{field: value}).verify(ALICE.peer_id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("issuer", BOB.peer_id),
        ("bearer", BOB.peer_id),
        ("not_after_s", 1),
        ("bootstraps_sha256", bytes(32)),
        ("signature", bytes(64)),
        ("bearer_signature", bytes(64)),
    ],
)
def test_a_hello_signature_covers_every_field_of_its_credential(field: str, value: Any) -> None:
    hello = changed(HELLO, credential=replace(CREDENTIAL, **{field: value}))
    with pytest.raises(BadSignature):
        hello.verify(ALICE.peer_id)


def test_a_hello_signature_covers_the_borders_of_records() -> None:
    record = RECORD.to_bytes()
    hello = changed(UNSIGNED_HELLO, records=(record,)).signed(ALICE)
    with pytest.raises(BadSignature):
        changed(hello, records=(record[:100], record[100:])).verify(ALICE.peer_id)


def test_a_signature_by_another_key_is_invalid() -> None:
    with pytest.raises(BadSignature):
        UNSIGNED_HELLO.signed(BOB).verify(ALICE.peer_id)
    with pytest.raises(BadSignature):
        UNSIGNED_HELLO.verify(ALICE.peer_id)


def test_a_commitment_covers_meeting_and_payload() -> None:
    commitment = MESSAGES["commitment"]
    assert isinstance(commitment, Commitment)
    commitment.verify(ALICE.peer_id)
    for other in (replace(commitment, meeting_id=bytes(16)), replace(commitment, sha256=bytes(32))):
        with pytest.raises(BadSignature):
            other.verify(ALICE.peer_id)
    with pytest.raises(BadSignature):
        commitment.verify(BOB.peer_id)


def test_a_refusal_contains_no_control_characters() -> None:
    refusal = Refusal(RefusalCode.BUSY, "two\nlines\x1b[2J\u202e and \ud800 halves")
    assert refusal.detail.isprintable()
    assert refusal.detail.startswith("two lines [2J")


def test_each_error_maps_to_its_refusal() -> None:
    assert refusal_of(Refused(RefusalCode.BUSY, "in a meeting")) == Refusal(RefusalCode.BUSY, "in a meeting")
    for broken in (PeerMisbehaved, BadMessage, BadSignature):
        assert refusal_of(broken("why\n" + "x" * 300)) == Refusal(RefusalCode.BAD_MESSAGE, "why " + "x" * 196)


def contents() -> Contents:
    header = MESSAGES["contents"]
    assert isinstance(header, Contents)
    return header


@pytest.mark.parametrize(
    "change", [{"kind": ContentsKind.MANIFEST}, {"total_bytes": 1}, {"sha256": bytes(32)}, {"global_step": 9}, {"name": bytes(32)}], ids=str
)
def test_a_header_signature_covers_every_field(change: dict[str, Any]) -> None:
    contents().verify(BOB.peer_id, *FETCH.asked)
    for header, signer in ((replace(contents(), **change), BOB), (contents(), ALICE)):
        with pytest.raises(BadSignature):
            header.verify(signer.peer_id, *FETCH.asked)


@pytest.mark.parametrize(
    "change", [{"nonce": b"o" * 16}, {"run_id": OTHER_RUN_ID}, {"sender": BOB.peer_id}], ids=lambda change: next(iter(change))
)
def test_a_reply_cannot_be_replayed_to_another_request(change: dict[str, Any]) -> None:
    with pytest.raises(BadSignature):
        contents().verify(BOB.peer_id, *changed(FETCH, **change).asked)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0, 1000.5, 1.7e308])
def test_an_answer_with_an_impossible_loss_is_rejected(loss: float) -> None:
    with pytest.raises(BadMessage, match="a loss of"):
        HopAnswer(1, loss, 1, 0)
