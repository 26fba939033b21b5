"""What a manifest implies for the wire, and the checks of everything that opens a conversation.

Each check raises the first thing that is wrong. `Refused` is nobody's fault: another run, another version, no invitation, too far
apart. `BadMessage` and `BadSignature` are the partner's fault: it addressed somebody else, or lied about who it is. What to tell
the partner in either case is `messages.refusal_of`. Pure functions: the time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from gossamer.protocol.errors import BadMessage, BadSignature, RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import ContentsKind, FetchRequest, Hello, RunPhase
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.revocations import Revocation, Revocations
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import Access


@dataclass(frozen=True, slots=True)
class FragmentTerms:
    """The sizes that manifest and model imply for a meeting on one fragment."""

    sketch_bytes: int  # 0: the codec has no sketch
    payload_bytes: int  # of each side's payload
    num_blocks: int  # blocks that can fail to decode

    @property
    def slow_bytes(self) -> int:
        """Return the size of a fragment's slow weights as somebody pulls them: what each side sends in a meeting, too."""
        return self.sketch_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What the run's model and codec imply for the wire. Who holds the model computes it."""

    codec_id: int  # wire id
    fragments: tuple[FragmentTerms, ...]  # by fragment id
    state_bytes: int  # of CONTENTS_STATE

    @property
    def round_bytes(self) -> int:
        """Return what each side sends when every fragment meets once."""
        return sum(fragment.slow_bytes for fragment in self.fragments)


@dataclass(frozen=True, slots=True)
class RunTerms:
    """Everything that a partner's first message is held against."""

    run_id: bytes  # 32 bytes
    protocol_version: int  # spoken in this run
    codec_id: int  # wire id
    fragments: tuple[FragmentTerms, ...]  # by fragment id
    state_bytes: int  # of CONTENTS_STATE
    access: Access  # who may take part
    issuers: frozenset[PeerId]  # whose invites count
    members: frozenset[PeerId]  # the allow list
    max_clock_gap_steps: int  # partners farther apart do not meet
    revocations: Revocations = field(default_factory=Revocations, compare=False)  # one for all terms of a peer; it grows

    @classmethod
    def from_manifest(cls, manifest: Manifest, plan: ModelPlan | None = None) -> Self:
        """Join what the manifest says with its model's sizes; terms without these say who may take part, and suit no meeting."""
        run, plan = manifest.run, plan or ModelPlan(0, (), 0)
        return cls(
            run_id=manifest.run_id,
            protocol_version=run.protocol,
            codec_id=plan.codec_id,
            fragments=plan.fragments,
            state_bytes=plan.state_bytes,
            access=run.access,
            issuers=frozenset(map(PeerId.from_text, run.issuers)),
            members=frozenset(map(PeerId.from_text, run.members)),
            max_clock_gap_steps=manifest.outer.max_clock_gap_steps,
        )

    def with_plan(self, plan: ModelPlan) -> Self:
        """Add the model's sizes, once they are known; the revocations stay the same ones."""
        return replace(self, codec_id=plan.codec_id, fragments=plan.fragments, state_bytes=plan.state_bytes)


def check_hello(
    hello: Hello,
    terms: RunTerms,
    me: PeerId,
    partner: PeerId,
    now_s: float,
    *,
    own_hello: Hello | None = None,
) -> None:
    """Raise unless this Hello opens, or answers, a meeting between `partner` and `me` on the run's terms.

    `partner` is the peer that the transport proved; `own_hello` is ours, which the initiator has and this one must answer, at a clock that
    is not too far from it. Raises Refused, BadMessage or BadSignature.
    """
    _check_opening(hello, terms, me, partner)
    check_member(partner, hello.credential, terms, now_s)
    _check_sizes(hello, terms)
    if own_hello is None:
        if hello.partner_nonce:
            raise BadMessage("a Hello that answers, where nobody asked")
    else:
        _check_answer(hello, own_hello)
        check_clock(hello.clock_steps, own_hello.clock_steps, terms)


def check_fetch(request: FetchRequest, terms: RunTerms, me: PeerId, partner: PeerId, now_s: float) -> None:
    """Raise Refused, BadMessage or BadSignature unless `partner` may have what it asks `me` for.

    Who is revoked may ask for the issuer's word on that: by nobody else's does it end.
    """
    _check_opening(request, terms, me, partner)
    is_about_itself = request.kind is ContentsKind.REVOCATIONS
    check_member(partner, request.credential, replace(terms, revocations=Revocations()) if is_about_itself else terms, now_s)


def check_revocation(revocation: Revocation, terms: RunTerms) -> None:
    """Raise BadMessage or BadSignature unless one who may invite to this run has revoked something."""
    if revocation.run_id != terms.run_id or revocation.issuer not in terms.issuers:
        raise BadMessage("a revocation that is not by an issuer of this run")
    revocation.verify(revocation.issuer)


def check_record(record: MemberRecord, terms: RunTerms, now_s: float) -> None:
    """Raise BadMessage, BadSignature or Refused unless this record is in force and its peer may take part."""
    record.check(terms.run_id, now_s)
    check_member(record.peer_id, record.credential, terms, now_s)


def check_clock(their_steps: int, own_steps: int, terms: RunTerms) -> None:
    """Raise Refused when two schedule clocks are too far apart to average."""
    gap_steps = abs(their_steps - own_steps)
    if gap_steps > terms.max_clock_gap_steps:
        raise Refused(RefusalCode.CLOCK_TOO_FAR, f"{gap_steps} steps apart; at most {terms.max_clock_gap_steps} may meet")


def check_phase(theirs: RunPhase, own: RunPhase) -> None:
    """Raise Refused when one side has finished the run and the other has not."""
    if theirs is not own:
        raise Refused(RefusalCode.WRONG_PHASE, f"theirs is {theirs.name}, ours {own.name}")


def check_member(peer: PeerId, credential: Credential | None, terms: RunTerms, now_s: float) -> None:
    """Raise Refused(NOT_INVITED) unless `peer` may take part in the run."""
    if terms.access == "allowlist" and peer not in terms.members:
        raise Refused(RefusalCode.NOT_INVITED, "not on the run's list of members")
    # An issuer could sign itself an invite at any time, so none is asked of it.
    if terms.access == "invite" and peer not in terms.issuers:
        _check_credential(peer, credential, terms, now_s)


def vouched_by(peer: PeerId, credential: Credential | None, terms: RunTerms) -> PeerId | None:
    """Return by whose word a member is here: its own name where manifest or invite name it, else its invite's key; None: nobody's.

    Assumes that its credential has been checked.
    """
    if terms.access == "open":
        return None
    if peer in terms.issuers or peer in terms.members:
        return peer
    return (credential.bearer or credential.subject) if credential else None


def _check_credential(peer: PeerId, credential: Credential | None, terms: RunTerms, now_s: float) -> None:
    if credential is None:
        raise Refused(RefusalCode.NOT_INVITED, "no invite")
    if credential.issuer not in terms.issuers:
        raise Refused(RefusalCode.NOT_INVITED, "an invite from a peer that may not invite")
    if credential.subject not in (None, peer):
        raise Refused(RefusalCode.NOT_INVITED, "an invite for another peer")
    if credential.not_after_s <= now_s:
        raise Refused(RefusalCode.NOT_INVITED, "an expired invite")
    if terms.revocations.cover(peer, credential):
        raise Refused(RefusalCode.NOT_INVITED, "a revoked invite")
    try:
        credential.check(terms.run_id, peer)
    except BadSignature:
        raise Refused(RefusalCode.NOT_INVITED, "a forged invite") from None


def _check_opening(message: Hello | FetchRequest, terms: RunTerms, me: PeerId, partner: PeerId) -> None:
    # Version first: another version may sign differently. Then the run, because a peer of another run is merely lost.
    if message.protocol_version != terms.protocol_version:
        raise Refused(RefusalCode.WRONG_VERSION, f"theirs is {message.protocol_version}, ours {terms.protocol_version}")
    if message.run_id != terms.run_id:
        raise Refused(RefusalCode.WRONG_RUN, f"theirs is {message.run_id.hex()[:8]}, ours {terms.run_id.hex()[:8]}")
    if message.receiver != me:
        raise BadMessage("meant for another peer")
    if message.sender != partner:
        raise BadMessage("sent in the name of another peer")
    message.verify(partner)


def _check_sizes(hello: Hello, terms: RunTerms) -> None:
    if hello.fragment >= len(terms.fragments):
        raise Refused(RefusalCode.WRONG_TERMS, f"fragment {hello.fragment} of {len(terms.fragments)}")
    fragment = terms.fragments[hello.fragment]
    theirs, ours = (
        (hello.codec, hello.sketch_bytes, hello.payload_bytes),
        (terms.codec_id, fragment.sketch_bytes, fragment.payload_bytes),
    )
    if theirs != ours:
        raise Refused(RefusalCode.WRONG_TERMS, f"codec, sketch and payload bytes are {theirs}, ours {ours}")


def _check_answer(hello: Hello, own_hello: Hello) -> None:
    if hello.partner_nonce != own_hello.nonce:
        raise BadMessage("an answer to another Hello")
    if hello.nonce == own_hello.nonce:
        raise BadMessage("a nonce that is only ours repeated")
    if hello.fragment != own_hello.fragment:
        raise BadMessage(f"an answer about fragment {hello.fragment}; asked about {own_hello.fragment}")
    check_phase(hello.phase, own_hello.phase)
