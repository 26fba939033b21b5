"""Partner records: what merging with each partner has done to the loss on our own text, and how far it is trusted therefore.

A probe measures the gain of a merge, in nats per token. A partner without a good record is always probed, and counts for little. A harmful
message is one that was refused because of its gain: each one makes the partner rest longer, the fifth for good. Good messages make up for
harmful ones, so an honest partner that was refused by chance recovers.

Records of one origin, an invite or a network, share a cap: where more of an origin's peers are harmful than proven, its newcomers rest too.
A peer with accepted probes of its own never pays for others.

`now_s` is Unix time, because records outlive the process. No I/O, no clock. All sizes are bounded.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import PeerId

MAX_RECORDS: Final = 512
GOOD_PROBES: Final = 8  # accepted since the last harmful message: a good record
MEMORY: Final = 20  # probes that the mean gain averages over
START_SHARE: Final = 0.5  # of the longest gap that honest training explains: what is merged of a partner without a record
MAX_TOKEN_RATIO: Final = 16.0  # of a partner's tokens to ours, as claimed by a partner with a good record that helps much
HELPING: Final = 3  # accepted probes since the last harmful message, from which the mean gain says that a partner helps much...
HELPS_MUCH: Final = 2.0  # ...and so many spreads of honest gains above the typical one it must be
HARMED: Final = 1.0  # spreads of honest gains below the typical one: an accepted message that harmed
SHORTFALL: Final = (0.5, 3.0)  # spreads below the typical gain: not counted, and counted at most of one probe
DOUBTFUL: Final = 4.0  # shortfall, from which the partner counts as one without a record...
HARMFUL: Final = 6.0  # ...and as one that has sent a harmful message
RESTS_S: Final = (10.0, 120.0, 4 * 3600.0, 24 * 3600.0, math.inf)  # by strikes: a harmful message is one strike...
STRIKES_PER_PROBE: Final = 0.5  # ...which two accepted probes make up for
GROUP_STRIKES: Final = 2  # at most, that harmful peers of the same origin add to a newcomer's first strike
HOURS: Final = 3  # rungs of RESTS_S: so far for a newcomer of a harmful origin, and while no other record is good
SAME_PACE: Final = 0.75  # of our own steps: from here on a partner is as fast as we are
PACE_STEPS: Final = 8  # of our own, over which a partner's pace is counted
PACE_MEMORY: Final = 4  # such counts are averaged
REJECTIONS: Final = 3  # in a row, by the merge gate of either side, before the partner rests
REJECTED_REST_S: Final = (60.0, 3600.0)  # after so many, doubling with each further one; at most

Count = Annotated[int, Field(ge=0)]  # as a file may hold it, like the next two
Real = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Trust:
    """How far a partner is trusted in its next meeting. The defaults are those of a partner without a record."""

    must_probe: bool = True
    share: float = START_SHARE  # of the longest gap that honest training explains: the most that is merged
    token_ratio: float = 1.0  # how many times our own tokens its claim may count for
    most_part: float = 1.0  # of the outer step with it that is taken: a slower partner brings less than it would take back

    def counted_tokens(self, claimed: int, own: int) -> int:
        """Return how many of a partner's tokens count; all, if we have none: our weights are then those of others."""
        return min(claimed, int(self.token_ratio * own)) if own else claimed


@dataclass(slots=True)
class PartnerRecord:
    """The meetings with one partner, over all starts of this peer. Gains are exponential averages of the accepted probes."""

    merged: Count = 0  # messages
    probed: Count = 0  # of these
    helped: Count = 0  # of the probed ones: the loss fell
    harmed: Count = 0  # the gain was clearly below the typical one, but accepted
    refused: Count = 0  # as harmful
    rejected: Count = 0  # in a row: one side's merge gate did not accept the other's message
    gain: Real = 0.0  # mean, nats per token
    deviation: Real = 0.0  # mean, of the gain from the typical one, in spreads of honest gains
    shortfall: Amount = 0.0  # added up, in spreads of honest gains: how much less the partner's messages help than others' (CUSUM)
    steps: Count = 0  # own steps that it had named when its pace was last counted...
    our_steps: Count = 0  # ...and ours then
    pace: Amount = 1.0  # steps that it makes in one of ours, on average
    num_paces: Annotated[int, Field(ge=0, le=PACE_MEMORY)] = 0  # counts that the average is of
    good: Annotated[int, Field(ge=0, le=GOOD_PROBES)] = 0  # probes accepted since the last harmful message, at most GOOD_PROBES
    strikes: Amount = 0.0  # at the last harmful message
    met_s: Real = 0.0  # last merge
    refused_s: Real = 0.0  # last refusal or rejection
    rest_s: Annotated[float, Field(ge=0)] = 0.0  # from then on; infinite: for good
    origins: tuple[str, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether probes were accepted since the last harmful message."""
        return self.good > 0

    @property
    def is_good(self) -> bool:
        """Whether enough probes were accepted since the last harmful message."""
        return self.good >= GOOD_PROBES

    @property
    def is_harmful(self) -> bool:
        """Whether a message was refused as harmful, and no probe accepted since."""
        return self.refused > 0 and not self.good

    @property
    def rests_until_s(self) -> float:
        """When its own rest ends; infinite: never."""
        return self.refused_s + self.rest_s

    def add_gain(self, gain: float, deviation: float) -> None:
        """Count an accepted probe."""
        self.probed += 1
        self.helped += gain > 0
        self.harmed += deviation < -HARMED
        self.good = min(GOOD_PROBES, self.good + 1)
        weight = 1.0 / min(self.probed, MEMORY)
        self.gain += weight * (gain - self.gain)
        self.deviation += weight * (deviation - self.deviation)
        free, most = SHORTFALL
        self.shortfall = max(0.0, self.shortfall + min(most, -deviation - free))

    def count_steps(self, steps: int, our_steps: int) -> None:
        """Count its pace by what both have trained since it was last counted. Fewer steps than before: one of us went back."""
        theirs, ours = steps - self.steps, our_steps - self.our_steps
        if self.steps and theirs >= 0 and ours >= 0:
            if ours < PACE_STEPS:
                return
            self.num_paces = min(PACE_MEMORY, self.num_paces + 1)
            self.pace += (theirs / ours - self.pace) / self.num_paces
        self.steps, self.our_steps = steps, our_steps

    @property
    def most_part(self) -> float:
        """The part of the outer step with it that is taken at most: its pace, where it is slower than we are."""
        return 1.0 if self.pace >= SAME_PACE else self.pace

    def rest(self, now_s: float, rest_s: float) -> None:
        """Rest from now on, or for what is left of a longer rest."""
        self.rest_s = max(rest_s, self.rests_until_s - now_s if self.rests(now_s) else 0.0)
        self.refused_s = now_s

    def rests(self, now_s: float) -> bool:
        """Return whether it rests; a clock that was set back ends a rest."""
        return self.rest_s == math.inf or self.refused_s <= now_s < self.rests_until_s

    def words(self) -> str:
        """Return the counts for an operator."""
        probes = f"probed {self.probed} times: {self.helped} helped, {self.harmed} harmed" if self.probed else "not probed yet"
        slow = f"; merged in part, for it makes {self.pace:.2f} steps in one of ours" if self.most_part < 1.0 else ""
        return f"{self.merged} merged, {probes}" + (f"; {self.refused} refused as harmful" if self.refused else "") + slow


@dataclass(slots=True)
class _Origin:
    excess: int = 0  # harmful peers more than proven ones
    harmful_s: float = -math.inf  # last harmful message of one that is not proven


_FILE: TypeAdapter[dict[str, PartnerRecord]] = TypeAdapter(dict[str, PartnerRecord])


class PartnerRecords:
    """The records by partner, at most MAX_RECORDS. `origins_of` names the invite and the network of a peer, as far as we have seen them."""

    def __init__(self, origins_of: Callable[[PeerId], Collection[str]] = lambda _: ()) -> None:
        self._origins_of = origins_of
        self._records: dict[PeerId, PartnerRecord] = {}
        self._origins: dict[str, _Origin] = {}
        self._any_rest = False
        self.num_changes = 0

    # ------------------------------------------------------------------ what a meeting teaches

    def merged(self, peer: PeerId, now_s: float, gain: float | None, deviation: float) -> bool:
        """Count a merged message; `gain` is None if it was not probed. Return whether the partner's messages together are harmful."""
        record = self._record(peer)
        record.merged += 1
        record.rejected = 0
        record.met_s = now_s
        if gain is not None and math.isfinite(gain):
            record.add_gain(gain, deviation)
        self._changed()
        if record.shortfall < HARMFUL:
            return False
        self.harmful(peer, now_s)
        return True

    def counted_steps(self, peer: PeerId, steps: int, our_steps: int) -> None:
        """Count the own steps that a partner and we have named in a meeting."""
        self._record(peer).count_steps(steps, our_steps)
        self._changed()

    def harmful(self, peer: PeerId, now_s: float) -> None:
        """Count a message that was refused because of its gain. The partner rests; hours at most while no other record is good."""
        record = self._record(peer)
        others = 0 if record.refused or record.is_proven else min(GROUP_STRIKES, max(0, self._excess(peer)))
        record.strikes = max(0.0, record.strikes - STRIKES_PER_PROBE * record.good) + 1 + others
        record.refused += 1
        record.good, record.shortfall = 0, 0.0
        are_others_good = any(other.is_good for other in self._records.values())  # else the fault may be our own
        rests_s = RESTS_S if are_others_good else RESTS_S[:HOURS]
        record.rest(now_s, rests_s[min(int(record.strikes), len(rests_s)) - 1])
        self._changed()

    def rejected(self, peer: PeerId, now_s: float) -> None:
        """Count an exchange that one side's merge gate ended, or that the partner broke off, whoever is to blame."""
        record = self._record(peer)
        record.rejected += 1
        if record.rejected >= REJECTIONS:
            first_s, most_s = REJECTED_REST_S
            record.rest(now_s, min(most_s, first_s * 2.0 ** min(record.rejected - REJECTIONS, 16)))
        self._changed()

    def forget_rejections(self) -> None:
        """End the rests after rejections: our own weights were replaced."""
        for record in self._records.values():
            if record.rejected:
                record.rejected = 0
                record.rest_s = record.rest_s if record.is_harmful else 0.0
        self._changed()

    def forgive(self, peer: PeerId) -> None:
        """Forget a partner's record, at the operator's request."""
        self._records.pop(peer, None)
        self._changed()

    # ------------------------------------------------------------------ what follows

    def trust(self, peer: PeerId) -> Trust:
        """Return how far a partner is trusted. It grows with its accepted probes, and falls to a newcomer's while its gain is too low."""
        record = self.get(peer)
        level = 0.0 if self.is_doubtful(peer) else record.good / GOOD_PROBES
        share = START_SHARE + (1.0 - START_SHARE) * level
        helps_much = level * GOOD_PROBES >= HELPING and record.deviation >= HELPS_MUCH
        return Trust(level < 1.0, share, MAX_TOKEN_RATIO**level if helps_much else 1.0, record.most_part)

    def is_doubtful(self, peer: PeerId) -> bool:
        """Return whether a partner's messages have lately helped clearly less than others'."""
        return self.get(peer).shortfall >= DOUBTFUL

    def rests_until_s(self, peer: PeerId) -> float:
        """Return when a partner's rest ends, or ended: its own, and while it is not proven that of its origins. Infinite: never."""
        record = self.get(peer)
        return max(record.rests_until_s, self._origins_rest(peer, record)[1])

    def is_shunned(self, peer: PeerId, now_s: float) -> bool:
        """Return whether a partner rests: it is not called, and its calls are refused."""
        if not self._any_rest:
            return False
        record = self.get(peer)
        since_s, until_s = self._origins_rest(peer, record)
        return record.rests(now_s) or since_s <= now_s < until_s

    def why_shunned(self, peer: PeerId, now_s: float) -> str:
        """Return, for the partner itself, why it is not met now and for how long."""
        record = self.get(peer)
        if not record.rests(now_s):
            why = "peers with the same invite or network sent harmful messages"
        elif record.is_harmful:
            why = f"{record.refused} messages would have raised the loss on my text"
        else:
            why = f"{record.rejected} exchanges in a row ended without a merge"
        return f"{why}; you rest {rest_text(self.rests_until_s(peer) - now_s)}"

    def shunned_for_good(self) -> list[PeerId]:
        """Return the partners that are not met again unless the operator forgives them."""
        return [peer for peer, record in self._records.items() if record.rest_s == math.inf]

    def get(self, peer: PeerId) -> PartnerRecord:
        """Return a partner's record; an empty one, which is not kept, if there is none."""
        return self._records.get(peer) or PartnerRecord()

    def peers(self) -> list[PeerId]:
        """Return the partners that have a record, the least recently changed first."""
        return list(self._records)

    # ------------------------------------------------------------------ keeping

    def to_bytes(self) -> bytes:
        """Return all records as a file."""
        return json.dumps({str(peer): asdict(record) for peer, record in self._records.items()}, indent=1).encode()

    def load(self, content: bytes) -> None:
        """Replace the records by those of a file. Raises BadSettings, with nothing changed, if it is unreadable."""
        try:
            read = _FILE.validate_python(json.loads(content))
            records = {PeerId.from_text(peer): record for peer, record in read.items()}
        except (ValueError, RecursionError, ValidationError, BadSettings) as error:
            raise BadSettings(
                "the records of partners are unreadable", hint="delete partners.json in the home; records then begin anew"
            ) from error
        self._records = records
        self._changed()

    def _record(self, peer: PeerId) -> PartnerRecord:
        record = self._records.pop(peer, PartnerRecord())
        record.origins = tuple(self._origins_of(peer)) or record.origins
        self._records[peer] = record  # as the newest
        return record

    def _changed(self) -> None:
        self.num_changes += 1
        while len(self._records) > MAX_RECORDS:
            del self._records[min(self._records, key=self._is_worth_keeping)]  # of equals the one that changed longest ago
        self._any_rest = any(record.rest_s for record in self._records.values())
        self._origins = defaultdict(_Origin)
        for record in self._records.values():
            for name in record.origins:
                origin = self._origins[name]
                origin.excess += record.is_harmful - record.is_proven
                origin.harmful_s = max(origin.harmful_s, record.refused_s if record.is_harmful else -math.inf)

    def _is_worth_keeping(self, peer: PeerId) -> bool:
        return self._records[peer].is_good or self._records[peer].rest_s == math.inf

    def _excess(self, peer: PeerId) -> int:
        """Return how many more peers of the same origin are harmful than proven, by the worst origin, without the peer itself."""
        record = self.get(peer)
        itself = record.is_harmful - record.is_proven
        known = [self._origins[name].excess - (itself if name in record.origins else 0) for name in self._names(peer)]
        return max(known, default=0)

    def _origins_rest(self, peer: PeerId, record: PartnerRecord) -> tuple[float, float]:
        """Return from when to when a peer that is not proven rests because of its origins."""
        excess = self._excess(peer)
        if record.is_proven or excess < 2:
            return -math.inf, -math.inf
        since_s = max(self._origins[name].harmful_s for name in self._names(peer))
        return since_s, since_s + RESTS_S[min(excess - 2, HOURS - 1)]

    def _names(self, peer: PeerId) -> list[str]:
        record = self.get(peer)
        return [name for name in {*self._origins_of(peer), *record.origins} if name in self._origins]


def rest_text(rest_s: float) -> str:
    """Return a length of time in words."""
    if rest_s == math.inf:
        return "for good"
    if rest_s >= 3600.0:
        return f"for {rest_s / 3600.0:.1f} hours"
    return f"for {math.ceil(rest_s / 60.0)} min" if rest_s > 60.0 else f"for {max(1, math.ceil(rest_s))} s"
