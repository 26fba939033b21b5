"""Doubled micro-batches: which hops also go to a second holder, under another name, and what unlike answers say of a partner.

A holder that answers with nonsense of the right size cannot be told from an honest one by its answer alone. So some micro-batches go to
holders of two Sybil groups. Both are ordinary hops, so nobody can tell a check from work. Each holder blames its own neighbour alone, who
answers for all behind it. Where two answers are unlike, a third group decides.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gossamer.peer.pipeline.commands import AnswersCompared
from gossamer.peer.pipeline.lane import DownLane
from gossamer.peer.pipeline.routing import choose
from gossamer.protocol.identity import PeerId
from gossamer.protocol.newest import keep_newest

EVERY = 64  # one hop in so many is doubled, beside those to a group in doubt
MOST_ANSWERS = 3  # to one micro-batch
MOST_ODD = 3  # odd answers, less what like ones make up for: then a partner rests
MADE_UP = 0.5  # of an odd answer, by a like one: an honest partner may have passed the hop on to a dishonest one
CLEARED = 8  # like answers in a row after an odd one: the group is in doubt no more
GROUPS_KEPT = 256


@dataclass(slots=True)
class Doubt:
    """A group of which a partner has answered unlike others."""

    num_odd: int = 0
    score: float = 0.0  # odd answers, less what like ones have made up for
    num_alike: int = 0  # in a row since the last odd one


@dataclass(slots=True)
class Doubling:
    """Belongs to a carrier. `groups` has the Sybil group of each partner, as the node sees it; one without a group gets no copies.

    Doubts stay with a group, so that a partner that comes back under a new key is still in doubt.
    """

    rng: random.Random
    groups: dict[PeerId, str] = field(default_factory=dict)
    _doubts: dict[str, Doubt] = field(default_factory=dict)  # by group

    def is_due(self, partner: PeerId) -> bool:
        """Draw whether the hop that goes to a partner now is doubled."""
        return self.groups.get(partner) in self._doubts or self.rng.randrange(EVERY) == 0

    def other_lane(self, asked: Collection[PeerId], lanes: Iterable[DownLane], now_s: float) -> DownLane | None:
        """Choose a lane with credit to a holder of a Sybil group that has not been asked; None if there is none."""
        taken = {self.groups.get(partner) for partner in asked}
        apart = [lane for lane in lanes if (group := self.groups.get(lane.partner)) is not None and group not in taken]
        return None if None in taken else choose(apart, (), self.rng, now_s)

    def learn(self, answered: Mapping[int, PeerId], odd: int | None, evidence: str) -> AnswersCompared:
        """Take in who has answered the hops of one micro-batch. All answers are alike but that to the hop `odd`, if there is one."""
        odd_one = None if odd is None else answered.get(odd)
        for partner in answered.values():
            if partner != odd_one and (doubt := self._doubts.get(self._group(partner))) is not None:
                doubt.num_alike += 1
                doubt.score = max(0.0, doubt.score - MADE_UP)
                if doubt.num_alike >= CLEARED:
                    del self._doubts[self._group(partner)]
        partners = tuple(answered.values())
        if odd_one is None:
            return AnswersCompared(partners)
        doubt = self._note_odd(odd_one)
        return AnswersCompared(partners, odd_one, doubt.num_odd, doubt.score >= MOST_ODD, evidence)

    def _note_odd(self, partner: PeerId) -> Doubt:
        group = self._group(partner)
        doubt = self._doubts.get(group, Doubt())
        keep_newest(self._doubts, group, doubt, GROUPS_KEPT)
        doubt.num_odd, doubt.score, doubt.num_alike = doubt.num_odd + 1, doubt.score + 1.0, 0
        return doubt

    def forgive(self, partner: PeerId) -> None:
        """Count the odd answers of a partner anew, after its rest. It stays in doubt."""
        if (doubt := self._doubts.get(self._group(partner))) is not None:
            doubt.num_odd, doubt.score = 0, 0.0

    def _group(self, partner: PeerId) -> str:
        return self.groups.get(partner, str(partner))
