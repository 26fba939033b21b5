"""An issuer's word that a peer may take part in a run: what an invite carries and a Hello shows.

Checked offline by anybody who knows the manifest's issuers; `terms.py` says which credential a run demands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol import limits
from protocol.identity import Identity, PeerId, signable


@dataclass(frozen=True, slots=True)
class Credential:
    """An issuer's word that a peer may take part in a run."""

    issuer: PeerId  # who gives its word
    subject: PeerId | None  # whom it is for; None: any peer that holds it
    not_after_s: int  # Unix seconds
    bootstraps_sha256: bytes  # 32 bytes; the addresses that travelled with it in the invite
    signature: bytes = b""  # the issuer's, over the run id and the fields above

    def __post_init__(self) -> None:
        limits.need_count("not_after_s", self.not_after_s, limits.UNIX_SECONDS)
        limits.need_length("bootstraps_sha256", self.bootstraps_sha256, limits.DIGEST_BYTES)
        limits.need_signature(self.signature)

    def fields(self) -> bytes:
        """Encode every field, the signature too: what a message that carries this credential signs."""
        return signable(b"gossamer/credential-fields/1", *self._values(), self.signature)

    def signed_bytes(self, run_id: bytes) -> bytes:
        """Return what the issuer signs."""
        return signable(b"gossamer/credential/1", run_id, *self._values())

    def signed(self, identity: Identity, run_id: bytes) -> Credential:
        """Return a copy with the issuer's signature."""
        return replace(self, signature=identity.sign(self.signed_bytes(run_id)))

    def verify(self, run_id: bytes) -> None:
        """Raise BadSignature unless the issuer signed this for this run. Says nothing about whether the issuer counts."""
        self.issuer.verify(self.signature, self.signed_bytes(run_id))

    def _values(self) -> tuple[bytes, bytes, int, bytes]:
        return self.issuer.raw, self.subject.raw if self.subject else b"", self.not_after_s, self.bootstraps_sha256
