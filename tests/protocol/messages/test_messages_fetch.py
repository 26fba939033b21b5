from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from protocol.errors import BadSignature
from protocol.messages.messages import Contents, ContentsKind, FetchRequest
from tests.protocol.samples import ALICE, BOB, FETCH, MESSAGES, OTHER_RUN_ID

CHANGES: dict[str, Any] = {
    "protocol_version": 2,
    "run_id": OTHER_RUN_ID,
    "sender": BOB.peer_id,
    "receiver": ALICE.peer_id,
    "nonce": b"o" * 16,
    "kind": ContentsKind.MANIFEST,
    "credential": None,
}


def contents() -> Contents:
    header = MESSAGES["contents"]
    assert isinstance(header, Contents)
    return header


def test_a_request_signature_covers_every_field() -> None:
    assert set(CHANGES) == {field.name for field in fields(FetchRequest)} - {"signature"}
    FETCH.verify(ALICE.peer_id)
    for field, value in CHANGES.items():
        with pytest.raises(BadSignature):
            replace(FETCH, **{field: value}).verify(ALICE.peer_id)


@pytest.mark.parametrize(
    "change", [{"kind": ContentsKind.MANIFEST}, {"total_bytes": 1}, {"sha256": bytes(32)}, {"clock_steps": 9}], ids=str
)
def test_a_header_signature_covers_every_field(change: dict[str, Any]) -> None:
    contents().verify(BOB.peer_id, FETCH)
    with pytest.raises(BadSignature):
        replace(contents(), **change).verify(BOB.peer_id, FETCH)


@pytest.mark.parametrize(
    "change", [{"nonce": b"o" * 16}, {"run_id": OTHER_RUN_ID}, {"sender": BOB.peer_id}], ids=lambda change: next(iter(change))
)
def test_an_answer_cannot_be_replayed_to_another_request(change: dict[str, Any]) -> None:
    with pytest.raises(BadSignature):
        contents().verify(BOB.peer_id, replace(FETCH, **change))


def test_only_the_donor_signs_its_answer() -> None:
    with pytest.raises(BadSignature):
        contents().verify(ALICE.peer_id, FETCH)
