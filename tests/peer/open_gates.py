"""Gates that accept everything finite and whole: what a test of the outer step's algebra needs, and what attacks are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gossamer.peer.simulator.pairs import PairPeer
from gossamer.peer.swarm.partner_records import MAX_TOKEN_RATIO, PartnerRecords, Trust
from gossamer.peer.trainer.fragment_state import FragmentState, Lengths, MergeGate
from gossamer.peer.trainer.probe import Closer, Gain, Judgement, ProbeGate
from gossamer.protocol.identity import PeerId


class OpenGate(MergeGate):
    """A gate that accepts everything finite."""

    def judge(self, gap: float, own: Lengths) -> str:
        return "" if gap < float("inf") else "the partner's message is not finite"

    def kept(self, gap: float, own: Lengths, share: float) -> float:
        return 1.0


class OpenProbeGate(ProbeGate):
    """A gate that accepts every gain."""

    def judge(self, gain: Gain, closer: Closer | None, *, is_behind: bool) -> Judgement:
        return Judgement(gain, "", 1.0, 0.0)

    def is_of_use(self, gain: Gain) -> bool:
        return True


class Trusting(PartnerRecords):
    """Records that trust every partner as one of good record whose messages help much."""

    def trust(self, peer: PeerId) -> Trust:
        return Trust(must_probe=False, share=1.0, token_ratio=MAX_TOKEN_RATIO)


class Gated(Protocol):
    """A peer or a replica."""

    probe_gate: ProbeGate

    @property
    def fragments(self) -> Sequence[FragmentState]: ...


def open_gates(peers: Sequence[Gated]) -> None:
    """Have peers accept everything finite."""
    open_probes(peers)
    for peer in peers:
        for fragment in peer.fragments:
            fragment.gate = OpenGate()


def open_probes(peers: Sequence[Gated]) -> None:
    """Have peers merge whole whatever their merge gate accepts."""
    for peer in peers:
        peer.probe_gate = OpenProbeGate()
        if isinstance(peer, PairPeer):
            peer.records = Trusting()
