from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.errors import BadMessage, BadSettings, BadSignature
from gossamer.protocol.identity import Identity, PeerId, Signed, signable
from tests.protocol.samples import ALICE, BOB

fields = st.lists(st.binary(max_size=12) | st.integers(0, 2**64 - 1), max_size=4)

# From the libp2p specification (peer-ids, "Test vectors"): an Ed25519 private key in libp2p's form.
LIBP2P_PRIVATE_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
LIBP2P_PUBLIC_KEY = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")


def test_key_file_and_peer_id_have_libp2ps_format() -> None:
    identity = Identity.from_bytes(LIBP2P_PRIVATE_KEY)
    assert identity.to_bytes() == LIBP2P_PRIVATE_KEY
    assert identity.peer_id.raw == b"\x00\x24" + LIBP2P_PUBLIC_KEY
    assert str(identity.peer_id).startswith("12D3Koo")
    assert len(str(identity.peer_id)) == 52


def test_peer_id_survives_text_and_bytes() -> None:
    for identity in (ALICE, BOB):
        peer_id = identity.peer_id
        assert PeerId.from_text(str(peer_id)) == peer_id
        assert PeerId(peer_id.raw) == peer_id
        assert str(peer_id).endswith(peer_id.short())
        assert len(peer_id.short()) == 6


def test_peer_ids_are_ordered_and_hashable() -> None:
    both = {ALICE.peer_id, BOB.peer_id, PeerId.from_text(str(ALICE.peer_id))}
    assert len(both) == 2
    assert sorted(both) == sorted(both, key=lambda peer_id: peer_id.raw)


@pytest.mark.parametrize("raw", [b"", ALICE.peer_id.raw[:-1], ALICE.peer_id.raw + b"x", b"\x01" + ALICE.peer_id.raw[1:]])
def test_other_bytes_are_no_peer_id(raw: bytes) -> None:
    with pytest.raises(BadMessage, match="peer id"):
        PeerId(raw)


@pytest.mark.parametrize(
    "text",
    ["", "12D3Koo", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "0OIl", str(ALICE.peer_id)[:-1], "1" * 100_000, "12D3Koo\u00e9"],
)
def test_other_text_is_no_peer_id_and_the_hint_explains_the_format(text: str) -> None:
    with pytest.raises(BadSettings, match="is not a peer id") as caught:
        PeerId.from_text(text)
    assert "12D3Koo" in caught.value.hint
    assert len(str(caught.value)) < 200


def test_a_signature_is_valid_only_for_its_signer_and_bytes() -> None:
    signature = ALICE.sign(b"words")
    ALICE.peer_id.verify(signature, b"words")
    for signer, forged, message in [
        (BOB, signature, b"words"),
        (ALICE, signature, b"other words"),
        (ALICE, bytes(64), b"words"),
        (ALICE, b"", b"words"),
        (ALICE, signature + b"x", b"words"),
    ]:
        with pytest.raises(BadSignature):
            signer.peer_id.verify(forged, message)


def test_arbitrary_public_keys_raise_only_bad_signature() -> None:
    generator = random.Random(5)
    for _ in range(50):
        with pytest.raises(BadSignature):
            PeerId(bytes.fromhex("002408011220") + generator.randbytes(32)).verify(generator.randbytes(64), b"words")


@given(fields, fields)
def test_different_tuples_have_different_encodings(one: list[bytes | int], other: list[bytes | int]) -> None:
    if [field if isinstance(field, bytes) else field.to_bytes(8, "little") for field in one] != [
        field if isinstance(field, bytes) else field.to_bytes(8, "little") for field in other
    ]:
        assert signable(b"kind", *one) != signable(b"kind", *other)
    assert signable(b"kind", *one) != signable(b"other kind", *one)


def test_moving_a_byte_across_a_field_border_changes_the_signed_bytes() -> None:
    assert signable(b"kind", b"ab", b"c") != signable(b"kind", b"a", b"bc")
    assert signable(b"kind", b"ab") != signable(b"kinda", b"b")
    assert signable(b"kind", b"") != signable(b"kind")


def test_new_key_file_is_private_and_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    identity = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == identity.to_bytes()
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert os.listdir(path.parent) == ["identity.key"]


def test_two_new_identities_differ(tmp_path: Path) -> None:
    assert Identity.load_or_create(tmp_path / "one").peer_id != Identity.load_or_create(tmp_path / "two").peer_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_key_file_that_others_can_read_is_rejected_with_a_hint(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(BadSettings, match="can be read by other users") as caught:
        Identity.load_or_create(path)
    assert caught.value.hint == f"chmod 600 {path}"
    path.chmod(0o600)
    Identity.load_or_create(path)


@pytest.mark.parametrize(
    "content", [b"", b"not a key", ALICE.to_bytes()[:-1], ALICE.to_bytes() + b"x", ALICE.to_bytes()[:-32] + BOB.to_bytes()[-32:], bytes(68)]
)
def test_damaged_key_file_is_rejected_and_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadSettings, match="is not an identity file") as caught:
        Identity.load_or_create(path)
    assert caught.value.hint
    assert path.read_bytes() == content


def test_folder_in_place_of_a_key_file_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "identity.key"
    folder.mkdir(mode=0o700)
    with pytest.raises(BadSettings, match="cannot use the identity file"):
        Identity.load_or_create(folder)


def test_file_in_place_of_the_home_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(BadSettings, match="cannot use the identity file") as caught:
        Identity.load_or_create(tmp_path / "home" / "identity.key")
    assert "--home" in caught.value.hint


def test_interrupted_write_leaves_no_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadSettings, match="No space left"):
        Identity.load_or_create(tmp_path / "identity.key")
    assert os.listdir(tmp_path) == []


def test_the_private_key_is_never_printed() -> None:
    assert repr(ALICE) == f"Identity({ALICE.peer_id})"
    assert not hasattr(ALICE, "__dict__")


@dataclass(frozen=True, slots=True)
class Sealed(Signed):
    """A signed value whose fields bear the names of parts that other classes leave unsigned."""

    CONTEXT = b"gossamer/test-sealed/1"

    figures: bytes
    bearer_signature: bytes = b""
    signature: bytes = b""


@pytest.mark.parametrize("name", ["figures", "bearer_signature"])
def test_a_signature_covers_every_field_that_its_class_does_not_exclude(name: str) -> None:
    value = Sealed(b"true").signed(ALICE)
    value.verify(ALICE.peer_id)
    with pytest.raises(BadSignature):
        replace(value, **{name: bytes(64)}).verify(ALICE.peer_id)
