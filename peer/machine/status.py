"""The status of a peer: one record behind terminal, page, JSON and metrics, folded from its events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from typing import Any

from gossamer.peer.machine import events
from gossamer.peer.machine.history import History, HistoryPoint
from gossamer.peer.machine.partners import COUNTED_AS, Partners, after_meeting, routes, with_routes, without_routes

VERSION = "0.1.0"
HOP_COUNTS = "repeated", "late", "sent", "received"
MANY_FAILURES = 3  # meetings in a row before a warning
AT_THE_END = ("step", "total_steps", "tokens", "own_steps")  # of a start: they hold until the trainer of the next one reports
OVER_ALL_STARTS = ("seconds", "train_seconds", "meetings", "sent", "received", "watt_hours")  # what `lifetime` sums up


@dataclass(frozen=True, slots=True)
class Status:
    """A peer's state, with the reason for it. Times are Unix seconds; counts are since this start of the peer unless named otherwise."""

    state: str = "starting"  # one of states.STATES
    reason: str = ""
    since: float = 0.0
    way_out: str = ""  # what ends this state
    run_id: str = ""
    peer_id: str = ""
    step: int = 0  # the schedule clock
    own_steps: int = 0  # inner steps made by this peer, over all its sessions
    total_steps: int = 0
    tokens: int = 0
    loss: float | None = None  # of a text run in nats per token, mean of the last second of training
    eval_loss: float | None = None
    tokens_per_second: float = 0.0
    train_seconds: float = 0.0  # in inner steps, and blocked between them
    blocked_seconds: float = 0.0  # of these, spent on synchronization and checkpoints at step boundaries
    processor_seconds: dict[str, float] = field(default_factory=lambda: {"training": 0.0, "coding": 0.0, "node": 0.0})
    peers_seen: int = 0
    meetings: dict[str, int] = field(default_factory=lambda: {"completed": 0, "solo": 0, "refused": 0, "failed": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"sent": 0, "received": 0})
    month_bytes: int = 0  # network traffic in this calendar month
    inner_steps: int = 0  # mean countdown of a fragment to its next meeting; 0: not known yet
    inner_steps_reason: str = ""  # what sets it
    expected_traffic: dict[str, Any] = field(default_factory=dict)  # as in TrafficExpected
    bits_per_param: float = 0.0  # what the codec sends one way in a meeting
    params: int = 0
    checkpoint_seconds: float = 0.0  # of blocked_seconds: for checkpoints
    evaluation_seconds: float = 0.0  # beside train_seconds: measuring the held-out loss
    computing: dict[str, Any] = field(default_factory=dict)  # the inner step, as in ComputingSet
    text: dict[str, Any] = field(default_factory=dict)  # that the operator gave, as in TextRead
    coding: str = ""  # what codes messages: compiled, triton, or torch and why; empty before the model is built
    addresses: list[str] = field(default_factory=list)
    output_distance: float | None = None  # how far the last measured meeting moved the outputs: Jensen-Shannon, nats per token
    energy: dict[str, Any] = field(default_factory=lambda: {"watt_hours": 0.0, "how": ""})
    gpu_power: list[dict[str, float | None]] = field(default_factory=list)  # of each GPU: draw_watts, limit_watts
    limits: dict[str, str] = field(default_factory=dict)  # in force: settings by name
    progress: dict[str, Any] | None = None  # of a long operation: its name and completed share
    unit: str = "tokens"  # what training is counted in: the keys named after tokens count these
    program: str = ""  # name, source and revision of a program run's program; empty for a text run
    run_name: str = ""
    stage: str = ""  # in a staged run: which stage this peer holds, as "2 of 3"
    hops: dict[str, Any] = field(default_factory=dict)  # in a staged run: as in HopsCarried, of this start of the peer
    lanes: list[dict[str, Any]] = field(default_factory=list)  # in a staged run: each as in LaneSeen
    stage_holders: list[int] = field(default_factory=list)  # in a staged run: peers in sight that hold each stage, heard from lately
    stage_unheard: list[int] = field(default_factory=list)  # likewise, not heard from for two minutes
    stage_move: str = ""  # in a staged run: from which stage this peer has moved to which in this start, and why
    lost_steps: int = 0  # in a staged run: of the only copy of a stage, which went on from an older checkpoint, in this start
    starved_seconds: float = 0.0  # in a staged run, beside train_seconds: without work
    given_up_steps: int = 0  # by which the schedule clock was set back, too far ahead of all others, in this start
    started: float = 0.0
    version: str = VERSION
    # Fields that to_json leaves out:
    earlier: Mapping[str, float] = field(default_factory=dict)  # `lifetime` when it started
    tokens_of_others: int = 0  # tokens that the peers in sight report
    updated: float = 0.0  # time of the newest event
    warned: Mapping[str, str] = field(default_factory=dict)  # topic: words
    failed_in_a_row: int = 0  # meetings
    partners: Partners = field(default_factory=dict)
    history: History = History()
    flops: tuple[float, float] = (0.0, 0.0)  # per token, and the device's peak per second
    earlier_s: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)  # of earlier processes, in the order of _seconds
    earlier_hops: Mapping[str, Any] = field(default_factory=dict)  # `hops` of earlier nodes
    earlier_cpu_s: Mapping[str, float] = field(default_factory=dict)  # processor_seconds of earlier processes

    @property
    def warnings(self) -> list[str]:
        """Conditions that do harm if they persist."""
        return [words for words in self.warned.values() if words]

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization of the inner steps; None if the device's peak is not known."""
        per_token, peak = self.flops
        return per_token * self.tokens_per_second / peak if peak else None

    @property
    def token_share(self) -> float | None:
        """This peer's share of the tokens that all peers in sight have trained; None before the first token."""
        together = self.tokens + self.tokens_of_others
        return self.tokens / together if together else None

    @property
    def lifetime(self) -> dict[str, float]:
        """Totals since this peer first joined, over all its starts."""
        now = {
            "seconds": max(0.0, self.updated - self.started),
            "train_seconds": self.train_seconds,
            "meetings": self.meetings["completed"],
            "sent": self.bytes["sent"] + self.hops.get("sent", 0),
            "received": self.bytes["received"] + self.hops.get("received", 0),
            "watt_hours": self.energy["watt_hours"],
        }
        return {"joined": self.earlier.get("joined", self.started)} | {
            name: self.earlier.get(name, 0) + now[name] for name in OVER_ALL_STARTS
        }

    def to_json(self) -> dict[str, Any]:
        """Return the public keys as a JSON-able object; a number that is not finite is null."""
        values = ((name, getattr(self, name)) for name in SHOWN)
        shown = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values}
        return shown | {
            "mfu": self.mfu,
            "token_share": self.token_share,
            "loss_trend": self.history.loss_trend if self.state == "training" else None,
            "ends": self.history.ends(self.total_steps) if self.state == "training" else None,
            "routes": routes(self.partners),
            "warnings": self.warnings,
            "lifetime": self.lifetime,
        }


NAMES = [field.name for field in fields(Status)]
SHOWN = NAMES[: NAMES.index("version") + 1]  # by `to_json`


def apply(status: Status, event: events.Event) -> Status:
    """Return the status after an event. The events of a session, in order, determine its status."""
    return replace(_apply(status, event), updated=event.ts)


def of_events(happened: Iterable[events.Event]) -> Status:
    """Fold events, in their order, into a status."""
    return reduce(apply, happened, Status())


def _apply(status: Status, event: events.Event) -> Status:
    match event:
        case events.PeerStarted():
            step, total_steps, tokens, own_steps = (int(event.earlier.get(name, 0)) for name in AT_THE_END)
            return Status(
                peer_id=event.peer_id, since=event.ts, started=event.ts, earlier=event.earlier,
                step=step, total_steps=total_steps, tokens=tokens, own_steps=own_steps,
            )  # fmt: skip
        case events.StateChanged():
            since = status.since if event.state == status.state else event.ts
            rate = status.tokens_per_second if event.state == "training" else 0.0
            progress = status.progress if event.state == status.state else None
            changed = replace(status, state=event.state, reason=event.reason, way_out=event.way_out, since=since)
            begins = event.state == "training" != status.state
            history = replace(status.history, pace_s=event.ts) if begins else status.history
            return replace(changed, tokens_per_second=rate, progress=progress, history=history)
        case events.RunKnown():
            known = replace(status, run_id=event.run_id, run_name=event.name, total_steps=event.total_steps)
            return replace(known, unit=event.unit, program=event.program)
        case events.ModelBuilt():
            flops = event.flops_per_token, event.peak_flops
            return replace(status, params=event.params, bits_per_param=event.bits_per_param, flops=flops, coding=event.coding)
        case events.ComputingSet():
            return replace(status, computing=figures(event))
        case events.TextRead():
            return replace(status, text=figures(event))
        case events.StageHeld():
            return replace(status, stage=f"{event.stage} of {event.count}")
        case events.HopsCarried():
            return replace(status, hops=_with_earlier(event, status.earlier_hops))
        case events.PipelineSeen():
            holders, unheard = list(event.holders), list(event.unheard)
            return replace(status, lanes=[asdict(lane) for lane in event.lanes], stage_holders=holders, stage_unheard=unheard)
        case events.StageMoved():
            count = status.stage.partition(" of ")[2]
            stage = f"{event.stage} of {count}" if count else ""
            return replace(status, stage=stage, stage_move=f"from stage {event.left} to stage {event.stage}: {event.reason}")
        case events.StepsLost():
            return replace(status, lost_steps=status.lost_steps + event.after - event.checkpoint)
        case events.OthersTrained():
            return replace(status, tokens_of_others=event.tokens)
        case events.MonthCounted():
            return replace(status, month_bytes=event.num_bytes)
        case events.PeersSeen():
            return replace(status, peers_seen=event.num_peers)
        case events.AddressesChanged():
            return replace(status, addresses=list(event.addresses))
        case events.ConnectionsChanged():
            return replace(status, partners=with_routes(status.partners, event))
        case events.StepDone():
            return _apply_step(status, event)
        case events.EvalDone():
            return replace(status, eval_loss=event.loss, history=status.history.add_eval(event.ts, status.step, event.loss))
        case events.OutputsMoved():
            return replace(status, output_distance=event.distance)
        case events.IntervalSet():
            return replace(status, inner_steps=event.inner_steps, inner_steps_reason=event.reason)
        case events.TrafficExpected():
            return replace(status, expected_traffic={name: _known(value) for name, value in figures(event).items()})
        case events.StateTransferred():
            return replace(status, step=event.global_step, history=replace(status.history, pace_s=event.ts))
        case events.StepsGivenUp():
            given_up = status.given_up_steps + event.before - event.after
            return replace(status, step=event.after, given_up_steps=given_up, history=replace(status.history, pace_s=event.ts))
        case events.NodeStopped():
            alone = replace(status, peers_seen=0, tokens_of_others=0, addresses=[], partners=without_routes(status.partners))
            return replace(alone, lanes=[], stage_holders=[], stage_unheard=[], earlier_hops=status.hops)
        case events.ClockSet():
            return _set_clock(status, event.seconds, event.ts)
        case events.SoloStep():
            return replace(status, meetings=_add_counts(status.meetings, solo=1))
        case events.MeetingDone():
            return _apply_meeting(status, event)
        case events.NodeSpent():
            return _add_cpu_time(status, node=event.cpu_s)
        case events.ProgressMade():
            is_shown = event.share < 1 and status.state in ("starting", "joining")  # a peer that trains fetches weights beside
            return replace(status, progress={"work": event.work, "share": event.share} if is_shown else None)
        case events.LimitsSet():
            return replace(status, limits=event.limits)
        case events.GpuPowerRead():
            return replace(status, gpu_power=[{"draw_watts": draw, "limit_watts": limit} for draw, limit in event.watts])
        case events.EnergyUsed():
            return replace(status, energy={"watt_hours": event.watt_hours, "how": event.how})
        case _:
            return _apply_trouble(status, event)


def figures(event: events.Event) -> dict[str, Any]:
    """Return the fields of an event by name, without its time and kind."""
    return {field.name: getattr(event, field.name) for field in fields(event) if field.name not in ("ts", "event")}


def _with_earlier(event: events.HopsCarried, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hops of this start of the peer: a restarted node counts from zero."""
    now = figures(event)
    if not earlier:
        return now
    summed = {name: now[name] + earlier[name] for name in HOP_COUNTS}
    return now | summed | {"outcomes": dict(Counter(now["outcomes"]) + Counter(earlier["outcomes"]))}


def _known(value: Any) -> Any:
    """Return a figure, None for one that is not known."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _apply_trouble(status: Status, event: events.Event) -> Status:
    """Apply the events about failures and recoveries."""
    match event:
        case events.TrainerRestarted():
            anew = replace(_count_anew(status, "training", "coding"), earlier_s=_seconds(status))
            return _warn(anew, "trainer", _restart_warning("trainer", event))
        case events.NodeRestarted():
            return _warn(_count_anew(status, "node"), "node", _restart_warning("node", event))
        case events.CheckpointFailed():
            return _warn(status, "checkpoint", f"no checkpoint could be saved at step {event.step}: {event.reason}")
        case events.CheckpointSaved():
            return _warn(_warn(status, "checkpoint", ""), "trainer", "")  # the trainer works again
        case events.EventsLost():
            return _warn(status, "events", f"{event.num_events} events were not written: {event.reason}")
        case events.Warned():
            return _warn(status, event.topic, event.words)
        case _:  # without effect on the status
            return status


def _restart_warning(name: str, event: events.TrainerRestarted | events.NodeRestarted) -> str:
    """Return the warning for a process that failed and was restarted; empty if a settings change or pause had stopped it."""
    return f"the {name} ended and was started again: {event.reason}" if event.num_restarts else ""


def _warn(status: Status, topic: str, words: str) -> Status:
    return replace(status, warned={**status.warned, topic: words})


def _apply_step(status: Status, event: events.StepDone) -> Status:
    train_s, blocked_s, checkpoint_s, evaluation_s, starved_s = status.earlier_s
    now = replace(
        _add_cpu_time(status, training=event.training_cpu_s, coding=event.coding_cpu_s),
        step=event.global_step,
        own_steps=event.step,
        tokens=event.tokens,
        loss=event.loss if has_stepped(event) else status.loss,  # without an inner step the last loss remains
        tokens_per_second=event.tokens_per_second if status.state == "training" else 0.0,  # no rate of ten seconds ago beside another state
        train_seconds=train_s + event.train_s,
        blocked_seconds=blocked_s + event.blocked_s,
        checkpoint_seconds=checkpoint_s + event.checkpoint_s,
        evaluation_seconds=evaluation_s + event.evaluation_s,
        starved_seconds=starved_s + event.starved_s,
    )
    share = now.blocked_seconds / now.train_seconds if now.train_seconds else 0.0
    point = HistoryPoint(
        event.ts, now.step, event.loss, event.tokens_per_second, share,
        now.meetings["completed"], now.meetings["failed"],
        now.bytes["sent"] + now.hops.get("sent", 0), now.bytes["received"] + now.hops.get("received", 0),
    )  # fmt: skip
    return replace(now, history=now.history.add(point))


def has_stepped(event: events.StepDone) -> bool:
    """Return whether there was an inner step since the previous StepDone."""
    return not math.isnan(event.learning_rate)


def _seconds(status: Status) -> tuple[float, float, float, float, float]:
    """Return where the trainer's time went so far."""
    blocked_s, checkpoint_s = status.blocked_seconds, status.checkpoint_seconds
    return status.train_seconds, blocked_s, checkpoint_s, status.evaluation_seconds, status.starved_seconds


def _add_cpu_time(status: Status, **cpu_s: float) -> Status:
    """Add the processor time of the current processes to that of earlier ones."""
    together_s = {name: status.earlier_cpu_s.get(name, 0.0) + seconds for name, seconds in cpu_s.items()}
    return replace(status, processor_seconds=status.processor_seconds | together_s)


def _count_anew(status: Status, *names: str) -> Status:
    """Keep the processor time so far as the base: a restarted process counts from zero."""
    return replace(status, earlier_cpu_s={**status.earlier_cpu_s} | {name: status.processor_seconds[name] for name in names})


def _apply_meeting(status: Status, done: events.MeetingDone) -> Status:
    kind = COUNTED_AS.get(done.outcome, "failed")
    in_a_row = {"completed": 0, "failed": status.failed_in_a_row + 1}.get(kind, status.failed_in_a_row)
    words = f"the last {in_a_row} meetings failed, the last one: {done.reason}" if in_a_row >= MANY_FAILURES else ""
    works = _warn(status, "node", "") if kind == "completed" else status
    return replace(
        _warn(works, "meetings", words),
        meetings=_add_counts(status.meetings, **{kind: 1}),
        bytes=_add_counts(status.bytes, sent=done.bytes_sent, received=done.bytes_received),
        partners=after_meeting(status.partners, done),
        failed_in_a_row=in_a_row,
    )


def _set_clock(status: Status, seconds: float, now_s: float) -> Status:
    """Move all earlier times: what was a minute ago by the machine's clock before is a minute ago by its new time."""
    partners = {peer_id: replace(row, seen=min(row.seen + seconds, now_s)) for peer_id, row in status.partners.items()}
    joined = {"joined": status.earlier["joined"] + seconds} if "joined" in status.earlier else {}
    return replace(
        status,
        since=min(status.since + seconds, now_s),
        started=status.started + seconds,
        earlier={**status.earlier, **joined},
        partners=partners,
        history=status.history.moved(seconds, now_s),
    )


def _add_counts(counts: Mapping[str, int], **more: int) -> dict[str, int]:
    return {**counts, **{name: counts.get(name, 0) + number for name, number in more.items()}}
