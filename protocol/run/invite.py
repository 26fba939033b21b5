"""Invites and credentials. An invite is one string with which a peer finds a run, verifies its manifest and joins.

    gossamer1 + base32(Invite message + first 4 bytes of its SHA-256), in lower case, without padding

White space, line breaks, quotes and capitals in a pasted invite do not matter. The checksum distinguishes a mistyped text from a forged
one.

Peers present the invite's credential to strangers. A copied credential is useless: it names either its peer (`subject`), or a key
(`bearer`) whose secret half is only in the invite, with which the holder signs its own PeerId. Such an invite must be kept as private as
the run.
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

FOR_THE_RUN: Final = limits.UNIX_SECONDS  # expiry date of a credential that lasts until it is revoked


@dataclass(frozen=True, slots=True)
class Credential(Signed):
    """An issuer's signed permission to take part in a run, for one named peer or for the holder of a bearer key."""

    CONTEXT = b"gossamer/credential/1"
    UNSIGNED = (*Signed.UNSIGNED, "bearer_signature")

    issuer: PeerId
    subject: PeerId | None  # the named peer; None: the holder of the bearer key
    bearer: PeerId | None  # public key of the invite; with a subject: of the invite with which the peer joined
    not_after_s: int  # expiry date, Unix seconds
    bootstraps_sha256: bytes  # 32 bytes; digest of the bootstrap addresses in the invite
    signature: bytes = b""  # the issuer's, over the run id and the fields above
    bearer_signature: bytes = b""  # the bearer key's, over the run id and the holder's PeerId

    def __post_init__(self) -> None:
        if self.subject is None and self.bearer is None:
            raise BadMessage("a credential must name its subject or its bearer key")
        Bounded.__post_init__(self)
        if self.subject is not None and self.bearer_signature:
            raise BadMessage("a credential for a named peer must not have a bearer signature")

    @property
    def is_complete(self) -> bool:
        """Whether it can be presented: its issuer has signed it, and a bearer credential is bound to its holder."""
        return bool(self.signature) and (self.subject is not None or bool(self.bearer_signature))

    @property
    def name(self) -> PeerId:
        """The name under which an issuer revokes an invite with this credential: the named peer, or the bearer key."""
        name = self.subject or self.bearer
        assert name is not None  # __post_init__
        return name

    @property
    def closing(self) -> PeerId | None:
        """The name under which an issuer revokes what rests on an invite for anybody alone; None for a named peer's credential."""
        return closing_of(self.bearer) if self.subject is None and self.bearer is not None else None

    def bound(self, bearer: Identity, run_id: bytes, holder: PeerId) -> Credential:
        """Return a copy that is valid for `holder`, signed with the secret half of the bearer key."""
        return replace(self, bearer_signature=bearer.sign(_bearer_bytes(run_id, holder)))

    def check(self, run_id: bytes, holder: PeerId) -> None:
        """Raise BadSignature unless the issuer signed this credential for this run and it is valid for `holder`."""
        self.verify(self.issuer, run_id)
        if self.subject is None and self.bearer is not None:
            self.bearer.verify(self.bearer_signature, _bearer_bytes(run_id, holder))
        elif self.subject != holder:
            raise BadSignature(f"a credential for {self.subject}, not for {holder}")

    def named(self, issuer: Identity, run_id: bytes, holder: PeerId) -> Credential:
        """Return a credential for `holder` alone that lasts for the run. It keeps the bearer key, so that the invite can be revoked."""
        return replace(self, subject=holder, not_after_s=FOR_THE_RUN, signature=b"", bearer_signature=b"").signed(issuer, run_id)


def _bearer_bytes(run_id: bytes, holder: PeerId) -> bytes:
    return signable(b"gossamer/bearer/1", run_id, holder.raw)


def closing_of(bearer: PeerId) -> PeerId:
    """Return the name under which the invite with this bearer key is closed: no peer joins by it any more, named members stay."""
    return PeerId.derived(b"gossamer/closed-invite/1", bearer.raw)


PREFIX: Final = "gossamer1"
LINK: Final = "gossamer:"  # before an invite: the scheme of a link
_CHECKSUM_BYTES: Final = 4
_PASTED: Final = re.compile(r"[\s\u200b\u2060\ufeff\"'`<>]")  # characters that mail programs, chats and shells add
_COPY_AGAIN: Final = "copy the whole line that `peer host` or `peer invite` printed"
_ASK_HOST: Final = "ask the host for a new one: `peer invite`"


@dataclass(frozen=True, slots=True)
class Invite:
    """A run's id, its bootstrap addresses, and a credential for the holder. Raises BadInvite for invalid addresses."""

    run_id: bytes  # 32 bytes; the fetched manifest must have this hash
    bootstraps: tuple[str, ...]  # 1 to 8 multiaddrs that end in a peer id
    credential: Credential  # as issued, not yet bound to a holder
    bearer_seed: bytes = field(default=b"", repr=False)  # secret half of the bearer key; empty if a subject is named

    def __post_init__(self) -> None:
        if not 1 <= len(self.bootstraps) <= limits.INVITE_BOOTSTRAPS:
            raise BadInvite(
                f"an invite with {len(self.bootstraps)} addresses; it must have 1 to {limits.INVITE_BOOTSTRAPS}", hint=_ASK_HOST
            )
        for address in self.bootstraps:
            try:
                if read_address(address) is None:
                    raise ValueError(f"{address} does not end in /p2p/<peer id>")
            except ValueError as error:
                raise BadInvite(f"an invite with an invalid address: {error}", hint=_ASK_HOST) from None

    @classmethod
    def issue(cls, identity: Identity, run_id: bytes, bootstraps: tuple[str, ...], subject: PeerId | None, not_after_s: int) -> Self:
        """Create and sign an invite, for any holder if `subject` is None. Only the issuer can derive the bearer key. Raises BadInvite."""
        digest = _digest(bootstraps)
        secret = identity.sign(signable(b"gossamer/bearer-seed/1", run_id, not_after_s, digest))
        seed = b"" if subject else hashlib.sha256(secret).digest()
        credential = Credential(identity.peer_id, subject, _bearer(seed), not_after_s, digest).signed(identity, run_id)
        return cls(run_id, bootstraps, credential, seed)

    def credential_for(self, holder: PeerId) -> Credential:
        """Return the credential that the holder of this invite presents, bound to `holder`."""
        return self.credential.bound(Identity(self.bearer_seed), self.run_id, holder) if self.bearer_seed else self.credential

    def to_text(self) -> str:
        """Return the invite as one line of text."""
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

    def to_link(self) -> str:
        """Return the invite as a link, which a page or a QR code shows."""
        return f"{LINK}{self.to_text()}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse an invite, or its link, and verify its issuer's signature. Expiry and subject: see `check`.

        Raises BadInvite or WrongVersion.
        """
        cleaned = _PASTED.sub("", text[: 2 * limits.INVITE_CHARS]).lower()
        payload = _unchecked(cleaned.removeprefix(LINK))
        wire = peer_pb2.Invite()
        try:
            wire.ParseFromString(payload)
            return cls._from_wire(wire)
        except (DecodeError, BadMessage) as error:
            raise BadInvite(f"the invite has a correct checksum but invalid content: {error}", hint=_ASK_HOST) from None
        except BadSignature:
            raise BadInvite("the invite's signature is not by its issuer", hint=_ASK_HOST) from None

    @classmethod
    def _from_wire(cls, wire: peer_pb2.Invite) -> Self:
        limits.need_length("run_id", wire.run_id, limits.RUN_ID_BYTES)
        bootstraps = tuple(wire.bootstraps)
        if wire.subject and wire.bearer_seed:
            raise BadMessage("an invite with both a subject and a bearer key")
        issuer, subject = PeerId(wire.issuer), PeerId(wire.subject) if wire.subject else None
        bearer = _bearer(wire.bearer_seed)
        credential = Credential(issuer, subject, bearer, wire.not_after_s, _digest(bootstraps), wire.signature)
        credential.verify(issuer, wire.run_id)
        return cls(wire.run_id, bootstraps, credential, wire.bearer_seed)

    def check(self, me: PeerId, now_s: float) -> None:
        """Raise BadInvite if the invite has expired at `now_s` (Unix time) or is for another peer than `me`."""
        if self.credential.not_after_s <= now_s:
            until = datetime.fromtimestamp(self.credential.not_after_s, UTC)
            raise BadInvite(f"the invite expired on {until:%Y-%m-%d at %H:%M} UTC", hint=_ASK_HOST)
        if self.credential.subject not in (None, me):
            raise BadInvite(
                f"the invite is for {self.credential.subject}, but this peer is {me}",
                hint="use the home folder of that peer (--home), or ask the host for an invite for this one",
            )


def _unchecked(text: str) -> bytes:
    """Return the payload of a cleaned text after checking its checksum. Raises BadInvite or WrongVersion."""
    if not text.startswith(PREFIX):
        if re.match(r"gossamer[02-9]", text):
            raise WrongVersion("the invite was created by another release of Gossamer", hint="install the release that the run's host uses")
        raise BadInvite("this is not an invite: an invite starts with gossamer1", hint=_COPY_AGAIN)
    if len(text) > limits.INVITE_CHARS:
        raise BadInvite(f"this is not an invite: it is longer than {limits.INVITE_CHARS} characters", hint=_COPY_AGAIN)
    body = text.removeprefix(PREFIX)
    strange = re.search(r"[^a-z2-7]", body)
    if strange:
        raise BadInvite(f"the invite is mistyped: an invite cannot contain {strange[0]!r}", hint=_COPY_AGAIN)
    try:
        data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
    except binascii.Error:
        raise BadInvite("the invite is truncated", hint=_COPY_AGAIN) from None
    payload, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not payload or checksum != _checksum(payload):
        raise BadInvite("the invite is truncated or mistyped: its checksum is wrong", hint=_COPY_AGAIN)
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
