from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, BadSignature
from gossamer.protocol.run.invite import Credential
from tests.protocol.samples import ALICE, BEARER, BOB, CREDENTIAL, DIGEST, ISSUED, ISSUER, MALLORY, NOW_S, OTHER_RUN_ID, RECORD, RUN_ID

NAMED = Credential(ISSUER.peer_id, ALICE.peer_id, None, NOW_S, DIGEST).signed(ISSUER, RUN_ID)


@pytest.mark.parametrize("credential", [CREDENTIAL, NAMED], ids=["held", "named"])
def test_a_credential_is_valid_only_for_its_run_and_peer(credential: Credential) -> None:
    credential.check(RUN_ID, ALICE.peer_id)
    for run_id, peer_id in [(OTHER_RUN_ID, ALICE.peer_id), (RUN_ID, BOB.peer_id)]:
        with pytest.raises(BadSignature):
            credential.check(run_id, peer_id)


@pytest.mark.parametrize(
    "change",
    [
        {"issuer": MALLORY.peer_id},
        {"bearer": MALLORY.peer_id},
        {"bearer": None, "bearer_signature": b"", "subject": ALICE.peer_id},
        {"not_after_s": 2**33},
        {"bootstraps_sha256": bytes(32)},
        {"signature": b""},
        {"bearer_signature": b""},
        {"bearer_signature": bytes(64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_field_can_be_changed(change: dict[str, Any]) -> None:
    with pytest.raises(BadSignature):
        replace(CREDENTIAL, **change).check(RUN_ID, ALICE.peer_id)


def test_a_credential_signed_by_another_key_is_invalid() -> None:
    with pytest.raises(BadSignature):
        ISSUED.signed(MALLORY, RUN_ID).verify(ISSUER.peer_id, RUN_ID)


def test_binding_requires_the_key_of_the_invite() -> None:
    with pytest.raises(BadSignature):
        ISSUED.bound(MALLORY, RUN_ID, MALLORY.peer_id).check(RUN_ID, MALLORY.peer_id)


def test_a_credential_is_complete_with_all_its_signatures() -> None:
    assert CREDENTIAL.is_complete and NAMED.is_complete
    assert not ISSUED.is_complete
    assert not replace(NAMED, signature=b"").is_complete
    assert ISSUED.bound(BEARER, RUN_ID, ALICE.peer_id).is_complete


@pytest.mark.parametrize(
    "change",
    [
        {"not_after_s": -1},
        {"not_after_s": limits.UNIX_SECONDS + 1},
        {"bootstraps_sha256": b""},
        {"signature": b"s"},
        {"bearer_signature": b"s"},
        {"bearer": None},
        {"subject": BOB.peer_id},
        {"bearer": None, "subject": BOB.peer_id},
    ],
    ids=str,
)
def test_no_credential_accepts_an_invalid_value(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        replace(CREDENTIAL, **change)


def test_different_credentials_have_different_encodings() -> None:
    others = [NAMED, ISSUED, replace(CREDENTIAL, not_after_s=1), replace(CREDENTIAL, signature=bytes(64))]
    assert len({replace(RECORD, credential=credential).signed(ALICE).signature for credential in [CREDENTIAL, *others]}) == 5
