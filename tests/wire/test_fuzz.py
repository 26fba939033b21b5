"""Every decoder of the wire, on seeded mutations of valid bytes: it returns, or raises an error that is declared for its source."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Callable

import pytest

from gossamer.protocol.errors import BadInvite, BadManifest, PeerMisbehaved, Refused, WrongVersion
from gossamer.protocol.messages.frames import from_frame, write_unframed
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.replies import PeerList
from gossamer.protocol.messages.revocations import Revocation, Revocations, need_credential, read_revocations
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.mutations import mutated_bytes, mutated_json
from tests.processor_time import takes_at_most
from tests.protocol.samples import ALICE, CREDENTIAL, ISSUER, MESSAGES, RUN_ID
from tests.wire.golden import FOLDER

NUM_MUTATIONS = 400
MOST_S = 0.05  # of processor time for one of them

OF_PARTNERS = (PeerMisbehaved, Refused)
OF_MANIFESTS = (BadManifest, WrongVersion)
DECODERS: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = {
    "frame": (from_frame, OF_PARTNERS),
    "record": (MemberRecord.from_bytes, OF_PARTNERS),
    "manifest": (lambda data: SignedManifest.from_bytes(data, RUN_ID), OF_PARTNERS),
    "canonical": (Manifest.from_canonical, OF_MANIFESTS),
    "toml": (lambda data: Manifest.from_toml(data.decode(errors="replace")), OF_MANIFESTS),
    "invite": (lambda data: Invite.from_text(data.decode(errors="replace")), (BadInvite, WrongVersion)),
    "revocations": (read_revocations, OF_PARTNERS),
    "credential": (need_credential, OF_PARTNERS),
    "peer list": (PeerList.from_bytes, OF_PARTNERS),
}


def check(name: str, data: bytes) -> bool:
    """Decode; return whether that worked. Any other error, or one that takes long, fails the test."""
    decode, declared = DECODERS[name]
    is_read = True

    def call() -> None:
        nonlocal is_read
        try:
            decode(data)
        except declared:
            is_read = False

    assert takes_at_most(MOST_S, call), (name, data[:200])
    return is_read


def with_checksum(payload: bytes) -> bytes:
    checked = payload + hashlib.sha256(payload).digest()[:4]
    return b"gossamer1" + base64.b32encode(checked).rstrip(b"=").lower()


def invite_payload() -> bytes:
    body = (FOLDER / "invite.bin").read_text().removeprefix("gossamer1").upper()
    return base64.b32decode(body + "=" * (-len(body) % 8))[:-4]


def valid(name: str) -> list[bytes]:
    """Return what a decoder reads, as a start for mutations."""
    revocations = Revocations()
    for revoked in (ALICE.peer_id, ISSUER.peer_id):
        revocations.add(Revocation(RUN_ID, ISSUER.peer_id, revoked, 1).signed(ISSUER))
    manifest = SignedManifest.from_bytes((FOLDER / "manifest.bin").read_bytes())
    return {
        "frame": [(FOLDER / f"{message}.bin").read_bytes() for message in MESSAGES],
        "record": [(FOLDER / "record.bin").read_bytes()],
        "manifest": [manifest.to_bytes()],
        "canonical": [manifest.canonical],
        "toml": [(FOLDER / "manifest.toml").read_bytes()],
        "invite": [(FOLDER / "invite.bin").read_bytes()],
        "revocations": [revocations.to_bytes()],
        "credential": [write_unframed(CREDENTIAL)],
        "peer list": [PeerList(((FOLDER / "record.bin").read_bytes(),) * 3, 5).to_bytes()],
    }[name]


@pytest.mark.parametrize("name", DECODERS)
def test_mutated_bytes_end_in_a_declared_error_or_are_read(name: str) -> None:
    rng, samples = random.Random(name), valid(name)
    for _ in range(NUM_MUTATIONS):
        check(name, mutated_bytes(rng.choice(samples), rng))
        check(name, rng.randbytes(rng.randrange(200)))


def test_mutated_values_of_a_manifest_end_in_a_declared_error_or_are_read() -> None:
    rng, (canonical,) = random.Random(1), valid("canonical")
    read = [check("canonical", mutated_json(canonical.decode(), rng).encode()) for _ in range(NUM_MUTATIONS)]
    assert 0 < sum(read) < NUM_MUTATIONS


def test_mutated_invites_with_a_correct_checksum_end_in_a_declared_error() -> None:
    rng, payload = random.Random(2), invite_payload()
    assert check("invite", with_checksum(payload))
    for _ in range(NUM_MUTATIONS):
        check("invite", with_checksum(mutated_bytes(payload, rng)))
