"""This peer's membership in a run: identity, credential and terms."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from gossamer.peer.machine.home import Home, write_whole
from gossamer.protocol.errors import PeerMisbehaved
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import PROTOCOL
from gossamer.protocol.messages.messages import Opening
from gossamer.protocol.messages.records import GENERATION, MemberRecord, announceable
from gossamer.protocol.messages.revocations import Revocation, Revocations, read_revocations
from gossamer.protocol.messages.terms import ModelPlan, RunTerms
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.run.manifest import RunManifest

BARE_RECORD_S = 90


@dataclass(slots=True)
class OwnCredential:
    """The credential that this peer shows: one for everything that shows it, for the issuer replaces it while the peer runs."""

    current: Credential | None = None


@dataclass(frozen=True, slots=True)
class Membership:
    """This peer's identity in its run, its credential, and the run's terms."""

    identity: Identity
    terms: RunTerms
    own_credential: OwnCredential
    total_steps: int  # where the run ends
    deadline_s: float  # to find a partner, and again for the meeting itself
    defer: bool  # without a partner: wait instead of taking a solo step
    generation: int = 0  # of the home: records of a higher one replace ours

    @classmethod
    def of(cls, identity: Identity, manifest: RunManifest, credential: OwnCredential, generation: int = 0) -> Self:
        """Take the terms from the manifest; they suit no meeting before `with_plan`."""
        terms, outer = RunTerms.from_manifest(manifest), manifest.outer
        return cls(identity, terms, credential, manifest.run.total_steps, outer.deadline_s, outer.no_partner == "defer", generation)

    @property
    def credential(self) -> Credential | None:
        """The credential to show now."""
        return self.own_credential.current

    def with_plan(self, plan: ModelPlan) -> Self:
        """Return the same membership on terms that hold the model's sizes; credential and revocations stay shared."""
        return replace(self, terms=self.terms.with_plan(plan))

    def opening(self, partner: PeerId, nonce: bytes, partner_nonce: bytes, records: tuple[bytes, ...]) -> Opening:
        """Return what our Hello or Lane to a partner begins with; `partner_nonce`: of the message that it answers, or empty."""
        terms, me = self.terms, self.identity.peer_id
        return Opening(PROTOCOL, terms.run_id, me, partner, nonce, partner_nonce, terms.own_stage, self.credential, records)

    def bare_record(self, addresses: Iterable[str], now_s: float) -> MemberRecord:
        """Sign a record for a peer without a trainer: it proves the membership, and marks the peer as paused. `now_s`: Unix time.

        Any record that is announced in the same second is newer.
        """
        return MemberRecord(
            run_id=self.terms.run_id,
            peer_id=self.identity.peer_id,
            addresses=announceable(addresses, self.identity.peer_id),
            global_step=0,
            finished=False,
            sequence=self.generation * GENERATION + int(now_s) - 1,
            expires_s=int(now_s) + BARE_RECORD_S,
            credential=self.credential,
            paused=True,
        ).signed(self.identity)


def keep_revocations(home: Home, new: Iterable[Revocation]) -> list[bool]:
    """Add revocations to those in the home; return for each whether it is new there. Raises OSError; blocks for the disk.

    `peer revoke` and the running peer both write the file, and neither loses what the other has written.
    """
    with home.updating():
        held = held_revocations(home)
        are_new = [held.add(revocation) for revocation in new]
        write_whole(home.revocations, held.to_bytes())
    return are_new


def held_revocations(home: Home) -> Revocations:
    """Return the revocations in a home; none where the file is missing or damaged."""
    held = Revocations()
    with suppress(OSError, PeerMisbehaved):
        for revocation in read_revocations(home.revocations.read_bytes()):
            held.add(revocation)
    return held
