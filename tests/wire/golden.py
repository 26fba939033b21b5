"""Golden files: encoded messages in `*.bin` beside this file, so that the wire format does not change by accident.

Keys and nonces are fixed and Ed25519 is deterministic, so all files are reproducible. After an intended change of the wire format, raise
the protocol version and rewrite the files:

    python -m tests.wire.golden --rewrite
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from gossamer.protocol import limits
from gossamer.protocol.messages.frames import to_frame
from gossamer.protocol.messages.messages import Committed
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.wire import peer_pb2
from tests.protocol.samples import (
    ADDRESS,
    ALICE,
    HELLO,
    ISSUER,
    MEETING_ID,
    MESSAGES,
    NOW_S,
    OTHER_RUN_ID,
    RECORD,
    RUN_ID,
    UNSIGNED_HELLO,
    changed,
)

FOLDER = Path(__file__).parent


def golden() -> dict[str, bytes]:
    """Return the content of every file by its name."""
    hello = to_frame(HELLO)
    valid = {f"{name}.bin": to_frame(message) for name, message in MESSAGES.items()}
    return valid | {
        # as frames: refused by from_frame
        "truncated_hello.bin": hello[:-10],
        "oversize_hello.bin": hello + padding(limits.SMALL_FRAME_BYTES),
        "two_bodies.bin": to_frame(Committed(MEETING_ID)) + hello,
        "long_numbers.bin": b"\x12\x03\x08\x81\x00",  # a Refusal whose code 1 is written in two bytes
        "short_nonce_hello.bin": short_nonce(),
        "unsigned_hello.bin": unsigned(),
        # as frames: read, then refused by check_hello
        "wrong_run_hello.bin": to_frame(changed(UNSIGNED_HELLO, run_id=OTHER_RUN_ID).signed(ALICE)),
        "bad_signature_hello.bin": to_frame(replace(HELLO, tokens=HELLO.tokens + 1)),
        # as a frame: from a newer peer, read
        "unknown_field_hello.bin": hello + padding(5),
        # other formats
        "record.bin": RECORD.to_bytes(),
        "manifest.bin": SignedManifest.sign(manifest(), ISSUER).to_bytes(),
        "invite.bin": Invite.issue(ISSUER, RUN_ID, (ADDRESS,), None, NOW_S + 3600).to_text().encode("ascii"),
    }


def manifest() -> Manifest:
    """Return a manifest that depends on no default."""
    return Manifest.from_toml((FOLDER / "manifest.toml").read_text())


def padding(num_bytes: int) -> bytes:
    """Return a field that no version knows (number 15, bytes), large enough to matter."""
    return b"\x7a" + varint(num_bytes) + bytes(num_bytes)


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def short_nonce() -> bytes:
    """Return a hello frame that no message can hold."""
    frame = peer_pb2.Frame.FromString(to_frame(HELLO))
    frame.hello.opening.nonce = frame.hello.opening.nonce[:15]
    return frame.SerializeToString()


def unsigned() -> bytes:
    """Return a hello frame that lacks its signature."""
    frame = peer_pb2.Frame.FromString(to_frame(HELLO))
    frame.hello.signature = b""
    return frame.SerializeToString()


if __name__ == "__main__" and sys.argv[1:] == ["--rewrite"]:
    for name, content in golden().items():
        (FOLDER / name).write_bytes(content)
