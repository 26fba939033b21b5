"""Asking a peer for a manifest or for its state, and the header of the answer; the bytes follow as chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from protocol import limits
from protocol.credential import Credential
from protocol.identity import Identity, PeerId, signable


class ContentsKind(IntEnum):
    """What a peer can be asked for."""

    MANIFEST = 1  # the signed manifest
    STATE = 2  # slow weights and momentum of every fragment, fp32, in order


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Send me this."""

    protocol_version: int  # of the sender
    run_id: bytes  # 32 bytes
    sender: PeerId  # who asks and signs
    receiver: PeerId  # who is asked
    nonce: bytes  # 16 random bytes of the sender; the answer is signed over them
    kind: ContentsKind  # what is asked for
    credential: Credential | None  # in invite runs
    signature: bytes = b""  # the sender's, over every field above

    def __post_init__(self) -> None:
        limits.need_count("protocol_version", self.protocol_version, limits.VERSIONS)
        limits.need_length("run_id", self.run_id, limits.RUN_ID_BYTES)
        limits.need_length("nonce", self.nonce, limits.NONCE_BYTES)
        limits.need_signature(self.signature)

    def signed_bytes(self) -> bytes:
        """Return what the sender signs: every field but the signature."""
        credential = self.credential.fields() if self.credential else b""
        who = (self.protocol_version, self.run_id, self.sender.raw, self.receiver.raw, self.nonce)
        return signable(b"gossamer/fetch-request/1", *who, int(self.kind), credential)

    def signed(self, identity: Identity) -> FetchRequest:
        """Return a copy with the sender's signature."""
        return replace(self, signature=identity.sign(self.signed_bytes()))

    def verify(self, signer: PeerId) -> None:
        """Raise BadSignature unless `signer` signed this."""
        signer.verify(self.signature, self.signed_bytes())


@dataclass(frozen=True, slots=True)
class Contents:
    """Header of an answer to a FetchRequest."""

    kind: ContentsKind  # as asked
    total_bytes: int  # of the chunks that follow
    sha256: bytes  # 32 bytes; of the chunks' data in order
    clock_steps: int = 0  # of a state: the donor's schedule clock
    signature: bytes = b""  # the donor's, over the request's run, peers and nonce and the fields above

    def __post_init__(self) -> None:
        limits.need_count("total_bytes", self.total_bytes, limits.TRANSFER_BYTES)
        limits.need_length("sha256", self.sha256, limits.DIGEST_BYTES)
        limits.need_count("clock_steps", self.clock_steps, limits.STEPS)
        limits.need_signature(self.signature)

    def signed_bytes(self, request: FetchRequest) -> bytes:
        """Return what the donor signs: the request that it answers, and every field but the signature."""
        asked = (request.run_id, request.sender.raw, request.receiver.raw, request.nonce)
        return signable(b"gossamer/contents/1", *asked, int(self.kind), self.total_bytes, self.sha256, self.clock_steps)

    def signed(self, identity: Identity, request: FetchRequest) -> Contents:
        """Return a copy with the donor's signature."""
        return replace(self, signature=identity.sign(self.signed_bytes(request)))

    def verify(self, signer: PeerId, request: FetchRequest) -> None:
        """Raise BadSignature unless `signer` signed this as an answer to `request`."""
        signer.verify(self.signature, self.signed_bytes(request))
