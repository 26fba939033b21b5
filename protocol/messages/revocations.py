"""Revocations of credentials, signed by their issuers: of one peer, or of one invite by its bearer key.

A revocation is permanent within the run, so a set of revocations only grows. Peers forward the whole set and check each signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.identity import PeerId, Signed
from gossamer.protocol.messages.frames import fill, from_wire, need_signed, parse, read_unframed
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.wire import peer_pb2


@dataclass(frozen=True, slots=True)
class Revocation(Signed):
    """An issuer's revocation of a peer or an invite."""

    CONTEXT = b"gossamer/revocation/1"

    run_id: bytes  # 32 bytes
    issuer: PeerId  # the issuer of the revoked credentials, which signs
    revoked: PeerId  # a peer, the bearer key of an invite, or the name under which the invite is closed
    revoked_s: int  # Unix seconds
    signature: bytes = b""  # the issuer's, over the fields above


class Revocations:
    """A growing set of at most `limits.REVOCATIONS` revocations. The caller of `add` has verified the revocation."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[PeerId, PeerId], Revocation] = {}

    def __iter__(self) -> Iterator[Revocation]:
        return iter(self._by_name.values())

    def add(self, revocation: Revocation) -> bool:
        """Add a revocation. Return False if it is known already or the set is full."""
        name = revocation.issuer, revocation.revoked
        if name in self._by_name or len(self._by_name) >= limits.REVOCATIONS:
            return False
        self._by_name[name] = revocation
        return True

    def has_revoked(self, issuer: PeerId, peer: PeerId) -> bool:
        """Return whether an issuer has revoked this peer by its id: no other invite of that issuer admits it again."""
        return (issuer, peer) in self._by_name

    def cover(self, peer: PeerId, credential: Credential | None) -> bool:
        """Return whether a peer's credential is revoked: by its peer, by its invite, or because its invite is closed."""
        return bool(self._about(peer, credential))

    def shown_to(self, peer: PeerId, credential: Credential | None) -> Revocations:
        """Return the revocations that a peer may read: those that cover the peer if it is revoked, all if it is a member."""
        about = self._about(peer, credential)
        if not about:
            return self
        shown = Revocations()
        for revocation in about:
            shown.add(revocation)
        return shown

    def _about(self, peer: PeerId, credential: Credential | None) -> list[Revocation]:
        names = (peer, credential.bearer, credential.closing) if credential else ()
        found = [self._by_name.get((credential.issuer, name)) for name in names if credential and name]
        return [revocation for revocation in found if revocation]

    def to_bytes(self) -> bytes:
        """Encode the set in sorted order, so that equal sets have equal bytes."""
        wire = peer_pb2.Revocations()
        for name in sorted(self._by_name):
            fill(wire.revocations.add(), self._by_name[name])
        return wire.SerializeToString()

    def digest(self) -> bytes:
        """Return the SHA-256 of the encoded set."""
        return hashlib.sha256(self.to_bytes()).digest()


def read_revocations(data: bytes) -> list[Revocation]:
    """Parse an encoded set. Raises BadMessage. Signatures are not checked: see `terms.check_revocation`."""
    limits.need_count("size of revocations", len(data), limits.CHUNK_BYTES)
    wire = peer_pb2.Revocations()
    parse(wire, data)
    limits.need_count("number of revocations", len(wire.revocations), limits.REVOCATIONS)
    found: list[Revocation] = [from_wire(Revocation, item) for item in wire.revocations]
    for revocation in found:
        need_signed(revocation)
    return found


def need_credential(data: bytes) -> Credential:
    """Parse a credential outside a frame. Raises BadMessage if it is malformed or lacks a signature."""
    credential = read_unframed(Credential, data, "a credential", limits.RECORD_BYTES)
    need_signed(credential)
    return credential
