"""Frozen files: every later release that supports a protocol version must read these bytes. They are never rewritten.

`release_1` has protocol version 1. A change of its files would break peers of that release: it needs another protocol version, and a
folder of its own.
"""

from __future__ import annotations

from pathlib import Path

from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.limits import FINE_TUNING_PROTOCOL, PROGRAM_PROTOCOL, SPOKEN, STAGES_PROTOCOL, TEXT_PROTOCOL
from gossamer.protocol.messages.frames import from_frame
from gossamer.protocol.messages.messages import Contents, ContentsKind, FetchRequest, Refusal
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest

FOLDER = Path(__file__).parent / "release_1"
RUN_ID = bytes.fromhex("d309fb667a34d6619802602ac68cb939809ca3ebd35aa9542cb2251ad9d4b762")


def stored(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def test_this_build_supports_runs_of_four_kinds() -> None:
    kinds = (TEXT_PROTOCOL, PROGRAM_PROTOCOL, FINE_TUNING_PROTOCOL, STAGES_PROTOCOL)
    assert kinds == (1, 2, 3, 4), "a change that an older peer cannot read takes the next free number"
    assert kinds == SPOKEN, "and the versions before stay spoken"


def test_the_manifest_of_a_newer_release_of_the_same_protocol_is_parsed() -> None:
    """Its file has a key and a table that this build does not know."""
    signed = SignedManifest.from_bytes(stored("manifest_of_a_newer_release.bin"), RUN_ID)
    manifest = signed.manifest()
    assert manifest.run_id == RUN_ID and manifest.run.name == "frozen" and manifest.run.protocol == 1
    assert SignedManifest.from_bytes(signed.to_bytes(), RUN_ID) == signed, "handed on as it came"


def test_the_first_messages_of_an_old_release_decode() -> None:
    invite = Invite.from_text(stored("invite.txt").decode("ascii"))
    invite.credential.verify(invite.credential.issuer, invite.run_id)
    request, contents, refusal = (from_frame(stored(f"{name}.bin")) for name in ("fetch_request", "contents", "refusal"))
    assert isinstance(request, FetchRequest) and request.protocol_version == 1
    request.verify(request.sender)
    assert isinstance(contents, Contents) and contents.kind is ContentsKind.STATE
    contents.verify(request.receiver, *request.asked)
    assert refusal == Refusal(RefusalCode.STEP_TOO_FAR, "300 steps apart")
