from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocol import limits
from protocol.errors import BadMessage, BadSignature
from tests.protocol.samples import ALICE, CREDENTIAL, ISSUER, MALLORY, OTHER_RUN_ID, RUN_ID


def test_the_issuers_word_holds_for_its_run() -> None:
    CREDENTIAL.verify(RUN_ID)
    with pytest.raises(BadSignature):
        CREDENTIAL.verify(OTHER_RUN_ID)


@pytest.mark.parametrize(
    "change",
    [{"issuer": MALLORY.peer_id}, {"subject": ALICE.peer_id}, {"not_after_s": 2**33}, {"bootstraps_sha256": bytes(32)}, {"signature": b""}],
    ids=lambda change: next(iter(change)),
)
def test_no_field_can_be_changed(change: dict[str, Any]) -> None:
    with pytest.raises(BadSignature):
        replace(CREDENTIAL, **change).verify(RUN_ID)


def test_nobody_signs_in_the_issuers_name() -> None:
    with pytest.raises(BadSignature):
        replace(CREDENTIAL, issuer=ISSUER.peer_id).signed(MALLORY, RUN_ID).verify(RUN_ID)


@pytest.mark.parametrize(
    "change", [{"not_after_s": -1}, {"not_after_s": limits.UNIX_SECONDS + 1}, {"bootstraps_sha256": b""}, {"signature": b"s"}], ids=str
)
def test_no_credential_can_hold_a_wrong_value(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        replace(CREDENTIAL, **change)


def test_encoded_fields_tell_credentials_apart() -> None:
    others = [replace(CREDENTIAL, subject=ALICE.peer_id), replace(CREDENTIAL, not_after_s=1), replace(CREDENTIAL, signature=bytes(64))]
    assert len({credential.fields() for credential in [CREDENTIAL, *others]}) == 4
