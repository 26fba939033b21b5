"""An issuer's word that a peer may take part in a run: what an invite carries and a Hello shows.

It is shown to strangers and lies in the directory, so it must be worth nothing to whoever copies it. A credential names its peer
(`subject`), or it names a key (`bearer`) whose secret never leaves the invite: the invite's holder signs its own PeerId with that key.
Checked offline by anybody who knows the manifest's issuers; `terms.py` says which credential a run demands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.errors import BadMessage, BadSignature
from protocol.identity import Identity, PeerId, signable
from protocol.limits import Checked


@dataclass(frozen=True, slots=True)
class Credential(Checked):
    """An issuer's word for one peer that it names, or for whoever holds the invite's key."""

    issuer: PeerId  # who gives its word
    subject: PeerId | None  # whom it is for; None: whoever holds the bearer key
    bearer: PeerId | None  # public key of the invite; None when a subject is named
    not_after_s: int  # Unix seconds
    bootstraps_sha256: bytes  # 32 bytes; the addresses that travelled with it in the invite
    signature: bytes = b""  # the issuer's, over the run id and the fields above
    bearer_signature: bytes = b""  # the bearer key's, over the run id and the holder's PeerId

    def __post_init__(self) -> None:
        if (self.subject is None) == (self.bearer is None):
            raise BadMessage("a credential names either its subject or its bearer key")
        Checked.__post_init__(self)
        if self.bearer is None and self.bearer_signature:
            raise BadMessage("a credential for a named peer has no bearer signature")

    @property
    def is_complete(self) -> bool:
        """Whether it can be shown: signed by its issuer and, if it is for the holder of an invite, bound to one."""
        return bool(self.signature) and (self.bearer is None or bool(self.bearer_signature))

    def fields(self) -> bytes:
        """Encode every field, the signatures too: what a message that carries this credential signs."""
        return signable(b"gossamer/credential-fields/1", *self._values(), self.signature, self.bearer_signature)

    def signed_bytes(self, run_id: bytes) -> bytes:
        """Return what the issuer signs."""
        return signable(b"gossamer/credential/1", run_id, *self._values())

    def signed(self, identity: Identity, run_id: bytes) -> Credential:
        """Return a copy with the issuer's signature."""
        return replace(self, signature=identity.sign(self.signed_bytes(run_id)))

    def bound(self, bearer: Identity, run_id: bytes, holder: PeerId) -> Credential:
        """Return a copy that is good for `holder`, signed with the secret half of the bearer key."""
        return replace(self, bearer_signature=bearer.sign(_bearer_bytes(run_id, holder)))

    def verify_issuer(self, run_id: bytes) -> None:
        """Raise BadSignature unless the issuer signed this for this run. Says nothing about whether the issuer counts."""
        self.issuer.verify(self.signature, self.signed_bytes(run_id))

    def verify(self, run_id: bytes, holder: PeerId) -> None:
        """Raise BadSignature unless the issuer signed this for this run, and it is good for `holder`."""
        self.verify_issuer(run_id)
        if self.bearer is not None:
            self.bearer.verify(self.bearer_signature, _bearer_bytes(run_id, holder))
        elif self.subject != holder:
            raise BadSignature(f"a credential of {self.subject}, not of {holder}")

    def _values(self) -> tuple[bytes, bytes, bytes, int, bytes]:
        subject, bearer = (peer.raw if peer else b"" for peer in (self.subject, self.bearer))
        return self.issuer.raw, subject, bearer, self.not_after_s, self.bootstraps_sha256


def _bearer_bytes(run_id: bytes, holder: PeerId) -> bytes:
    return signable(b"gossamer/bearer/1", run_id, holder.raw)
