"""Validate the first message of a stream against the terms of the run, which follow from the manifest.

`Refused` is neither side's fault; `BadMessage` and `BadSignature` are protocol violations. All checks are pure functions of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Self

from gossamer.protocol.errors import BadMessage, BadSignature, RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import PROTOCOL
from gossamer.protocol.messages.messages import ContentsKind, FetchRequest, Hello, Lane, RunPhase
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.revocations import Revocation, Revocations
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.run.manifest import RunManifest
from gossamer.protocol.run.sections import Access


@dataclass(frozen=True, slots=True)
class FragmentTerms:
    """The sizes that manifest and model imply for a meeting on one fragment."""

    sketch_bytes: int  # size of each side's sketch; 0: the codec has no sketch
    payload_bytes: int  # size of each side's payload
    num_blocks: int  # number of blocks that can fail to decode

    @property
    def slow_bytes(self) -> int:
        """Return the bytes that each side sends in a meeting, which is also the size of a reply with ContentsKind.SLOW."""
        return self.sketch_bytes + self.payload_bytes


TOKEN_BYTES: Final = 4  # of a token in a hop
BATCHES_AWAY: Final = 2  # of micro-batches under way at one holder, at most


def stage_name(stage: int, count: int) -> str:
    """Return a stage, counted from one, in words."""
    return f"stage {stage} of {count}"


@dataclass(frozen=True, slots=True)
class StageTerms:
    """The stage that this peer holds in a staged run, and the sizes of a hop between two stages."""

    stage: int  # from 0
    count: int  # of stages
    token_bytes: int  # of the micro-batch's tokens, inputs and labels
    value_bytes: int  # of the coded activations; the coded gradient has as many
    in_batch: int  # micro-batches in the batch of an inner step

    @property
    def name(self) -> str:
        """Return the stage in words."""
        return self.name_of(self.stage + 1)

    def name_of(self, stage: int) -> str:
        """Return another stage, counted from one, in words."""
        return stage_name(stage, self.count)

    @property
    def is_first(self) -> bool:
        """Whether this stage drives: its holders begin the micro-batches."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.count - 1

    @property
    def num_above(self) -> int:
        """Return the number of stages above this one."""
        return self.count - 1 - self.stage

    @property
    def most_hops(self) -> int:
        """Return how many micro-batches a holder has under way at most: a later answer is about weights that are too old."""
        return BATCHES_AWAY * self.in_batch

    @property
    def files_bytes(self) -> int:
        """Return the bytes of one hop's files: tokens, and values in and out on both ways."""
        return self.token_bytes + 4 * self.value_bytes

    @property
    def forward_bytes(self) -> int:
        """Return the bytes that a micro-batch brings to the next stage."""
        return self.token_bytes + self.value_bytes

    @property
    def hop_bytes(self) -> tuple[int, int]:
        """Return the bytes that a holder sends and receives for each micro-batch: activations up, their gradient down."""
        up, down = (0 if self.is_last else 1), (0 if self.is_first else 1)  # hops to the next stage, and from the stage before
        forward, back = self.forward_bytes, self.value_bytes
        return up * forward + down * back, up * back + down * forward


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The sizes that the run's model and codec imply for the wire. Computing them needs the model. In a staged run, of own stage."""

    codec_id: int  # wire id
    fragments: tuple[FragmentTerms, ...]  # by fragment id
    state_bytes: int  # size of ContentsKind.STATE
    stage: StageTerms | None = None  # in a staged run
    next_state_bytes: int = 0  # in a staged run: size of the next stage's ContentsKind.STATE; the last stage's next is the first

    @property
    def round_bytes(self) -> int:
        """Return the bytes that each side sends when every fragment meets once."""
        return sum(fragment.slow_bytes for fragment in self.fragments)


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The terms against which a partner's first message is checked."""

    run_id: bytes  # 32 bytes
    codec_id: int  # wire id
    fragments: tuple[FragmentTerms, ...]  # by fragment id
    state_bytes: int  # size of ContentsKind.STATE
    access: Access
    issuers: frozenset[PeerId]  # peers that may issue invites
    members: frozenset[PeerId]  # the allow list
    max_clock_gap_steps: int  # largest difference between the global steps of two partners
    stage: StageTerms | None = None  # that this peer holds, in a staged run
    next_state_bytes: int = 0  # as in ModelPlan
    revocations: Revocations = field(default_factory=Revocations, compare=False)  # shared by all copies of these terms; it grows

    @classmethod
    def from_manifest(cls, manifest: RunManifest) -> Self:
        """Return what a manifest states: enough to check membership; `with_plan` adds what a meeting needs."""
        run = manifest.run
        return cls(
            run_id=manifest.run_id,
            codec_id=0,
            fragments=(),
            state_bytes=0,
            access=run.access,
            issuers=frozenset(map(PeerId.from_text, run.issuers)),
            members=frozenset(map(PeerId.from_text, run.members)),
            max_clock_gap_steps=manifest.outer.max_clock_gap_steps,
        )

    def with_plan(self, plan: ModelPlan) -> Self:
        """Return a copy with the model's sizes. The copy shares the revocations."""
        return replace(
            self,
            codec_id=plan.codec_id,
            fragments=plan.fragments,
            state_bytes=plan.state_bytes,
            stage=plan.stage,
            next_state_bytes=plan.next_state_bytes,
        )

    @property
    def own_stage(self) -> int:
        """Return the stage that this peer holds, plus one, as messages name it; 0: none."""
        return 0 if self.stage is None else self.stage.stage + 1


def check_hello(hello: Hello, terms: RunTerms, me: PeerId, partner: PeerId, now_s: float, *, own_hello: Hello | None = None) -> None:
    """Raise Refused, BadMessage or BadSignature unless this Hello validly opens, or answers, a meeting of `partner` with `me`.

    The transport authenticated `partner`. The initiator passes `own_hello`, which this Hello must answer, with a global step near ours.
    """
    _check_opening(hello, terms, me, partner, now_s, own_hello)
    check_stage(hello, terms)
    _check_sizes(hello, terms)
    if own_hello is not None:
        _check_answer(hello, own_hello)
        check_global_step(hello.global_step, own_hello.global_step, terms)


def check_lane(lane: Lane, terms: RunTerms, me: PeerId, partner: PeerId, now_s: float, *, own_lane: Lane | None = None) -> None:
    """Raise Refused, BadMessage or BadSignature unless this Lane validly opens, or answers, a lane between `partner` and `me`.

    The opener passes `own_lane`, which this Lane must answer. Our own stage is in the terms.
    """
    _check_opening(lane, terms, me, partner, now_s, own_lane)
    stage = lane.opening.stage
    if abs(stage - terms.own_stage) != 1 or not terms.own_stage or not stage:
        raise Refused(RefusalCode.WRONG_TERMS, f"a lane from stage {stage} to stage {terms.own_stage}")
    if (stage < terms.own_stage) is not (lane.window == 0):
        words = f"a window of {lane.window} from stage {stage} to stage {terms.own_stage}"
        if own_lane is None:  # we have moved, and the opener knows our record of before
            raise Refused(RefusalCode.WRONG_TERMS, words)
        raise BadMessage(words)


def check_fetch(request: FetchRequest, terms: RunTerms, me: PeerId, partner: PeerId, now_s: float) -> None:
    """Raise Refused, BadMessage or BadSignature unless `partner` may ask `me`. A revoked peer may ask for the revocations."""
    asks_revocations = request.kind is ContentsKind.REVOCATIONS
    _check_opening(request, replace(terms, revocations=Revocations()) if asks_revocations else terms, me, partner, now_s)


def check_revocation(revocation: Revocation, terms: RunTerms) -> None:
    """Raise BadMessage or BadSignature unless an issuer of this run signed the revocation."""
    if revocation.run_id != terms.run_id or revocation.issuer not in terms.issuers:
        raise BadMessage("the revocation's signer is not an issuer of this run")
    revocation.verify(revocation.issuer)


def check_record(record: MemberRecord, terms: RunTerms, now_s: float) -> None:
    """Raise BadMessage, BadSignature or Refused unless this record is valid at `now_s` and its peer is a member."""
    record.check(terms.run_id, now_s)
    check_member(record.peer_id, record.credential, terms, now_s)


def check_global_step(their_steps: int, own_steps: int, terms: RunTerms) -> None:
    """Raise Refused if two global steps are too far apart to average."""
    gap_steps = abs(their_steps - own_steps)
    if gap_steps > terms.max_clock_gap_steps:
        raise Refused(RefusalCode.STEP_TOO_FAR, f"{gap_steps} steps apart; the limit is {terms.max_clock_gap_steps}")


def check_phase(theirs: RunPhase, own: RunPhase) -> None:
    """Raise Refused if one side has finished the run and the other has not."""
    if theirs is not own:
        raise Refused(RefusalCode.WRONG_PHASE, f"theirs is {theirs.name}, ours {own.name}")


def check_stage(message: Hello | FetchRequest, terms: RunTerms) -> None:
    """Raise Refused unless a message about weights is about those of the stage that this peer holds."""
    if message.opening.stage != terms.own_stage:
        raise Refused(RefusalCode.WRONG_TERMS, f"about stage {message.opening.stage}, ours is {terms.own_stage}")


def check_member(peer: PeerId, credential: Credential | None, terms: RunTerms, now_s: float) -> None:
    """Raise Refused(NOT_INVITED) unless `peer` is a member of the run."""
    if terms.access == "allowlist" and peer not in terms.members:
        raise Refused(RefusalCode.NOT_INVITED, "not on the run's list of members")
    # An issuer could invite itself at any time, so it needs no credential.
    if terms.access == "invite" and peer not in terms.issuers:
        _check_credential(peer, credential, terms, now_s)


def sybil_group_key(peer: PeerId, credential: Credential | None, terms: RunTerms) -> PeerId | None:
    """Return the key that identifies a member's Sybil group: its invite's bearer key; its own if it is named; None in an open run."""
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


def _check_opening(
    message: Hello | Lane | FetchRequest, terms: RunTerms, me: PeerId, partner: PeerId, now_s: float, own: Hello | Lane | None = None
) -> None:
    """Check what every conversation begins with, in a message that answers `own` if there is one."""
    opening, kind = message.opening, type(message).__name__
    # The version comes first, because another version may sign differently; then the run, because a peer of another run is no attacker.
    if opening.protocol_version != PROTOCOL:
        raise Refused(RefusalCode.WRONG_VERSION, f"theirs is {opening.protocol_version}, ours {PROTOCOL}")
    if opening.run_id != terms.run_id:
        raise Refused(RefusalCode.WRONG_RUN, f"theirs is {opening.run_id.hex()[:8]}, ours {terms.run_id.hex()[:8]}")
    if opening.receiver != me:
        raise BadMessage("addressed to another peer")
    if opening.sender != partner:
        raise BadMessage("sent in the name of another peer")
    message.verify(partner)
    check_member(partner, opening.credential, terms, now_s)
    if opening.partner_nonce != (own.opening.nonce if own else b""):
        raise BadMessage(f"an answer to another {kind}" if own else f"a first {kind} with a partner nonce")
    if own and opening.nonce == own.opening.nonce:
        raise BadMessage("a nonce that repeats ours")


def _check_sizes(hello: Hello, terms: RunTerms) -> None:
    if hello.fragment >= len(terms.fragments):
        raise Refused(RefusalCode.WRONG_TERMS, f"fragment {hello.fragment} of {len(terms.fragments)}")
    fragment = terms.fragments[hello.fragment]
    theirs, ours = ((hello.codec, hello.sketch_bytes, hello.payload_bytes), (terms.codec_id, fragment.sketch_bytes, fragment.payload_bytes))
    if theirs != ours:
        raise Refused(RefusalCode.WRONG_TERMS, f"codec, sketch and payload bytes are {theirs}, ours {ours}")


def _check_answer(hello: Hello, own_hello: Hello) -> None:
    if hello.fragment != own_hello.fragment:
        raise BadMessage(f"an answer for fragment {hello.fragment}; we proposed {own_hello.fragment}")
    check_phase(hello.phase, own_hello.phase)
