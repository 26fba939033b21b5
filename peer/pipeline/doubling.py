"""Doubled micro-batches: which hops also go to a second holder, under another name, and what unlike answers say of a partner.

A holder that answers with nonsense of the right size cannot be told from an honest one by its answer alone. So some micro-batches go to
holders of two Sybil groups. Both are ordinary hops, so nobody can tell a check from work. Each holder blames its own neighbour alone, who
answers for all behind it. Where two answers are unlike, a third group decides.

A lower holder chooses what it sends, so it can craft hops on which honest answers differ. Therefore odd answers are counted by source: the
Sybil group that has sent the hop from below. Own text is trusted.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gossamer.peer.pipeline.commands import AnswersCompared
from gossamer.peer.pipeline.hop import Asked, Hop
from gossamer.peer.pipeline.lane import DownLane
from gossamer.peer.pipeline.routing import choose
from gossamer.protocol.identity import PeerId
from gossamer.protocol.newest import keep_newest

EVERY = 64  # one hop in so many is doubled, beside those to a group in doubt
MOST_ANSWERS = 3  # to one micro-batch
MOST_ODD = 3  # odd answers to hops of one source, less what like ones make up for, for each stage above: the source counts towards a rest
SOURCES_TO_REST = 2  # from below; of own text, one
MADE_UP = 0.5  # of an odd answer, by a like one: an honest partner may have passed the hop on to a dishonest one
CLEARED = 8  # like answers in a row after an odd one: the group is in doubt no more
GROUPS_KEPT = 256
OWN_TEXT = ""  # as a source


@dataclass(slots=True)
class Doubt:
    """A group of which a partner has answered unlike others."""

    num_odd: int = 0
    scores: dict[str, float] = field(default_factory=dict)  # by source: odd answers, less what like ones have made up for
    num_alike: int = 0  # in a row since the last odd one


@dataclass(slots=True)
class Doubling:
    """Belongs to a carrier. `groups` has the Sybil group of each partner, as the node sees it; one without a group gets no copies.

    Doubts stay with a group, so that a partner that comes back under a new key is still in doubt. `num_above`: the stages whose work is in
    an answer; the more there are, the more often an honest partner passes on what a dishonest one has answered.
    """

    rng: random.Random
    groups: dict[PeerId, str] = field(default_factory=dict)
    num_above: int = 1
    _doubts: dict[str, Doubt] = field(default_factory=dict)  # by group
    _is_owed: bool = False  # a copy was drawn, and no lane had credit for it: the next hop is doubled

    def asked(self, partner: PeerId) -> Asked:
        """Return a partner with its group, to keep with a hop."""
        return Asked(partner, self.groups.get(partner))

    def source(self, hop: Hop) -> str:
        """Return the group that has sent a hop from below; empty for own text, and where it is not known yet."""
        return OWN_TEXT if hop.sent_by is None else self.groups.get(hop.sent_by, OWN_TEXT)

    # ------------------------------------------------------------------ which lanes

    def is_due(self, partner: PeerId) -> bool:
        """Draw whether the hop that goes to a partner now is doubled."""
        return self._is_in_doubt(self.asked(partner)) or self.rng.randrange(EVERY) == 0

    def choose(self, hop: Hop, lanes: Collection[DownLane], now_s: float) -> list[DownLane]:
        """Choose a lane with credit for a hop, and a second one for its copy if it is doubled; none while no lane will do.

        No group gets both a hop and its copy. A group in doubt gets no hop without a copy.
        """
        free = [lane for lane in self.without_copies(hop, lanes) if lane.credit(now_s)]
        if hop.measure or hop.copies:
            lane = choose(free, hop.tried, self.rng, now_s)
            return [] if lane is None else [lane]

        def copy_lane_of(lane: DownLane) -> DownLane | None:
            return self.other_lane([self.asked(lane.partner)], lanes, hop.tried, now_s)

        allowed = [lane for lane in free if not self._must_double(self.asked(lane.partner), lanes) or copy_lane_of(lane)]
        lane = choose(allowed, hop.tried, self.rng, now_s)
        if lane is None:
            return []
        is_due = self._is_owed or self.is_due(lane.partner)
        copy_lane = copy_lane_of(lane) if is_due else None
        self._is_owed = is_due and copy_lane is None
        return [lane] if copy_lane is None else [lane, copy_lane]

    def without_copies(self, hop: Hop, lanes: Collection[DownLane]) -> list[DownLane]:
        """Return the lanes to groups that have no copy of a hop."""
        taken = {self._name(copy.asked) for copy in hop.copies if copy.asked is not None}
        return [lane for lane in lanes if self._name(self.asked(lane.partner)) not in taken]

    def other_lane(self, asked: Collection[Asked], lanes: Collection[DownLane], tried: Collection[int], now_s: float) -> DownLane | None:
        """Choose a lane with credit to a holder of a Sybil group that has not been asked; None if there is none."""
        if None in [self._group(one) for one in asked]:
            return None
        return choose(self._apart(asked, lanes), tried, self.rng, now_s)

    def may_use(self, hop: Hop, lanes: Collection[DownLane]) -> bool:
        """Return whether the answer to a hop may be used. That of a group in doubt may not, without another answer."""
        return hop.measure or bool(hop.copies) or hop.asked is None or not self._must_double(hop.asked, lanes)

    def credit(self, lanes: Collection[DownLane], now_s: float) -> int:
        """Return how many hops the lanes can take now. A group in doubt takes no more of them than other groups can take copies."""
        return sum(self._usable(lane, lanes, now_s) for lane in lanes)

    def _usable(self, lane: DownLane, lanes: Collection[DownLane], now_s: float) -> int:
        asked, own = self.asked(lane.partner), lane.credit(now_s)
        if not own or not self._must_double(asked, lanes):
            return own
        return min(own, sum(other.credit(now_s) for other in self._apart([asked], lanes)))

    def _must_double(self, asked: Asked, lanes: Collection[DownLane]) -> bool:
        """Return whether a group is in doubt, and another one is there to compare it with. Without one, a wait would have no end."""
        return self._is_in_doubt(asked) and bool(self._apart([asked], lanes))

    def _apart(self, asked: Collection[Asked], lanes: Collection[DownLane]) -> list[DownLane]:
        taken = {None, *(self._group(one) for one in asked)}
        return [lane for lane in lanes if self.groups.get(lane.partner) not in taken]

    # ------------------------------------------------------------------ doubts

    def learn(self, answered: Mapping[int, Asked], odd: int | None, evidence: str, source: PeerId | None) -> AnswersCompared:
        """Take in who has answered the hops of one micro-batch. All answers are alike but that to the hop `odd`, if there is one.

        `source`: the partner that has sent the micro-batch from below; None for own text.
        """
        name = OWN_TEXT if source is None else self._name(self.asked(source))
        odd_one = None if odd is None else answered.get(odd)
        for one in answered.values():
            if one != odd_one:
                self._note_alike(one, name)
        partners = tuple(one.partner for one in answered.values())
        if odd_one is None:
            return AnswersCompared(partners)
        doubt = self._note_odd(odd_one, name)
        num_sources = sum(score >= MOST_ODD * self.num_above for score in doubt.scores.values())
        must_rest = num_sources >= (1 if source is None else SOURCES_TO_REST)
        return AnswersCompared(partners, odd_one.partner, doubt.num_odd, must_rest, evidence)

    def forgive(self, partner: PeerId) -> None:
        """Count the odd answers of a partner anew, after its rest. It stays in doubt."""
        if (doubt := self._doubts.get(self._name(self.asked(partner)))) is not None:
            doubt.num_odd = 0
            doubt.scores.clear()

    def _note_alike(self, asked: Asked, source: str) -> None:
        if (doubt := self._doubts.get(self._name(asked))) is None:
            return
        doubt.num_alike += 1
        if source in doubt.scores:
            doubt.scores[source] = max(0.0, doubt.scores[source] - MADE_UP)
        if doubt.num_alike >= CLEARED:
            del self._doubts[self._name(asked)]

    def _note_odd(self, asked: Asked, source: str) -> Doubt:
        name = self._name(asked)
        doubt = self._doubts.get(name, Doubt())
        keep_newest(self._doubts, name, doubt, GROUPS_KEPT)
        doubt.num_odd, doubt.num_alike = doubt.num_odd + 1, 0
        keep_newest(doubt.scores, source, doubt.scores.get(source, 0.0) + 1.0, GROUPS_KEPT)
        return doubt

    def _is_in_doubt(self, asked: Asked) -> bool:
        """Return whether a group is in doubt. One that is not known yet may be any that is."""
        if self._group(asked) is None:
            return bool(self._doubts)
        return self._name(asked) in self._doubts or str(asked.partner) in self._doubts

    def _group(self, asked: Asked) -> str | None:
        return self.groups.get(asked.partner, asked.group)

    def _name(self, asked: Asked) -> str:
        return self._group(asked) or str(asked.partner)
