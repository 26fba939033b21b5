"""What a peer says of itself: the one record behind `peer status`, the screen, the demo and the dashboards; folded from its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from peer.machine import events

VERSION = "0.1.0"
COUNTED_AS = {"completed": "completed", "busy": "refused", "refused": "refused"}  # any other outcome of a meeting: failed


@dataclass(frozen=True, slots=True)
class Status:
    """A peer's state, with the reason for it. Times are Unix seconds; counts are since this start of the peer unless named otherwise."""

    state: str = "starting"  # joining waiting training finishing leaving left done failed; without a trainer: seeding
    reason: str = ""
    since: float = 0.0
    way_out: str = ""  # what would end this state
    run_id: str = ""
    peer_id: str = ""
    step: int = 0  # the schedule clock
    own_steps: int = 0  # inner steps made by this peer, over all its sessions
    total_steps: int = 0
    tokens: int = 0
    loss: float | None = None  # nats per token, mean of the last second of training
    eval_loss: float | None = None
    tokens_per_second: float = 0.0
    train_seconds: float = 0.0  # in inner steps, and blocked between them
    blocked_seconds: float = 0.0  # of these, spent on synchronization at step boundaries
    processor_seconds: dict[str, float] = field(default_factory=lambda: {"training": 0.0, "coding": 0.0, "node": 0.0})
    peers_seen: int = 0
    meetings: dict[str, int] = field(default_factory=lambda: {"completed": 0, "solo": 0, "refused": 0, "failed": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"sent": 0, "received": 0})
    inner_steps: int = 0  # mean countdown of a fragment to its next meeting; 0: not known yet
    inner_steps_reason: str = ""  # what sets it
    bits_per_param: float = 0.0  # what the codec sends one way in a meeting
    params: int = 0
    lane_counts: dict[str, int] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    output_distance: float | None = None  # how far the last measured meeting moved the outputs: Jensen-Shannon, nats per token
    version: str = VERSION
    earlier_s: tuple[float, float] = (0.0, 0.0)  # train_seconds and blocked_seconds of earlier trainer processes; not shown
    earlier_cpu_s: dict[str, float] = field(default_factory=dict)  # processor_seconds of earlier processes; not shown

    def to_json(self) -> dict[str, Any]:
        """Return what is shown, JSON-able."""
        shown = asdict(self)
        del shown["earlier_s"], shown["earlier_cpu_s"]
        return shown


def apply(status: Status, event: events.Event) -> Status:
    """Return the status after an event. All of a session's events, in their order, give all of its status."""
    match event:
        case events.PeerStarted():
            return Status(peer_id=event.peer_id, since=event.ts)
        case events.StateChanged():
            since = status.since if event.state == status.state else event.ts
            return replace(status, state=event.state, reason=event.reason, way_out=event.way_out, since=since)
        case events.RunKnown():
            return replace(status, run_id=event.run_id, total_steps=event.total_steps)
        case events.ModelBuilt():
            return replace(status, params=event.params, bits_per_param=event.bits_per_param)
        case events.PeersSeen():
            return replace(status, peers_seen=event.num_peers)
        case events.AddressesChanged():
            return replace(status, addresses=list(event.addresses))
        case events.StepDone():
            return replace(_trained(status, event), loss=event.loss, tokens_per_second=event.tokens_per_second)
        case events.TrainerIdle():
            return replace(_trained(status, event), tokens_per_second=0.0)
        case events.EvalDone():
            return replace(status, eval_loss=event.loss)
        case events.OutputsMoved():
            return replace(status, output_distance=event.distance)
        case events.IntervalSet():
            return replace(status, inner_steps=event.inner_steps, inner_steps_reason=event.reason)
        case events.SoloStep():
            return replace(status, meetings=_plus(status.meetings, solo=1))
        case events.MeetingDone():
            return _met(status, event)
        case events.TrainerRestarted():
            return replace(_count_anew(status, "training", "coding"), earlier_s=(status.train_seconds, status.blocked_seconds))
        case events.NodeRestarted():
            return _count_anew(status, "node")
        case events.NodeSpent():
            return _used(status, node=event.cpu_s)
        case _:  # it changes nothing that is shown
            return status


def _trained(status: Status, event: events.StepDone | events.TrainerIdle) -> Status:
    return replace(
        _used(status, training=event.training_cpu_s, coding=event.coding_cpu_s),
        step=event.clock_steps,
        own_steps=event.step,
        tokens=event.tokens,
        train_seconds=status.earlier_s[0] + event.train_s,
        blocked_seconds=status.earlier_s[1] + event.blocked_s,
    )


def _used(status: Status, **cpu_s: float) -> Status:
    """Note the processor time of what runs now."""
    together_s = {name: status.earlier_cpu_s.get(name, 0.0) + seconds for name, seconds in cpu_s.items()}
    return replace(status, processor_seconds=status.processor_seconds | together_s)


def _count_anew(status: Status, *names: str) -> Status:
    """Note that what runs from now on begins to count its processor time at zero."""
    return replace(status, earlier_cpu_s=status.earlier_cpu_s | {name: status.processor_seconds[name] for name in names})


def _met(status: Status, done: events.MeetingDone) -> Status:
    lanes = _plus(status.lane_counts, **{done.lane: 1}) if done.outcome == "completed" else status.lane_counts
    return replace(
        status,
        meetings=_plus(status.meetings, **{COUNTED_AS.get(done.outcome, "failed"): 1}),
        bytes=_plus(status.bytes, sent=done.bytes_sent, received=done.bytes_received),
        lane_counts=lanes,
    )


def _plus(counts: Mapping[str, int], **more: int) -> dict[str, int]:
    return {**counts, **{name: counts.get(name, 0) + number for name, number in more.items()}}
