"""Pair methods: peers step at their own rates and meet two by two (NoLoCo), or never (`local`).

Peers are matched on demand as real peers are, or by a schedule of perfect matchings as in the NoLoCo paper. A meeting uses the code of
real peers (peer/trainer/meeting.py), merge gate included, without a network between its sides. At each instant of virtual time, the peers
whose inner step ends open and apply their pending meetings; then new meetings begin. A meeting counts for both sides or for neither: both
drop it when the gate of one side refuses the message, or when a peer leaves before the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Protocol

from torch import Tensor

from gossamer.optim.fragments import Countdown
from gossamer.optim.noloco import NoLoCo
from gossamer.peer.simulator.population import Layout, Population, SimulatedReplica, coding
from gossamer.peer.simulator.scenario import ON_DEMAND, Scenario
from gossamer.peer.simulator.staged_steps import steps
from gossamer.peer.swarm.partner_records import PartnerRecords
from gossamer.peer.trainer.fragment_state import FragmentState
from gossamer.peer.trainer.meeting import MeetingSide, bounded_weight
from gossamer.peer.trainer.probe import Judgement, ProbeGate, TokenProbe
from gossamer.peer.trainer.weights import Weights
from gossamer.protocol.identity import PeerId

PROBED_SHARE = 0.2  # of the meetings with partners of a good record
STEP_S = 1.0
NEVER_STEPS = 1 << 30


def train_alone(population: Population) -> Iterator[Fraction]:
    """Train every peer independently; yield each time at which inner steps end."""
    for now, arrived in steps(population):
        for peer in arrived:
            population.replicas[peer].inner_step()
        yield now


def gossip(population: Population, rule: NoLoCo, members: Callable[[Population], list[PairPeer]]) -> Iterator[Fraction]:
    """Train peers that meet in pairs; yield each time at which inner steps end, after its meetings."""
    scenario = population.scenario
    table = Gossip(population, rule, matcher(scenario, len(population.layout.codecs)), members(population))
    for now, arrived in steps(population):
        for peer in arrived:
            table.peers[peer].inner_step(scenario.step_tokens)
        table.boundary(now, arrived)
        yield now


class Floor(Protocol):
    """A matcher's view of the swarm, and the meetings that it may begin there."""

    def is_free(self, peer: int, fragment: int) -> bool:
        """Return whether the peer is present and the fragment in no meeting."""

    def step_gap(self, one: int, two: int) -> int:
        """Return the difference of the two peers' global steps."""

    def always_calls(self, peer: int) -> bool:
        """Return whether the peer calls at each step, due or not."""

    def begin(self, one: int, two: int, fragment: int) -> None:
        """Let two peers meet over a fragment, each from its next step boundary on."""

    def take_solo_step(self, peer: int, fragment: int) -> None:
        """Let a peer take the fragment's outer step alone at its next step boundary."""


class Matcher(Protocol):
    """Decides which peers meet."""

    def arrange(self, now: Fraction, arrived: Sequence[int], floor: Floor) -> None:
        """Begin the meetings that are due; `arrived` are the peers at a step boundary now."""

    def note_outer_step(self, peer: int, fragment: int, num_steps: int = 0, *, is_met: bool = True) -> None:
        """Note that the peer took an outer step on the fragment, and how many inner steps since the snapshot are counted down already.

        An outer step that brought nothing, not `is_met`, puts off no meeting.
        """


class OnDemand:
    """Each peer counts down per fragment and asks a random free peer (docs/concepts/fragments.md)."""

    def __init__(self, scenario: Scenario, num_fragments: int) -> None:
        outer = scenario.manifest.outer
        self._countdowns = [
            Countdown(num_fragments, scenario.period, Random(f"{scenario.seed}/countdown/{n}").getrandbits(48))
            for n in range(scenario.num_peers)
        ]
        self._num_fragments = num_fragments
        self._random = Random(f"{scenario.seed}/partners")
        self._max_clock_gap = outer.max_clock_gap_steps
        self._timeout = scenario.period  # in units of virtual time
        self._defer = outer.no_partner == "defer"
        self._asking_since: dict[tuple[int, int], Fraction] = {}

    def arrange(self, now: Fraction, arrived: Sequence[int], floor: Floor) -> None:
        """Count an inner step of the peers that arrived, and find partners for their due fragments."""
        for peer in arrived:
            self._countdowns[peer].tick()
            for fragment in range(self._num_fragments) if floor.always_calls(peer) else self._countdowns[peer].due():
                if floor.is_free(peer, fragment):
                    self._seek(now, peer, fragment, floor)

    def _seek(self, now: Fraction, peer: int, fragment: int, floor: Floor) -> None:
        others = [other for other in range(len(self._countdowns)) if other != peer]
        willing = [o for o in others if floor.is_free(o, fragment) and floor.step_gap(peer, o) <= self._max_clock_gap]
        since = self._asking_since.setdefault((peer, fragment), now)
        if willing:
            floor.begin(peer, self._random.choice(willing), fragment)
        elif others and now - since < self._timeout:
            return
        elif self._defer:
            self.note_outer_step(peer, fragment)
        else:
            floor.take_solo_step(peer, fragment)

    def note_outer_step(self, peer: int, fragment: int, num_steps: int = 0, *, is_met: bool = True) -> None:
        """Start the fragment's next countdown, if a partner was met or it is due; as with real peers, these steps count."""
        if is_met or fragment in self._countdowns[peer].due():
            self._asking_since.pop((peer, fragment), None)
            self._countdowns[peer].reset(fragment, num_steps)


class Scheduled:
    """Every inner_steps of virtual time all peers are paired at random, fragments taking turns (NoLoCo, section 3)."""

    def __init__(self, scenario: Scenario, num_fragments: int) -> None:
        self._num_peers = scenario.num_peers
        self._period = scenario.period
        self._seed = scenario.seed
        self._next = [Fraction(self._period * (fragment + 1), num_fragments) for fragment in range(num_fragments)]

    def arrange(self, now: Fraction, arrived: Sequence[int], floor: Floor) -> None:
        """Pair all peers for each fragment whose time has come."""
        for fragment, time in enumerate(self._next):
            if time <= now:
                self._next[fragment] = time + self._period
                self._pair(time, fragment, floor)

    def _pair(self, time: Fraction, fragment: int, floor: Floor) -> None:
        # Peers that are away or in an earlier meeting are left out; with an odd number one peer steps alone.
        order = [peer for peer in range(self._num_peers) if floor.is_free(peer, fragment)]
        Random(f"{self._seed}/round/{fragment}/{time}").shuffle(order)
        while len(order) > 1:
            floor.begin(order.pop(), order.pop(), fragment)
        for peer in order:
            floor.take_solo_step(peer, fragment)

    def note_outer_step(self, peer: int, fragment: int, num_steps: int = 0, *, is_met: bool = True) -> None:
        """Do nothing: the schedule does not depend on outer steps."""


def matcher(scenario: Scenario, num_fragments: int) -> Matcher:
    """Return the scenario's matcher."""
    return (OnDemand if scenario.matching == ON_DEMAND else Scheduled)(scenario, num_fragments)


class PairPeer:
    """A peer that meets others: its replica, the state of each fragment between meetings, and how it judges messages."""

    def __init__(self, replica: SimulatedReplica, layout: Layout) -> None:
        self.replica = replica
        weights = Weights(replica.parameters)
        self.fragments = tuple(FragmentState(codec, weights) for codec in layout.codecs)
        self.peer_id = PeerId.of_public_key(replica.number.to_bytes(32, "big"))
        self.records = PartnerRecords()
        self.probe_gate = ProbeGate()
        self._judgement: Judgement | None = None
        self._probe_draws = Random(f"probes/{replica.number}")
        self.probe = TokenProbe(replica.model, replica.dtype, replica.other_text(), self._probe_draws)

    def weight(self, side: MeetingSide, other: MeetingSide, partner: PairPeer) -> float:
        """Return our share of the pair's tokens, as far as the partner's claim counts."""
        own, claimed = side.since.tokens, other.since.tokens
        return bounded_weight(own, self.records.trust(partner.peer_id).counted_tokens(claimed, own))

    def judge(self, side: MeetingSide, payload: Tensor, partner: PairPeer) -> str:
        """Judge a partner's message, by a probe if it is drawn or must be; return why it must not be merged, empty if it may."""
        trust = self.records.trust(partner.peer_id)
        if reason := side.judge(payload, trust.share, trust.most_part, str(partner.peer_id)):
            return reason
        self._judgement = None
        self.records.counted_steps(partner.peer_id, partner.claimed_steps, self.replica.own_steps)
        own_steps, partner_steps = self.replica.global_step, partner.replica.global_step
        must_probe = trust.must_probe or not side.is_whole or self.replica.clock_budget.must_probe(own_steps, partner_steps)
        if not must_probe and self._probe_draws.random() >= PROBED_SHARE:
            return ""
        self._judgement, _ = side.probe(self.probe, self.probe_gate, side.failed_blocks, lag_steps=own_steps - partner_steps)
        if self._judgement.reason:
            self.records.harmful(partner.peer_id, self.now_s)
        return self._judgement.reason

    @property
    def claimed_steps(self) -> int:
        """The own steps that it names."""
        return self.replica.own_steps

    def note_merge(self, partner: PairPeer) -> None:
        """Note in the partner's record that the message judged last is merged."""
        judged = self._judgement if self._judgement and self._judgement.is_evidence else None
        self.records.merged(partner.peer_id, self.now_s, judged.gain.value if judged else None, judged.deviation if judged else 0.0)

    @property
    def always_calls(self) -> bool:
        """Whether it calls at each step, due or not."""
        return False

    @property
    def now_s(self) -> float:
        """Return the time of the records: an inner step takes STEP_S."""
        return STEP_S * self.replica.own_steps

    def inner_step(self, num_tokens: int) -> None:
        """Train on the next batch, and credit its tokens to every fragment. Raises Diverged."""
        self.replica.inner_step()
        for fragment in self.fragments:
            fragment.count(num_tokens)

    def open(self, fragment: int, partner: PairPeer) -> MeetingSide:
        """Open this peer's side of a meeting over a fragment."""
        return MeetingSide(self.fragments[fragment])

    def solo_step(self, fragment: int, rule: NoLoCo) -> None:
        """Take the outer step of a fragment without a partner."""
        self.fragments[fragment].take_solo_step(rule)
        self.fragments[fragment].move_fast_weights()

    def catch_up(self, partner_global_step: int) -> None:
        """Follow a partner's global step."""
        before = self.replica.global_step
        self.replica.catch_up(partner_global_step)
        for fragment in self.fragments:
            fragment.count_missed_steps(self.replica.global_step - before)


@dataclass(slots=True)
class Pair:
    """A meeting of two peers over a fragment. It is decided when both sides are open and the exchange has had its time."""

    fragment: int
    peers: tuple[PairPeer, PairPeer]
    seed: int
    sides: dict[int, MeetingSide] = field(default_factory=dict)  # by peer number, like the next two
    global_step: dict[int, int] = field(default_factory=dict)  # at the snapshots
    applied: set[int] = field(default_factory=set)
    failed_blocks: Tensor | None = None  # on either side; None before the exchange, and when a side refused
    ready: Fraction | None = None  # when both sides have everything

    def open(self, member: PairPeer) -> None:
        """Take this side's snapshot."""
        replica, (one, other) = member.replica, self.peers
        self.sides[replica.number] = member.open(self.fragment, other if member is one else one)
        self.global_step[replica.number] = replica.global_step

    def exchange(self, rule: NoLoCo, *, token_weights: bool) -> str:
        """Exchange the messages; return why one side refuses, empty if neither does."""
        one, two = self.sides.values()
        members = {peer.replica.number: peer for peer in self.peers}
        first, second = (members[number] for number in self.sides)
        weights = (first.weight(one, two, second), second.weight(two, one, first)) if token_weights else (0.5, 0.5)
        sketches = [side.prepare(rule, weight, self.seed) for side, weight in zip((one, two), weights, strict=True)]
        payloads = one.encode(sketches[1]), two.encode(sketches[0])
        reason = first.judge(one, payloads[1], second) or second.judge(two, payloads[0], first)
        self.failed_blocks = None if reason else one.failed_blocks | two.failed_blocks
        if not reason:
            first.note_merge(second)
            second.note_merge(first)
        return reason

    def apply(self, member: PairPeer) -> None:
        """Take one side's outer step, and keep the inner steps made since its snapshot."""
        number = member.replica.number
        side = self.sides[number]
        assert self.failed_blocks is not None
        lag_steps = member.replica.global_step - self._partner_step(member)
        side.merge(side.step_as_decided(member.probe, member.probe_gate, self.failed_blocks, lag_steps=lag_steps))
        side.state.move_fast_weights()
        if side.is_whole:
            member.catch_up(self._partner_step(member))
        self.applied.add(number)

    def _partner_step(self, member: PairPeer) -> int:
        """Return the global step that a member's partner had at its snapshot."""
        return next(steps for peer, steps in self.global_step.items() if peer != member.replica.number)


class Gossip:
    """All open meetings. A fragment of a peer is in at most one."""

    def __init__(self, population: Population, rule: NoLoCo, matching: Matcher, peers: list[PairPeer]) -> None:
        self.peers = peers
        self._population = population
        self._matcher = matching
        self._rule = rule
        self._meetings: dict[tuple[int, int], Pair] = {}  # by peer and fragment, until that peer has applied or dropped it
        self._alone: set[tuple[int, int]] = set()
        self._away: set[int] = set()
        self._seeds = Random(f"{population.scenario.seed}/meetings")

    def boundary(self, now: Fraction, arrived: Sequence[int]) -> None:
        """Open, decide and begin meetings of the peers at a step boundary."""
        self._away.difference_update(arrived)
        self._advance_meetings(now, arrived)
        self._matcher.arrange(now, arrived, self)
        self._advance_meetings(now, arrived)
        for peer in arrived:
            if self._population.scenario.is_away(peer, now):
                self._leave(peer)

    def is_free(self, peer: int, fragment: int) -> bool:
        """Return whether the peer is present and the fragment in no meeting."""
        return peer not in self._away and (peer, fragment) not in self._meetings and (peer, fragment) not in self._alone

    def step_gap(self, one: int, two: int) -> int:
        """Return the difference of the two peers' global steps; a peer that rests counts as one that is too far."""
        both = self.peers[one], self.peers[two]
        if any(peer.records.is_shunned(other.peer_id, peer.now_s) for peer, other in (both, both[::-1])):
            return NEVER_STEPS
        return abs(self._population.replicas[one].global_step - self._population.replicas[two].global_step)

    def always_calls(self, peer: int) -> bool:
        """Return whether the peer calls at each step, due or not."""
        return self.peers[peer].always_calls

    def begin(self, one: int, two: int, fragment: int) -> None:
        """Let two peers meet over a fragment, each from its next step boundary on."""
        meeting = Pair(fragment, (self.peers[one], self.peers[two]), self._seeds.getrandbits(63))
        self._meetings[one, fragment] = self._meetings[two, fragment] = meeting

    def take_solo_step(self, peer: int, fragment: int) -> None:
        """Let a peer take the fragment's outer step alone at its next step boundary."""
        self._alone.add((peer, fragment))

    def _advance_meetings(self, now: Fraction, arrived: Sequence[int]) -> None:
        here = set(arrived)
        mine = [(peer, meeting) for (peer, _), meeting in self._meetings.items() if peer in here]
        for peer, meeting in mine:
            if peer not in meeting.sides:
                meeting.open(self.peers[peer])
        for _, meeting in mine:
            if len(meeting.sides) == 2 and meeting.ready is None:
                self._exchange(meeting, now)
        for peer, meeting in mine:
            if meeting.ready is not None and meeting.ready <= now and (peer, meeting.fragment) in self._meetings:
                self._decide(peer, meeting)
        for peer, fragment in sorted(self._alone):
            if peer in here:
                self.peers[peer].solo_step(fragment, self._rule)
                self._alone.discard((peer, fragment))
                self._population.traffic.solo += 1
                self._matcher.note_outer_step(peer, fragment)

    def _exchange(self, meeting: Pair, now: Fraction) -> None:
        with coding("a pair of peers"):
            meeting.exchange(self._rule, token_weights=self._population.scenario.token_weights)
        meeting.ready = now + self._population.scenario.delay_steps
        codec = self._population.layout.codecs[meeting.fragment]
        self._population.traffic.sent_bytes += 2 * (codec.sketch_bytes + codec.payload_bytes)

    def _decide(self, peer: int, meeting: Pair) -> None:
        """Apply a meeting on this peer's side, or drop a refused one; its fragment stays due, as with real peers."""
        if meeting.failed_blocks is None:
            self._drop(meeting)
            self._population.traffic.refused += 1
            return
        side = meeting.sides[peer]
        num_steps = max(0, side.state.since.steps - side.since.steps - 1)  # the last one is still to be counted down
        self._population.traffic.completed += not meeting.applied
        meeting.apply(self.peers[peer])
        del self._meetings[peer, meeting.fragment]
        self._matcher.note_outer_step(peer, meeting.fragment, num_steps, is_met=side.part > 0.0)

    def _drop(self, meeting: Pair) -> None:
        assert not meeting.applied
        for member in meeting.peers:
            del self._meetings[member.replica.number, meeting.fragment]

    def _leave(self, peer: int) -> None:
        """Leave, and drop the open meetings: no partner has applied one, for this peer would have applied it at the same time."""
        self._away.add(peer)
        for meeting in [meeting for (member, _), meeting in self._meetings.items() if member == peer]:
            self._drop(meeting)
            self._population.traffic.dropped += 1
