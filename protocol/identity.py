"""Peer identity: one Ed25519 key pair, in libp2p's formats. The public key is the peer's id in libp2p, directory and signatures."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gossamer.protocol.errors import BadMessage, BadSettings, BadSignature
from gossamer.protocol.limits import SEED_BYTES, Bounded, field_names

PEER_ID_BYTES = 38
NUM_REMEMBERED = 1024  # cache size for text forms of peer ids, and for verified signatures
_PEER_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash of PublicKey{Type=Ed25519, Data=32 bytes}
_PEER_ID_CHARS = 64  # 38 bytes take 52 characters; longer text is rejected without decoding
_KEY_FILE_PREFIX = bytes.fromhex("08011240")  # PrivateKey{Type=Ed25519, Data=64 bytes: seed, then public key}
_KEY_FILE_BYTES = len(_KEY_FILE_PREFIX) + 2 * SEED_BYTES


def signable(context: bytes, *fields: bytes | int) -> bytes:
    """Encode fields for signing, injectively: different tuples give different bytes.

    `context` names the message type and its version, so that a signature over one type is never valid for another. Every field,
    including the context, is preceded by its length (u32, little-endian). A number is 8 bytes, little-endian.
    """
    parts = [field if isinstance(field, bytes) else field.to_bytes(8, "little") for field in (context, *fields)]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def short_id(text: str) -> str:
    """Return the last six characters of a peer id in text form. The first characters are the same for all peers."""
    return text[-6:]


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """A peer's public id: libp2p's PeerId of an Ed25519 key. Ordered and hashed by its bytes. Raises BadMessage for other bytes."""

    raw: bytes  # 38 bytes: a constant prefix and the public key

    def __post_init__(self) -> None:
        if len(self.raw) != PEER_ID_BYTES or not self.raw.startswith(_PEER_ID_PREFIX):
            raise BadMessage(f"a peer id must be {PEER_ID_BYTES} bytes of an Ed25519 key, not {len(self.raw)} bytes")

    def __str__(self) -> str:
        return _text(self.raw)

    @classmethod
    def derived(cls, context: bytes, *fields: bytes) -> PeerId:
        """Return a name in the form of an id that everybody can derive and that belongs to no key."""
        return cls(_PEER_ID_PREFIX + hashlib.sha256(signable(context, *fields)).digest())

    def short(self) -> str:
        """Return a short label for logs and screens."""
        return short_id(str(self))

    @classmethod
    def of_public_key(cls, raw: bytes) -> PeerId:
        """Return the id of an Ed25519 key, 32 bytes."""
        return cls(_PEER_ID_PREFIX + raw)

    @classmethod
    def from_text(cls, text: str) -> PeerId:
        """Parse the text form, "12D3Koo...". Raises BadSettings, because the text comes from an operator."""
        try:
            if len(text) > _PEER_ID_CHARS:
                raise ValueError("too long")
            return cls(base58.b58decode(text))
        except (ValueError, BadMessage):
            shown = text if len(text) <= _PEER_ID_CHARS else text[:_PEER_ID_CHARS] + "..."
            raise BadSettings(
                f"{shown!r} is not a peer id", hint="a peer id has 52 characters and starts with 12D3Koo; `peer id` prints your own"
            ) from None

    def verify(self, signature: bytes, message: bytes) -> None:
        """Raise BadSignature unless `signature` is this peer's signature over exactly `message`."""
        try:
            _verify(self.raw[len(_PEER_ID_PREFIX) :], signature, message)
        except (InvalidSignature, ValueError):
            raise BadSignature(f"not signed by {self}") from None


@lru_cache(NUM_REMEMBERED)
def _text(raw: bytes) -> str:
    return base58.b58encode(raw).decode("ascii")


@lru_cache(NUM_REMEMBERED)
def _verify(key: bytes, signature: bytes, message: bytes) -> None:
    """Raise unless the key signed this message. Cached, because partners present the same credentials in every meeting."""
    Ed25519PublicKey.from_public_bytes(key).verify(signature, message)


class Signed(Bounded):
    """A dataclass that a peer signs: CONTEXT, then `about` (known to both sides, not sent), then every field but those of UNSIGNED."""

    __slots__ = ()
    CONTEXT: ClassVar[bytes]
    UNSIGNED: ClassVar[tuple[str, ...]] = ("signature",)  # fields that the signature does not cover; a class with more extends it
    signature: bytes

    @property
    def is_complete(self) -> bool:
        """Whether it has every signature that another peer checks."""
        return bool(self.signature)

    def signed(self, identity: Identity, *about: bytes) -> Self:
        """Return a copy that is signed by `identity`."""
        return replace(self, signature=identity.sign(self._signed_bytes(about)))  # type: ignore[type-var]

    def verify(self, signer: PeerId, *about: bytes) -> None:
        """Raise BadSignature unless `signer` signed this value together with `about`."""
        signer.verify(self.signature, self._signed_bytes(about))

    def _signed_bytes(self, about: tuple[bytes, ...]) -> bytes:
        return signable(self.CONTEXT, *about, *_signables(self, self.UNSIGNED))


def _signables(value: Bounded, without: tuple[str, ...] = ()) -> list[bytes | int]:
    return [_signable(name, getattr(value, name)) for name in field_names(type(value)) if name not in without]


def _signable(name: str, value: Any) -> bytes | int:
    match value:
        case bytes() | int():
            return value
        case str():
            return value.encode("ascii")
        case PeerId():
            return value.raw
        case tuple():
            return signable(name.encode("ascii"), *(_signable(name, item) for item in value))
        case Bounded():  # with the signatures in it
            return signable(type(value).__name__.encode("ascii"), *_signables(value))
    return b""  # None


class Identity:
    """A peer's private key. Immutable and thread-safe."""

    __slots__ = ("_key", "peer_id")

    peer_id: PeerId

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer_id = PeerId.of_public_key(self._key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def sign(self, message: bytes) -> bytes:
        """Return this peer's signature (64 bytes) over a message made with `signable`."""
        return self._key.sign(message)

    def to_bytes(self) -> bytes:
        """Return the content of a key file: libp2p's PrivateKey message. It is secret."""
        return _KEY_FILE_PREFIX + self._key.private_bytes_raw() + self._key.public_key().public_bytes_raw()

    @classmethod
    def from_bytes(cls, content: bytes) -> Identity:
        """Parse the content of a key file. Raises ValueError if it is malformed or its public key does not match its private key."""
        if len(content) != _KEY_FILE_BYTES or not content.startswith(_KEY_FILE_PREFIX):
            raise ValueError("not a libp2p Ed25519 key file")
        seed_end = len(_KEY_FILE_PREFIX) + SEED_BYTES
        identity = cls(content[len(_KEY_FILE_PREFIX) : seed_end])
        if identity.to_bytes() != content:
            raise ValueError("its public key does not match its private key")
        return identity

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file, or create one atomically with mode 0600. Raises BadSettings if it is unusable or other users can read it."""
        try:
            if not path.exists():
                _write_private(path, cls(os.urandom(SEED_BYTES)).to_bytes())
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise BadSettings(f"the identity file {path} can be read by other users", hint=f"chmod 600 {path}")
            return cls.from_bytes(path.read_bytes())
        except ValueError as error:
            raise BadSettings(
                f"{path} is not an identity file: {error}", hint="restore it from a copy, or move it away to start with a new identity"
            ) from error
        except OSError as error:
            raise BadSettings(
                f"cannot use the identity file {path}: {error.strerror}",
                hint="choose another home folder with --home, or fix its permissions",
            ) from error


def _write_private(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def need_private(folder: Path, what: str) -> None:
    """Raise BadSettings unless the current user owns `folder` and no other user may enter it. `what` names it in the message."""
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise BadSettings(f"{what} {folder} belongs to another user", hint="choose a folder of your own, or run as the user who owns it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise BadSettings(f"other users may enter {what} {folder}", hint=f"chmod 700 {folder}, or choose another folder")
