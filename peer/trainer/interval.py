"""How often a peer meets where the run leaves it to each peer (`inner_steps = "auto"`): as often as its line and its trainer afford.

The longest of the countdowns that four limits allow holds: a peer calls once a step at most (SHORTEST_STEPS); the line carries all
fragments in LINE_SHARE of the time, or in STAGED_LINE_SHARE beside micro-batches; synchronization blocks the trainer for BLOCKED_SHARE of
its time, and takes PROCESSOR_SHARE of the processor time of training. The last two scale the present interval by the share that was
measured at it. (The measurements: docs/log.md, "How often to meet", "Meetings at every step".)
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from gossamer.optim.fragments import MEETING_INTERVAL
from gossamer.peer.link.messages import NodeReport
from gossamer.peer.machine.bill import EMITTED_CHANGE, STEP_S
from gossamer.peer.machine.events import IntervalSet, TrafficExpected
from gossamer.peer.machine.stage_line import DAY_S, StageLine
from gossamer.peer.machine.units import percent_text, rate_text
from gossamer.peer.trainer.losses import EVAL_INTERVAL_STEPS, MOST_EVAL_TOKENS, NUM_EVAL_BATCHES
from gossamer.peer.trainer.replica import Replica
from gossamer.protocol.messages.terms import TOKEN_BYTES, ModelPlan, StageTerms

START_STEPS: Final = 4  # until the first measurement: peers diverge fastest in their first steps
SHORTEST_STEPS: Final = 1
LONGEST_STEPS: Final = 1000  # a line that needs a longer one is too slow for the run
LINE_SHARE: Final = 0.5
STAGED_LINE_SHARE: Final = 0.1  # where micro-batches need the line
BLOCKED_SHARE: Final = 0.01
PROCESSOR_SHARE: Final = 0.1
MOST_FOR_PROCESSOR: Final = 6  # the processor limit's longest: an idle node costs time too, and peers must not drift apart for that
WINDOW_S: Final = 20.0  # of training, over which the shares are measured
LEAST_S: Final = 5.0  # of training before a change...
LEAST_STEPS: Final = 100  # ...or so many quick steps, before the first one
MOST_CHANGE: Final = 2  # largest factor of one change
SYNC_SHARE: Final = 4  # a state older than a fourth of the allowed clock gap needs fragment sync, in rounds of that length
STEADY: Final = 0.15  # a smaller relative change is not made


class Spent(NamedTuple):
    """Where the time of this process went so far."""

    own_steps: int = 0
    train_s: float = 0.0  # in inner steps, and blocked between them
    blocked_s: float = 0.0
    training_cpu_s: float = 0.0  # processor time of the inner steps
    sync_cpu_s: float = 0.0  # of everything for meetings: node, daemon, exchange's thread

    def since(self, earlier: Spent) -> Spent:
        """Return the time spent since `earlier`."""
        return Spent(*map(operator.sub, self, earlier))


@dataclass(frozen=True, slots=True)
class Limit:
    """The shortest countdown that one limit allows, and its reason in words."""

    steps: float
    reason: str
    is_lines: bool = False


def _line_limit(round_bytes: int, bytes_per_s: float, step_s: float, share: float) -> Limit:
    """Return the limit of a line of this rate; `round_bytes` are sent each way when every fragment meets once."""
    steps = round_bytes / (MEETING_INTERVAL * share * bytes_per_s * step_s)
    return Limit(steps, f"{percent_text(share)} of the line: {rate_text(bytes_per_s)}", is_lines=True)


def line_share(stage: StageTerms | None) -> float:
    """Return the share of a line that meetings may take."""
    return LINE_SHARE if stage is None else STAGED_LINE_SHARE


def afforded_steps(round_bytes: int, bytes_per_s: float, step_s: float, share: float = LINE_SHARE) -> int:
    """Return the interval that the line alone would set, SHORTEST_STEPS at least."""
    return min(LONGEST_STEPS, max(SHORTEST_STEPS, math.ceil(_line_limit(round_bytes, bytes_per_s, step_s, share).steps)))


def day_bytes(round_bytes: int, interval_steps: int, step_s: float) -> float:
    """Return the bytes that a peer sends in a day of meetings at this interval; as many are received."""
    return round_bytes * DAY_S / (MEETING_INTERVAL * interval_steps * step_s)


def traffic_expected(
    plan: ModelPlan, inner_steps: int | str, bytes_per_s: float, step_s: float = STEP_S, *, is_measured: bool = False
) -> TrafficExpected:
    """Return what a run with this plan and `outer.inner_steps` takes on a line of this rate, infinite if it is not known.

    `is_measured`: whether `step_s` is.
    """
    share = line_share(plan.stage)
    steps = afforded_steps(plan.round_bytes, bytes_per_s, step_s, share) if isinstance(inner_steps, str) else inner_steps
    return traffic(plan, steps, step_s, is_measured=is_measured)


def traffic(plan: ModelPlan, interval_steps: int, step_s: float, *, is_measured: bool, use: float = math.nan) -> TrafficExpected:
    """Return the bytes of a day of meetings at this interval, and of the hops of the plan's stage, if it has one."""
    met, (sent, received) = day_bytes(plan.round_bytes, interval_steps, step_s), step_hop_bytes(plan.stage)
    steps = DAY_S / step_s
    return TrafficExpected(met + steps * sent, interval_steps, step_s, is_measured, met + steps * received, steps * sent, use)


def step_hop_bytes(stage: StageTerms | None) -> tuple[float, float]:
    """Return the bytes that hops send and receive for an own inner step, held-out micro-batches included; none without a stage."""
    if stage is None:
        return 0.0, 0.0
    batch_tokens = stage.in_batch * stage.token_bytes / TOKEN_BYTES
    measured = min(NUM_EVAL_BATCHES, MOST_EVAL_TOKENS / batch_tokens) / EVAL_INTERVAL_STEPS * stage.forward_bytes  # they go forward alone
    (sent, received), up, down = stage.hop_bytes, not stage.is_last, not stage.is_first
    return stage.in_batch * (sent + up * measured), stage.in_batch * (received + down * measured)


def line_use(stage: StageTerms, step_s: float, bytes_per_s: float) -> float:
    """Return the share of its device that a line can feed, where an inner step computes for `step_s`; NaN for a rate of 0: unknown."""
    sent, received = step_hop_bytes(stage)
    return StageLine(sent, received, 1 / step_s, bytes_per_s).use if bytes_per_s else math.nan


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time and bytes that a peer can expect."""

    join_s: float  # from the first byte of the state until every fragment meets: the state, and fragment sync if it came too slowly
    meeting_s: float  # for the payload of the largest fragment, both ways at once
    interval_steps: int  # the shortest mean countdown that the line carries
    interval_s: float
    day_bytes: float  # sent in a day of meetings at that interval; as many are received
    line_share: float  # of the line's capacity: more than half where even the longest countdown is too short


def estimate(plan: ModelPlan, gap_steps: int, bytes_per_s: float, step_s: float) -> Estimate:
    """Estimate what the line sets, for partners with the same rate each way and global steps that may be `gap_steps` apart."""
    state_s, fragments_s = plan.state_bytes / bytes_per_s, plan.round_bytes / bytes_per_s
    old_s = gap_steps * step_s / SYNC_SHARE
    interval_steps = afforded_steps(plan.round_bytes, bytes_per_s, step_s, line_share(plan.stage))
    round_s = MEETING_INTERVAL * interval_steps * step_s
    return Estimate(
        join_s=state_s + (fragments_s + math.ceil(fragments_s / old_s) * step_s if state_s > old_s else 0.0),  # a round ends at a boundary
        meeting_s=max(fragment.slow_bytes for fragment in plan.fragments) / bytes_per_s,
        interval_steps=interval_steps,
        interval_s=interval_steps * step_s,
        day_bytes=day_bytes(plan.round_bytes, interval_steps, step_s),
        line_share=plan.round_bytes / round_s / bytes_per_s,
    )


class Interval:
    """The interval that one peer affords. Call `update` about once a second."""

    def __init__(self, start_steps: int, round_bytes: int, share: float = LINE_SHARE) -> None:
        self.steps = start_steps
        self._line_share = share
        self._limit: Limit | None = None  # the one that holds; None until the first measurement
        self._round_bytes = round_bytes
        self._past: deque[Spent] = deque()

    @property
    def reason(self) -> str:
        """Why the interval is what it is, in words."""
        return self._limit.reason if self._limit else "nothing is measured yet"

    @property
    def is_for_line(self) -> bool:
        """Whether the line sets it: then calls by other peers must not exceed the line either."""
        return self._limit is not None and self._limit.is_lines

    def update(self, now: Spent, bytes_per_s: float) -> bool:
        """Update from the time spent so far and the line's slower rate (0: not measured yet); return whether the interval has changed."""
        self._past.append(now)
        while len(self._past) > 2 and now.since(self._past[1]).train_s >= WINDOW_S:
            self._past.popleft()
        spent = now.since(self._past[0])
        is_enough = spent.train_s >= LEAST_S or (self._limit is None and spent.own_steps >= LEAST_STEPS)
        if not is_enough or spent.own_steps < 1:
            return False
        limit = max(self._limits(spent, bytes_per_s), key=lambda limit: limit.steps)
        steps = min(math.ceil(limit.steps), LONGEST_STEPS, MOST_CHANGE * self.steps)
        steps = max(steps, self.steps // MOST_CHANGE)
        if self._limit and abs(steps - self.steps) <= STEADY * self.steps:
            return False
        self.steps, self._limit = steps, limit
        self._past = deque([now])  # measurements from here on belong to the new interval
        return True

    def _limits(self, spent: Spent, bytes_per_s: float) -> list[Limit]:
        limits = [Limit(SHORTEST_STEPS, "a peer calls once a step at most")]
        if bytes_per_s:
            limits.append(_line_limit(self._round_bytes, bytes_per_s, spent.train_s / spent.own_steps, self._line_share))
        blocked_share = spent.blocked_s / spent.train_s
        limits.append(Limit(self.steps * blocked_share / BLOCKED_SHARE, f"{percent_text(BLOCKED_SHARE)} of the time blocked"))
        if spent.training_cpu_s > 0:
            steps = self.steps * spent.sync_cpu_s / spent.training_cpu_s / PROCESSOR_SHARE
            limits.append(Limit(min(steps, MOST_FOR_PROCESSOR), f"{percent_text(PROCESSOR_SHARE)} of the processor time"))
        return limits


class Pace:
    """Keeps a replica's countdown at the interval: the manifest's, or the one that the peer affords."""

    def __init__(self, replica: Replica, emit: Callable[[IntervalSet | TrafficExpected], None]) -> None:
        outer = replica.manifest.outer
        self._replica = replica
        self._emit = emit
        self._report = NodeReport(0.0, 0.0)
        self._earlier_nodes_s = 0.0  # processor time of the node's predecessors
        self._first: tuple[int, float, float] | None = None  # own steps, time in them and time without work, at the first update
        self._expected: TrafficExpected | None = None  # as last emitted
        if outer.inner_steps == "auto" and not replica.own_steps:
            replica.countdown.pace(START_STEPS)
        plan = replica.plan
        share = line_share(plan.stage)
        self._interval = Interval(replica.countdown.inner_steps, plan.round_bytes, share) if outer.inner_steps == "auto" else None
        reason = self._interval.reason if self._interval else "the manifest says so"
        emit(IntervalSet(replica.countdown.inner_steps, reason))

    @property
    def min_call_steps(self) -> int:
        """Return the fewest inner steps between two meetings of a fragment, where the line sets the interval; else 0."""
        return self._interval.steps // 2 if self._interval is not None and self._interval.is_for_line else 0

    def update(self, report: NodeReport, train_s: float, blocked_s: float, coding_cpu_s: float, starved_s: float = 0.0) -> None:
        """Adapt the interval to the node's last report and the time spent so far. Call about once a second.

        `starved_s`: beside `train_s`, without work.
        """
        if self._interval is not None:
            self._adapt(report, train_s + starved_s, blocked_s, coding_cpu_s)
        self._expect(train_s, starved_s, report.probed_bytes_per_s)

    def _expect(self, train_s: float, starved_s: float, line_bytes_per_s: float) -> None:
        """Emit the expected traffic once steps have been measured, and whenever it has changed much."""
        replica = self._replica
        if self._first is None or replica.own_steps == self._first[0]:  # the wait before the first step says nothing
            self._first = replica.own_steps, train_s, starved_s
        first_steps, first_s, first_starved_s = self._first
        steps, spent_s = replica.own_steps - first_steps, train_s - first_s
        whole_s = spent_s + starved_s - first_starved_s
        if steps < 1 or whole_s < LEAST_S:
            return
        plan, interval_steps, step_s = replica.plan, replica.countdown.inner_steps, whole_s / steps
        use = math.nan if plan.stage is None else line_use(plan.stage, spent_s / steps, line_bytes_per_s)
        found, last = traffic(plan, interval_steps, step_s, is_measured=True, use=use), self._expected
        if last is None or not (_is_near(last.day_bytes, found.day_bytes) and _is_near_or_unknown(last.use, use)):
            self._expected = found
            self._emit(found)

    def _adapt(self, report: NodeReport, train_s: float, blocked_s: float, coding_cpu_s: float) -> None:
        assert self._interval is not None
        if report.cpu_s < self._report.cpu_s:  # a new node, which counts from zero
            self._earlier_nodes_s += self._report.cpu_s
        self._report = report
        training_cpu_s = time.process_time() + self._replica.program.cpu_s() - coding_cpu_s
        sync_cpu_s = self._earlier_nodes_s + report.cpu_s + coding_cpu_s
        if self._interval.update(Spent(self._replica.own_steps, train_s, blocked_s, training_cpu_s, sync_cpu_s), report.bytes_per_s):
            self._replica.countdown.pace(self._interval.steps)
            self._emit(IntervalSet(self._interval.steps, self._interval.reason))


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= EMITTED_CHANGE * other


def _is_near_or_unknown(value: float, other: float) -> bool:
    return math.isnan(other) if math.isnan(value) else _is_near(value, other)
