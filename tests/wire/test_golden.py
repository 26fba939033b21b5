from __future__ import annotations

import pytest

from gossamer.protocol.errors import BadMessage, BadSignature, RefusalCode, Refused
from gossamer.protocol.messages.frames import from_frame, to_frame
from gossamer.protocol.messages.messages import Hello
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import check_hello
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest
from tests.protocol.samples import ALICE, BOB, HELLO, MESSAGES, NOW_S, RECORD, RUN_ID, TERMS
from tests.wire.golden import FOLDER, golden, manifest


def stored(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def hello_in(name: str) -> Hello:
    message = from_frame(stored(name))
    assert isinstance(message, Hello)
    return message


def test_every_file_equals_todays_encoding() -> None:
    assert {path.name for path in FOLDER.glob("*.bin")} == set(golden())
    for name, content in golden().items():
        assert stored(name) == content, f"the wire has changed: {name}; if that is meant, see golden.py"


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_decodes_from_its_file(name: str) -> None:
    assert from_frame(stored(f"{name}.bin")) == MESSAGES[name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("truncated_hello.bin", "not a Frame"),
        ("oversize_hello.bin", "at most 8192 are read"),
        ("two_bodies.bin", "re-encodes to"),
        ("long_numbers.bin", "re-encodes to"),
        ("short_nonce_hello.bin", "nonce has 15 bytes, not 16"),
        ("unsigned_hello.bin", "without a signature"),
    ],
)
def test_malformed_frames_are_rejected(name: str, reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        from_frame(stored(name))


def test_a_hello_of_another_run_is_refused_with_its_code() -> None:
    with pytest.raises(Refused) as caught:
        check_hello(hello_in("wrong_run_hello.bin"), TERMS, BOB.peer_id, ALICE.peer_id, NOW_S)
    assert caught.value.code is RefusalCode.WRONG_RUN


def test_a_hello_with_a_changed_field_is_misbehaviour() -> None:
    with pytest.raises(BadSignature):
        check_hello(hello_in("bad_signature_hello.bin"), TERMS, BOB.peer_id, ALICE.peer_id, NOW_S)


def test_unknown_field_of_a_newer_peer_is_dropped() -> None:
    hello = hello_in("unknown_field_hello.bin")
    assert hello == HELLO
    assert to_frame(hello) == stored("hello.bin")
    check_hello(hello, TERMS, BOB.peer_id, ALICE.peer_id, NOW_S)


def test_record_manifest_and_invite_decode_from_their_files() -> None:
    assert MemberRecord.from_bytes(stored("record.bin")) == RECORD
    assert SignedManifest.from_bytes(stored("manifest.bin"), manifest().run_id).manifest() == manifest()
    assert Invite.from_text(stored("invite.bin").decode("ascii")).run_id == RUN_ID
