"""How a meeting opens: who we are, what a side knows before it, the Hello it makes of that, and what two Hellos together fix.

Pure: the machine (peer/meeting/machine.py) says when.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from gossamer.peer.link.messages import Opened
from gossamer.peer.swarm.membership import Membership
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Hello, RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, check_hello


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a side knows before its meeting begins: enough to write its own Hello and to check the partner's."""

    membership: Membership
    partner: PeerId  # as the lane proved it
    fragment: int
    nonce: bytes  # 16 fresh random bytes
    now_s: float  # Unix time, for the expiry of credentials
    partner_hello: Hello | None = None  # checked; None on the initiator's side
    records: tuple[bytes, ...] = ()  # signed records to pass on: our own, and other peers'
    patience_s: float = math.inf  # for how long the partner may say nothing, by earlier meetings; the terms bound it

    @property
    def fragment_terms(self) -> FragmentTerms:
        """Return the sizes that the manifest implies for this meeting."""
        return self.membership.terms.fragments[self.fragment]

    def hello(self, opened: Opened) -> Hello:
        """Write and sign this side's Hello. Raises Refused when the partner wants an average that our own trainer is not ready for."""
        membership, sizes = self.membership, self.fragment_terms
        hello = Hello(
            protocol_version=membership.terms.protocol_version,
            run_id=membership.terms.run_id,
            sender=membership.identity.peer_id,
            receiver=self.partner,
            nonce=self.nonce,
            partner_nonce=self.partner_hello.nonce if self.partner_hello else b"",
            fragment=self.fragment,
            codec=membership.terms.codec_id,
            tokens=opened.tokens,
            clock_steps=opened.clock_steps,
            sketch_bytes=sizes.sketch_bytes,
            payload_bytes=sizes.payload_bytes,
            phase=self._phase(opened.phase),
            credential=membership.credential,
            records=self.records,
        )
        return hello.signed(membership.identity)

    def _phase(self, own: RunPhase) -> RunPhase:
        if self.partner_hello is None:
            return own
        if self.partner_hello.phase is RunPhase.FINISH and own is RunPhase.TRAIN:
            raise Refused(RefusalCode.WRONG_PHASE, "still training")
        return self.partner_hello.phase

    def check_answer(self, answer: Hello, own: Hello) -> None:
        """Raise Refused or PeerMisbehaved unless this is the partner's answer to our Hello."""
        check_hello(answer, self.membership.terms, own.sender, self.partner, self.now_s, own_hello=own)


def has_ended(hello: Hello, membership: Membership) -> bool:
    """Tell whether a Hello is of a peer that has come to the end of the run, whatever the meeting is for."""
    return hello.phase is RunPhase.FINISH or hello.clock_steps >= membership.total_steps


@dataclass(frozen=True, slots=True)
class Pairing:
    """What two Hellos fix for both sides."""

    meeting_id: bytes  # 16 bytes; the meeting's name on the wire and in both journals
    seed: int  # of the codec
    phase: RunPhase  # an ordinary outer step, or the last averaging


def pairing(initiator: Hello, responder: Hello) -> Pairing:
    """Derive the meeting's name and seed from the run, the fragment and both nonces."""
    fragment = initiator.fragment.to_bytes(4, "little")
    names = b"gossamer-meeting" + initiator.run_id + fragment + initiator.nonce + responder.nonce
    meeting_id = hashlib.sha256(names).digest()[:16]
    seed = int.from_bytes(hashlib.sha256(meeting_id + b"seed").digest()[:8], "little") & (2**63 - 1)
    return Pairing(meeting_id, seed, initiator.phase)
