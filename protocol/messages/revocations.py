"""Whose credentials count no more, by the word of those who signed them.

An issuer revokes a name in credentials of its own: a peer's, or an invite's (the bearer key that all who came by it share). What is revoked
stays so for this run, so a set of revocations only grows; peers hand it on, whole, and check each signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import PeerId, Signed
from gossamer.protocol.messages.frames import fill, from_wire, need_signed, parse, read_alone, write_alone
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.wire import peer_pb2


@dataclass(frozen=True, slots=True)
class Revocation(Signed):
    """An issuer takes its word back."""

    CONTEXT = b"gossamer/revocation/1"

    run_id: bytes  # 32 bytes
    issuer: PeerId  # who signed the credentials, and signs this
    revoked: PeerId  # a peer, or the bearer key of an invite
    revoked_s: int  # Unix seconds
    signature: bytes = b""  # the issuer's, over the fields above


class Revocations:
    """A growing set of revocations, at most `limits.REVOCATIONS`. Who adds one has checked it."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[PeerId, PeerId], Revocation] = {}

    def __iter__(self) -> Iterator[Revocation]:
        return iter(self._by_name.values())

    def add(self, revocation: Revocation) -> bool:
        """Take one in; tell whether it says anything new, and there is room."""
        name = revocation.issuer, revocation.revoked
        if name in self._by_name or len(self._by_name) >= limits.REVOCATIONS:
            return False
        self._by_name[name] = revocation
        return True

    def cover(self, peer: PeerId, credential: Credential | None) -> bool:
        """Tell whether a peer's credential counts no more: its issuer has revoked the peer, or the invite by which it came."""
        return bool(self._about(peer, credential))

    def shown_to(self, peer: PeerId, credential: Credential | None) -> Revocations:
        """Return those that cover a peer, where any do; a member may see all."""
        about = self._about(peer, credential)
        if not about:
            return self
        shown = Revocations()
        for revocation in about:
            shown.add(revocation)
        return shown

    def _about(self, peer: PeerId, credential: Credential | None) -> list[Revocation]:
        names = (peer, credential.bearer) if credential else ()
        found = [self._by_name.get((credential.issuer, name)) for name in names if credential and name]
        return [revocation for revocation in found if revocation]

    def to_bytes(self) -> bytes:
        """Return all of them in one order, so that equal sets are equal bytes."""
        wire = peer_pb2.Revocations()
        for name in sorted(self._by_name):
            fill(wire.revocations.add(), self._by_name[name])
        return wire.SerializeToString()

    def digest(self) -> bytes:
        """Return the name of this set: 32 bytes."""
        return hashlib.sha256(self.to_bytes()).digest()


def read_revocations(data: bytes) -> list[Revocation]:
    """Read what `to_bytes` wrote. Raises BadMessage; says nothing about who signed: see `terms.check_revocation`."""
    limits.need_count("size of revocations", len(data), limits.CHUNK_BYTES)
    wire = peer_pb2.Revocations()
    parse(wire, data)
    limits.need_count("number of revocations", len(wire.revocations), limits.REVOCATIONS)
    found: list[Revocation] = [from_wire(Revocation, item) for item in wire.revocations]
    for revocation in found:
        need_signed(revocation)
    return found


def need_credential(data: bytes) -> Credential:
    """Read a credential that travels alone. Raises BadMessage."""
    credential = read_alone(Credential, peer_pb2.Credential(), data, "a credential", limits.RECORD_BYTES)
    if not credential.is_complete:
        raise BadMessage("a credential that lacks a signature")
    return credential


def credential_bytes(credential: Credential) -> bytes:
    """Write a credential that travels alone."""
    return write_alone(peer_pb2.Credential(), credential)
