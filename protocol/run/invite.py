"""An invite, one string that lets a peer find a run, check its manifest and take part; and the credential in it, which a Hello shows.

    gossamer1 + base32(Invite message + first 4 bytes of its SHA-256), in lower case, without padding

It survives being pasted: white space, line breaks, quotes and capitals do not matter, and the checksum tells a cut or mistyped
text from a forged one. "gossamer1" cannot be part of the rest, for base32 has no digit 1.

A credential is shown to strangers and lies in the directory, so it must be worth nothing to whoever copies it. It names its peer
(`subject`), and then anybody may see the invite; or it names a key (`bearer`) whose secret never leaves the invite, which is as
secret as the run is private: the invite's holder signs its own PeerId with that key. Bounded offline by anybody who knows the
manifest's issuers; `protocol/messages/terms.py` says which credential a run demands.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Self

from google.protobuf.message import DecodeError

from gossamer.protocol import limits
from gossamer.protocol.addresses import read_address
from gossamer.protocol.errors import BadInvite, BadMessage, BadSignature, WrongVersion
from gossamer.protocol.identity import Identity, PeerId, Signed, signable
from gossamer.protocol.limits import Bounded
from gossamer.protocol.wire import peer_pb2


@dataclass(frozen=True, slots=True)
class Credential(Signed):
    """An issuer's word for one peer that it names, or for whoever holds the invite's key."""

    CONTEXT = b"gossamer/credential/1"

    issuer: PeerId  # who gives its word
    subject: PeerId | None  # whom it is for; None: whoever holds the bearer key
    bearer: PeerId | None  # public key of the invite; beside a subject: by which invite it came, None where it was written for it
    not_after_s: int  # Unix seconds
    bootstraps_sha256: bytes  # 32 bytes; the addresses that travelled with it in the invite
    signature: bytes = b""  # the issuer's, over the run id and the fields above
    bearer_signature: bytes = b""  # the bearer key's, over the run id and the holder's PeerId

    def __post_init__(self) -> None:
        if self.subject is None and self.bearer is None:
            raise BadMessage("a credential names its subject, or its bearer key")
        Bounded.__post_init__(self)
        if self.subject is not None and self.bearer_signature:
            raise BadMessage("a credential for a named peer has no bearer signature")

    @property
    def is_complete(self) -> bool:
        """Whether it can be shown: signed by its issuer and, if it is for the holder of an invite, bound to one."""
        return bool(self.signature) and (self.subject is not None or bool(self.bearer_signature))

    def bound(self, bearer: Identity, run_id: bytes, holder: PeerId) -> Credential:
        """Return a copy that is good for `holder`, signed with the secret half of the bearer key."""
        return replace(self, bearer_signature=bearer.sign(_bearer_bytes(run_id, holder)))

    def check(self, run_id: bytes, holder: PeerId) -> None:
        """Raise BadSignature unless the issuer signed this for this run, and it is good for `holder`."""
        self.verify(self.issuer, run_id)
        if self.subject is None and self.bearer is not None:
            self.bearer.verify(self.bearer_signature, _bearer_bytes(run_id, holder))
        elif self.subject != holder:
            raise BadSignature(f"a credential of {self.subject}, not of {holder}")

    def renewed(self, issuer: Identity, run_id: bytes, holder: PeerId, not_after_s: int) -> Credential:
        """Return one for `holder` alone with another end: it says by which invite it came, and is of no use to others of that invite."""
        lasting = replace(self, subject=holder, not_after_s=not_after_s, signature=b"", bearer_signature=b"")
        return lasting.signed(issuer, run_id)


def _bearer_bytes(run_id: bytes, holder: PeerId) -> bytes:
    return signable(b"gossamer/bearer/1", run_id, holder.raw)


PREFIX: Final = "gossamer1"
_CHECKSUM_BYTES: Final = 4
_PASTED: Final = re.compile(r"[\s\u200b\u2060\ufeff\"'`<>]")  # what mail programs, chats and shells add
_COPY_AGAIN: Final = "copy the whole line that `peer host` or `peer invite` printed"
_ASK_HOST: Final = "ask the host for a new one: `peer invite`"


@dataclass(frozen=True, slots=True)
class Invite:
    """Where a run is, which run it is, and the issuer's word for the holder. Raises BadInvite when made with addresses that cannot be."""

    run_id: bytes  # 32 bytes; the manifest that is fetched must have this hash
    bootstraps: tuple[str, ...]  # 1 to 8 multiaddrs that end in a peer id
    credential: Credential  # as issued: over run, subject or bearer key, date and addresses
    bearer_seed: bytes = field(default=b"", repr=False)  # the secret of the bearer key; empty when a subject is named

    def __post_init__(self) -> None:
        if not 1 <= len(self.bootstraps) <= limits.INVITE_BOOTSTRAPS:
            raise BadInvite(f"an invite with {len(self.bootstraps)} addresses; legal are 1 to {limits.INVITE_BOOTSTRAPS}", hint=_ASK_HOST)
        for address in self.bootstraps:
            try:
                target = read_address(address)
            except ValueError as error:
                raise BadInvite(f"an invite cannot hold {error}", hint=_ASK_HOST) from None
            if target is None:
                raise BadInvite(f"an invite cannot hold {address}: it does not end in /p2p/ and a peer id", hint=_ASK_HOST)

    @classmethod
    def issue(cls, identity: Identity, run_id: bytes, bootstraps: tuple[str, ...], subject: PeerId | None, not_after_s: int) -> Self:
        """Write and sign an invite; `subject` None lets whoever holds it use it. Raises BadInvite for addresses that cannot be.

        The bearer key follows from the issuer's signature over what the invite says, which nobody else can make: no randomness is needed.
        """
        digest = _digest(bootstraps)
        secret = identity.sign(signable(b"gossamer/bearer-seed/1", run_id, not_after_s, digest))
        seed = b"" if subject else hashlib.sha256(secret).digest()
        credential = Credential(identity.peer_id, subject, _bearer(seed), not_after_s, digest).signed(identity, run_id)
        return cls(run_id, bootstraps, credential, seed)

    def credential_for(self, holder: PeerId) -> Credential:
        """Return what the holder of this invite shows to other peers: its credential, bound to `holder`."""
        return self.credential.bound(Identity(self.bearer_seed), self.run_id, holder) if self.bearer_seed else self.credential

    def to_text(self) -> str:
        """Return the one line that people pass on."""
        wire = peer_pb2.Invite(
            run_id=self.run_id,
            issuer=self.credential.issuer.raw,
            subject=self.credential.subject.raw if self.credential.subject else b"",
            bearer_seed=self.bearer_seed,
            not_after_s=self.credential.not_after_s,
            bootstraps=self.bootstraps,
            signature=self.credential.signature,
        )
        payload = wire.SerializeToString()
        return PREFIX + base64.b32encode(payload + _checksum(payload)).decode("ascii").rstrip("=").lower()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read an invite and check that its issuer signed it. Raises BadInvite or WrongVersion.

        Whether it is in force and meant for us is `check`; whether its issuer counts, only the manifest tells.
        """
        payload = _unchecked(_PASTED.sub("", text[: 2 * limits.INVITE_CHARS]).lower())
        wire = peer_pb2.Invite()
        try:
            wire.ParseFromString(payload)
            return cls._from_wire(wire)
        except (DecodeError, BadMessage) as error:
            raise BadInvite(f"the invite is whole but makes no sense: {error}", hint=_ASK_HOST) from None
        except BadSignature:
            raise BadInvite("the invite is not signed by the peer that it names as its issuer", hint=_ASK_HOST) from None

    @classmethod
    def _from_wire(cls, wire: peer_pb2.Invite) -> Self:
        limits.need_length("run_id", wire.run_id, limits.RUN_ID_BYTES)
        bootstraps = tuple(wire.bootstraps)
        if wire.subject and wire.bearer_seed:
            raise BadMessage("an invite is for one peer, or for anybody")
        issuer, subject = PeerId(wire.issuer), PeerId(wire.subject) if wire.subject else None
        bearer = _bearer(wire.bearer_seed)
        credential = Credential(issuer, subject, bearer, wire.not_after_s, _digest(bootstraps), wire.signature)
        credential.verify(issuer, wire.run_id)
        return cls(wire.run_id, bootstraps, credential, wire.bearer_seed)

    def check(self, me: PeerId, now_s: float) -> None:
        """Raise BadInvite unless this invite is in force and `me` may use it."""
        if self.credential.not_after_s <= now_s:
            until = datetime.fromtimestamp(self.credential.not_after_s, UTC)
            raise BadInvite(f"the invite expired on {until:%Y-%m-%d at %H:%M} UTC", hint=_ASK_HOST)
        if self.credential.subject not in (None, me):
            raise BadInvite(
                f"the invite is for {self.credential.subject}, this peer is {me}",
                hint="use the home folder of that peer (--home), or ask the host for an invite for this one",
            )


def _unchecked(text: str) -> bytes:
    """Return the payload of a cleaned text whose checksum is right."""
    if not text.startswith(PREFIX):
        if re.match(r"gossamer[02-9]", text):
            raise WrongVersion("the invite was written by another release of Gossamer", hint="install the release that the run's host uses")
        raise BadInvite("this is not an invite: an invite starts with gossamer1", hint=_COPY_AGAIN)
    if len(text) > limits.INVITE_CHARS:
        raise BadInvite(f"this is not an invite: it has more than {limits.INVITE_CHARS} characters", hint=_COPY_AGAIN)
    body = text.removeprefix(PREFIX)
    strange = re.search(r"[^a-z2-7]", body)
    if strange:
        raise BadInvite(f"the invite is mistyped: {strange[0]!r} does not occur in invites", hint=_COPY_AGAIN)
    try:
        data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
    except binascii.Error:
        raise BadInvite("the invite is cut", hint=_COPY_AGAIN) from None
    payload, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not payload or checksum != _checksum(payload):
        raise BadInvite("the invite is cut or mistyped: its checksum is wrong", hint=_COPY_AGAIN)
    return payload


def _bearer(seed: bytes) -> PeerId | None:
    if not seed:
        return None
    limits.need_length("bearer_seed", seed, limits.SEED_BYTES)
    return Identity(seed).peer_id


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:_CHECKSUM_BYTES]


def _digest(bootstraps: tuple[str, ...]) -> bytes:
    return hashlib.sha256(signable(b"gossamer/bootstraps/1", *(address.encode() for address in bootstraps))).digest()
