"""What one member has seen of its whole run: the members by their signed records, joins and leaves, and the curve of the loss.

Every figure of another member is a claim that it signed. So the picture uses medians in which each Sybil group has one vote, drops the
outermost losses, and counts no member for more tokens than its steps allow. Pure bookkeeping with bounded size; times are Unix seconds of
this machine, and arguments. It survives a restart in the home folder. What others tell of the time before is kept apart (told_curve.py).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pydantic import TypeAdapter

from gossamer.peer.machine.events import CurveTold, MemberSeen, MembersSeen
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.told_curve import MAX_SOURCES, RunPoint, merged
from gossamer.protocol.limits import RECORD_NEWS_S

MAX_MEMBERS = 512  # ever seen; of more, others that left, then those with the fewest tokens are dropped
MAX_CHANGES = 200
MAX_POINTS = 400
POINT_S = 10.0  # between the first points of a curve; a full curve drops every second point and doubles this
DEAF_S = 90.0  # without news of anybody, not even our own record, this member sees nothing: nobody is said to leave
SILENT_S = 200.0  # a record that reaches us is at most about so old
NEWCOMER_S = 600.0  # one that says it joined longer ago was there before we saw it
PACE_S = 600.0  # of the last points that give the pace of the run
EPSILON = 1e-9  # sums of weights are not exact
MANY_TIMES = 16.0  # the most that a member of a program run counts for, as in a merge: times the typical tokens of a step


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member as this one knows it."""

    seen: MemberSeen
    first_seen: float
    heard: float  # when its newest record arrived
    gone: float | None = None  # when it left, or its last record expired
    tokens_per_second: float = 0.0  # by its last two records
    recorded_tokens: int = 0  # in its newest record; `seen` may be newer for this peer itself

    def state(self, now_s: float) -> str:
        """Return the state to show."""
        if self.gone is not None:
            return "left"
        if now_s - self.heard > SILENT_S and not self.seen.is_own:
            return "silent"
        return "joining" if self.seen.state in ("starting", "training") and not self.seen.step else self.seen.state


@dataclass(frozen=True, slots=True)
class Change:
    """A member came or went."""

    ts: float
    peer: str
    kind: str  # joined, first seen, came back, left, silent


@dataclass(slots=True)
class RunView:
    """The whole run as one member sees it. Belongs to one thread."""

    run_id: str = ""
    since: float = 0.0  # this member has watched the run from here on; 0: not yet
    total_steps: int = 0  # where the run ends
    step_tokens: int = 0  # of each inner step of every member; 0: each member decides
    stages: int = 1  # into which the model is cut: a token passes through one member of each
    members: dict[str, MemberView] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    points: list[RunPoint] = field(default_factory=list)
    told: dict[str, CurveTold] = field(default_factory=dict)  # what others have seen, by source
    older: list[RunPoint] = field(default_factory=list)  # of these, the curve before `since`
    spacing_s: float = POINT_S
    _taken_s: float = -math.inf  # last news

    def begin(self, run_id: str, total_steps: int, step_tokens: int, stages: int = 1) -> None:
        """Say which run it is; what was seen of another one is forgotten."""
        if run_id != self.run_id:
            self.members, self.changes, self.points, self.since, self.spacing_s = {}, [], [], 0.0, POINT_S
            self.told, self.older = {}, []
        self.run_id, self.total_steps, self.step_tokens, self.stages = run_id, total_steps, step_tokens, stages

    def take(self, seen: MembersSeen) -> None:
        """Take in the newest records."""
        now_s = seen.ts
        was_deaf, is_first = now_s - self._taken_s > DEAF_S, not self.since
        self._expire(now_s, quietly=was_deaf)
        self.since, self._taken_s = self.since or now_s, now_s
        for one in seen.members:
            self._take_one(one, now_s, quietly=is_first or was_deaf)
        while len(self.members) > MAX_MEMBERS:
            del self.members[min(self.members, key=self._worth)]
        self._add_point(now_s)

    def take_curve(self, told: CurveTold) -> None:
        """Take in what another member has seen of the run; of too many, the earliest answers count."""
        if self.since and (told.source in self.told or len(self.told) < MAX_SOURCES):
            self.told[told.source] = told
            found = merged(self.told, self.since, self.total_steps)
            if found and (len(self.told) > 1 or not self.older):  # one answer alone does not replace what several gave before
                self.older = found

    def look(self, now_s: float) -> None:
        """Note who has gone; call it about once a second."""
        if now_s - self._taken_s <= DEAF_S:
            self._expire(now_s)

    def move(self, seconds: float) -> None:
        """Move all times: the machine's clock was set by so much."""
        self.members = {peer: _moved(member, seconds) for peer, member in self.members.items()}
        self.changes = [replace(change, ts=change.ts + seconds) for change in self.changes]
        self.points = [replace(point, ts=point.ts + seconds) for point in self.points]
        self.older = [replace(point, ts=point.ts + seconds) for point in self.older]
        self.since, self._taken_s = self.since and self.since + seconds, self._taken_s + seconds

    def note_own(self, step: int, tokens: int, own_steps: int, loss: float | None) -> None:
        """Bring this peer's own row up to date between two of its records."""
        for peer, member in self.members.items():
            if member.seen.is_own and member.gone is None and member.seen.state == "training":
                seen = replace(member.seen, step=step, tokens=tokens, own_steps=own_steps, loss=member.seen.loss if loss is None else loss)
                self.members[peer] = replace(member, seen=seen)

    def _take_one(self, one: MemberSeen, now_s: float, *, quietly: bool) -> None:
        before, is_over = self.members.get(one.peer_id), one.expires <= now_s
        if before is None:
            if is_over:
                return
            self.members[one.peer_id] = MemberView(one, now_s, now_s, recorded_tokens=one.tokens)
            if not quietly:
                is_new = one.joined is None or now_s - one.joined < NEWCOMER_S
                self._note(now_s, one.peer_id, "joined" if is_new else "first seen")
        elif one.sequence > before.seen.sequence:
            back = before.gone is not None and not is_over
            if back and not quietly:
                self._note(now_s, one.peer_id, "came back")
            gone = now_s if is_over and before.gone is None else before.gone if is_over else None
            if gone is not None and before.gone is None:
                self._note(now_s, one.peer_id, "left")
            one = _with_figures(one, before.seen)
            rate = 0.0 if back else _rate(before, one, now_s)
            self.members[one.peer_id] = replace(
                before, seen=one, heard=now_s, gone=gone, tokens_per_second=rate, recorded_tokens=one.tokens
            )

    def _expire(self, now_s: float, *, quietly: bool = False) -> None:
        for peer, member in self.members.items():
            if member.gone is None and member.seen.expires <= now_s:
                self.members[peer] = replace(member, gone=now_s)
                if not quietly:
                    self._note(now_s, peer, "left" if member.seen.expires - member.heard < DEAF_S else "silent")

    def _note(self, ts: float, peer: str, kind: str) -> None:
        self.changes = [*self.changes, Change(ts, peer, kind)][-MAX_CHANGES:]

    def _worth(self, peer: str) -> tuple[bool, bool, int, float]:
        member = self.members[peer]
        return member.seen.is_own, member.gone is None, member.seen.tokens, member.heard  # our own row never goes

    def _add_point(self, now_s: float) -> None:
        live = self.live()
        if not live or (self.points and now_s - self.points[-1].ts < self.spacing_s):
            return
        training = [member.seen for member in self._training(now_s) if member.seen.loss is not None]
        low, middle, high = spread([seen.loss for seen in training if seen.loss is not None], weights(training))
        tokens = sum(self.counted(now_s).values()) / self.stages
        self.points.append(RunPoint(now_s, self.step(now_s), middle, low, high, len(live), tokens))
        if len(self.points) > MAX_POINTS:
            self.points, self.spacing_s = self.points[::2], 2 * self.spacing_s

    def live(self) -> list[MemberView]:
        """Return the members that have not gone."""
        return [member for member in self.members.values() if member.gone is None]

    def step(self, now_s: float) -> int:
        """Return the step of the run: the lower median of the training members; without any, of the live ones, or the last one seen."""
        typical = self._typical_step(self._training(now_s)) or self._typical_step(self.live())
        return typical or (self.points[-1].step if self.points else 0)

    def _training(self, now_s: float) -> list[MemberView]:
        return [member for member in self.live() if member.state(now_s) == "training"]

    def _typical_step(self, members: Sequence[MemberView]) -> int:
        """Return the lower median, by weight, of the global steps of members that have begun, if half of these have; else of all.

        A newcomer that has only taken over a state stays behind. One member that alone says it has begun decides nothing.
        """
        seen = [member.seen for member in members if 0 < member.seen.step <= self.total_steps]
        begun = [one for one in seen if one.own_steps != 0]
        everybody = [member.seen for member in members]
        counted = dict(zip((one.peer_id for one in everybody), weights(everybody), strict=True))
        chosen = begun if 2 * sum(counted[one.peer_id] for one in begun) >= sum(counted.values()) - EPSILON else seen
        return int(median_low([one.step for one in chosen], weights(chosen))) if chosen else 0

    def counted(self, now_s: float) -> dict[str, float]:
        """Return the tokens that each member counts for: its claim, but no more than the steps of the run allow."""
        each: float = self.step_tokens
        if not each:  # our own part is true; of those that hold what we do, the median
            begun = [member.seen for member in self.members.values() if member.seen.own_steps]
            trusted = [seen for seen in begun if seen.is_own] or begun
            each = _most_credible([seen.tokens / (seen.own_steps or 1) for seen in trusted])
        most = each * self.step(now_s)
        return {peer: min(float(member.seen.tokens), most) for peer, member in self.members.items()}

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return what is shown, JSON-able: the run in figures, live members first, changes from the newest on, and the curve."""
        live, counted = self.live(), self.counted(now_s)
        together = sum(counted.values())
        rates = [member.tokens_per_second for member in self._training(now_s) if member.tokens_per_second]
        most = self._most(now_s)
        rows = [self._row(member, counted[peer], together, most, now_s) for peer, member in self.members.items()]
        return {
            "run_id": self.run_id,
            "since": self.since or None,
            "now": now_s,
            "step": self.step(now_s),
            "live": len(live),
            "ever": len(self.members),
            "steps_per_second": self._pace(),
            "tokens": round(together / self.stages),
            "tokens_per_second": sum(_bounded(rates)) / self.stages,
            "one_more_tokens_per_second": statistics.median(rates) if rates and self.stages == 1 else 0.0,  # a stage alone adds none
            "stage_holders": self._by_stage([member for member in live if self._is_heard(member, now_s)]),
            "stage_unheard": self._by_stage([member for member in live if not self._is_heard(member, now_s)]),
            "carried_mb": round(
                sum(_bounded([member.seen.carried_mb or 0 for member in self.members.values()])) / 2
            ),  # both sides of a meeting count it
            "members": sorted(rows, key=lambda row: (row["state"] == "left", -row["counted"], row["peer_id"])),
            "changes": [asdict(change) for change in reversed(self.changes)],
            "points": {each.name: [getattr(point, each.name) for point in (*self.older, *self.points)] for each in fields(RunPoint)},
            "told": len(self.older),
        }

    def _by_stage(self, members: Sequence[MemberView]) -> list[int]:
        """Return how many of these members hold each stage; nothing in a run without stages."""
        held = Counter(member.seen.stage for member in members)
        return [held[stage] for stage in range(1, self.stages + 1)] if self.stages > 1 else []

    def _is_heard(self, member: MemberView, now_s: float) -> bool:
        return member.seen.is_own or now_s - member.heard <= RECORD_NEWS_S

    def _pace(self) -> float:
        """Return the steps a second of the run over the last points; 0 if they show none."""
        if not self.points:
            return 0.0
        last = self.points[-1]
        first = next(point for point in self.points if point.ts >= last.ts - PACE_S)
        return max(0.0, (last.step - first.step) / (last.ts - first.ts)) if last.ts > first.ts else 0.0

    def _most(self, now_s: float) -> dict[str, float]:
        """Return the largest credible claims, by what the members claim together: steps, seconds in the run, megabytes."""
        seen = [member.seen for member in self.members.values()]
        ages = [now_s - one.joined for one in seen if one.joined is not None and one.joined <= now_s]
        carried = [one.carried_mb for one in seen if one.carried_mb]
        return {
            "steps": min(self.total_steps, MANY_TIMES * max(1, self.step(now_s))),
            "age_s": _most_credible(ages),
            "carried_mb": _most_credible(carried),
        }

    def _row(self, member: MemberView, counted: float, together: float, most: Mapping[str, float], now_s: float) -> dict[str, Any]:
        """Return what is shown of a member; a claim that is not credible is None."""
        seen = member.seen
        joined = None if seen.joined is None or now_s - seen.joined > most["age_s"] else min(float(seen.joined), member.heard)
        return {
            "peer_id": seen.peer_id,
            "is_own": seen.is_own,
            "state": member.state(now_s),
            "stage": seen.stage,
            "step": _credible(seen.step, most["steps"]),
            "tokens": seen.tokens,
            "counted": round(counted),
            "share": counted / together if together else 0.0,
            "own_steps": _credible(seen.own_steps, most["steps"]),
            "loss": seen.loss,
            "joined": joined,
            "first_seen": member.first_seen,
            "heard": member.heard,
            "gone": member.gone,
            "carried_mb": _credible(seen.carried_mb, most["carried_mb"]),
            "tokens_per_second": member.tokens_per_second,
        }

    def to_record(self) -> dict[str, Any]:
        """Return everything but the answers of others, JSON-able, for `from_record`."""
        record: dict[str, Any] = _RECORD.dump_python(self, exclude={"told", "_taken_s"})
        return record | {"members": [*record["members"].values()]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RunView:
        """Read what `to_record` returned. Raises KeyError, TypeError or ValueError for anything else."""
        members = {one["seen"]["peer_id"]: one | {"seen": one["seen"] | {"is_own": False}} for one in record["members"]}
        return _RECORD.validate_python({**record, "members": members})


_RECORD = TypeAdapter(RunView)


def kept_view(home: Home) -> RunView:
    """Return what a home holds of its run; an empty view if that is nothing readable."""
    try:
        return RunView.from_record(json.loads(home.run.read_text()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return RunView()


def merged_views(views: Sequence[RunView]) -> RunView | None:
    """Return what several members have seen of one run, each member by its newest record; None without a view."""
    if not views:
        return None
    first, members = max(views, key=lambda view: len(view.points)), dict[str, MemberView]()
    for view in views:
        for peer, member in view.members.items() if view.run_id == first.run_id else ():
            if peer not in members or member.seen.sequence > members[peer].seen.sequence:
                members[peer] = member
    return replace(first, members=members)


def weights(members: Sequence[MemberSeen]) -> list[float]:
    """Return the weight of each member's claim: each Sybil group has one vote. If all others are one group, each member has its own."""
    names = [seen.group or seen.peer_id for seen in members]
    if len({name for name, seen in zip(names, members, strict=True) if not seen.is_own}) < 2:
        return [1.0] * len(members)
    sizes = Counter(names)
    return [1.0 / sizes[name] for name in names]


def spread(losses: Sequence[float], weights: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the lowest, the median and the highest loss by weight; of five votes or more without the outermost fifth on each side."""
    if not losses:
        return None, None, None
    cut, half = sum(weights) // 5, sum(weights) / 2
    low, high = _beyond(losses, weights, cut), -_beyond([-loss for loss in losses], weights, cut)
    return low, (_beyond(losses, weights, half) + median_low(losses, weights)) / 2, high


def median_low(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the lower median by weight. Raises ValueError without a value."""
    return _beyond(values, weights, sum(weights) / 2 - 2 * EPSILON)


def _beyond(values: Sequence[float], weights: Sequence[float], weight: float) -> float:
    """Return the least value up to which there is more than this weight; without one, the greatest. Raises ValueError without values."""
    so_far = 0.0
    for value, own in sorted(zip(values, weights, strict=True)):
        so_far += own
        if so_far > weight + EPSILON:
            return value
    return max(values)


def _bounded(claims: Sequence[float]) -> list[float]:
    """Return claims, none above the most credible of those that are not zero."""
    most = _most_credible([claim for claim in claims if claim > 0])
    return [min(claim, most) for claim in claims]


def _most_credible(claims: Sequence[float]) -> float:
    """Return the largest claim that counts: MANY_TIMES the median; 0 without claims."""
    return MANY_TIMES * statistics.median(claims) if claims else 0.0


def _credible(claim: int | None, most: float) -> int | None:
    return None if claim is None or claim > most else claim


def _moved(member: MemberView, seconds: float) -> MemberView:
    seen = replace(member.seen, expires=member.seen.expires + seconds)
    gone = None if member.gone is None else member.gone + seconds
    return replace(member, seen=seen, first_seen=member.first_seen + seconds, heard=member.heard + seconds, gone=gone)


def _with_figures(one: MemberSeen, before: MemberSeen) -> MemberSeen:
    """Return a record with what it lacks, from the one before: a node knows no step before its trainer reports, nor shows figures."""
    if one.state not in ("starting", "paused"):
        return one
    lacks = [name for name in ("own_steps", "joined", "carried_mb") if getattr(one, name) is None]
    kept = {name: getattr(before, name) for name in (*([] if one.step else ["step"]), *lacks)}
    return replace(one, tokens=max(one.tokens, before.tokens), **kept)


def _rate(before: MemberView, now: MemberSeen, now_s: float) -> float:
    passed_s, trained = now_s - before.heard, now.tokens - before.recorded_tokens
    return max(0.0, trained / passed_s) if passed_s >= 1.0 else before.tokens_per_second
