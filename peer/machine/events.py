"""Typed events of a peer: the only report of its processes, and the record behind status, dashboard and post-mortems.

Node and trainer send events to the supervisor (peer/machine/child.py), which folds them into the status (peer/machine/status.py) and is
the only writer of the file. An event is one line of JSON, on the pipe and in the file. Training never reads events: a full disk loses
events only.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, dataclass_transform

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from gossamer.peer.machine.renamed_events import renamed

if TYPE_CHECKING:
    from gossamer.protocol.run.manifest import AnyManifest

Figure = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]  # null in a line if it is not finite


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Stamped:
    """Fields of every event; makes a frozen dataclass of each subclass. Comparisons ignore the time."""

    ts: float = field(default_factory=lambda: round(time.time(), 6), kw_only=True, compare=False, repr=False)  # seconds since 1970
    event: str = field(default="", kw_only=True, repr=False)  # the subclass's name, its mark in a line

    def __init_subclass__(cls) -> None:
        cls.__annotations__["event"] = Literal[cls.__name__]
        setattr(cls, "event", field(default=cls.__name__, kw_only=True, repr=False))  # noqa: B010 - not for type checkers
        dataclass(frozen=True)(cls)


class PeerStarted(Stamped):
    """The peer was started; the events up to the next PeerStarted are one session."""

    peer_id: str  # base58
    earlier: dict[str, float] = field(default_factory=dict)  # totals of all earlier starts: `lifetime` in Status


class RunKnown(Stamped):
    """The manifest is on disk, so the trainer may begin."""

    run_id: str  # hexadecimal
    total_steps: int  # length of the run
    unit: str = "tokens"  # what training is counted in
    program: str = ""  # name, source and revision of a program run's program; empty for a text run
    step_tokens: int = 0  # of each inner step of every member; 0 in a program run, where that is each member's affair
    name: str = ""  # of the run
    stages: int = 1  # into which the model is cut

    @classmethod
    def of(cls, manifest: AnyManifest) -> RunKnown:
        """Make the event of a run's manifest."""
        run = manifest.run
        unit, program, step_tokens = manifest.unit, manifest.program_words, manifest.step_tokens
        return cls(manifest.run_id.hex(), run.total_steps, unit, program, step_tokens, run.name, manifest.num_stages)


class ModelBuilt(Stamped):
    """The trainer has built the model."""

    params: int
    bits_per_param: float  # what the codec sends one way in a meeting
    flops_per_token: float = 0.0  # of an inner step: six for each parameter that is multiplied by, and attention
    peak_flops: float = 0.0  # of the device a second, in the number format of the matrix products; 0 where it is not known
    coding: str = ""  # what codes messages: compiled, triton, or torch and why


class ComputingSet(Stamped):
    """How this peer computes its inner steps has changed."""

    precision: str  # of matrix products: bf16 or fp32
    devices: int  # that share each batch
    micro_batch: int  # sequences at a time on each
    recompute: bool  # whether activations are computed again in the backward pass
    compiled: bool
    reason: str  # why
    optimizer_on_host: bool = False  # whether the optimizer's state rests in the host's memory between steps


class TextRead(Stamped):
    """The operator's text was read, now or by an earlier start."""

    path: str
    num_files: int  # that were read
    num_bytes: int  # of text in them
    num_skipped: int  # files that were left out
    skipped: tuple[str, ...]  # a sentence about each of the first of them


class StateChanged(Stamped):
    """The state of the peer has changed."""

    state: str  # as in Status
    reason: str  # why, in words
    way_out: str = ""  # what ends it


class StageHeld(Stamped):
    """In a staged run: the stage that this peer holds is known."""

    stage: int  # counted from one
    count: int  # of stages


class StageMoved(Stamped):
    """In a staged run: this peer leaves its stage for one that nobody holds, or too few, or goes back. Node and trainer start again."""

    left: int  # counted from one
    stage: int  # that it holds from now on
    reason: str = ""  # why, in words


class HopsCarried(Stamped):
    """In a staged run: micro-batches that have passed through this peer since its node started, every few seconds if that has changed."""

    outcomes: dict[str, int]  # answered trained measured declined passed_over withdrawn
    repeated: int  # sent once more to the next stage
    lanes_below: int  # open to holders of the stage before
    lanes_above: int  # open to holders of the next stage
    sent: int  # bytes on lanes
    received: int
    loss: float | None = None  # of the last micro-batch, as the last stage measured it
    late: int = 0  # answers of the next stage that did not come in time
    compared: int = 0  # micro-batches that went to several holders of the next stage
    odd: int = 0  # of these: one answer was unlike the others


class PeersSeen(Stamped):
    """The number of peers in sight has changed."""

    num_peers: int  # other peers, known to be online


class AddressesChanged(Stamped):
    """The addresses of this peer have changed."""

    addresses: tuple[str, ...]


class ConnectionsChanged(Stamped):
    """Connections to other peers were opened or closed."""

    routes: dict[str, str]  # of open connections: PeerId (base58) to local, direct, punched or relayed


class StepDone(Stamped):
    """Progress of the trainer, about once a second; no loss and no learning rate without an inner step since the previous StepDone."""

    step: int  # own inner steps so far
    global_step: int  # the schedule's clock
    tokens: int  # trained by this peer so far
    loss: Figure  # nats per token, the mean since the previous StepDone; null without an inner step
    learning_rate: Figure  # of the last inner step; null without one
    tokens_per_second: Figure  # over the last ten seconds of training; 0 where nothing was trained since the previous StepDone
    train_s: Figure  # of this trainer process so far: in inner steps, and blocked between them
    blocked_s: Figure  # of these, in work for meetings and checkpoints: the trainer could not make inner steps
    training_cpu_s: Figure  # processor time of this trainer process so far, without its start and without the exchange thread
    coding_cpu_s: Figure  # of the exchange thread, which works for meetings beside the inner steps
    checkpoint_s: Figure = 0.0  # of blocked_s: for checkpoints
    evaluation_s: Figure = 0.0  # beside train_s: measuring the held-out loss
    starved_s: Figure = 0.0  # beside train_s: in a staged run, without work


class NodeSpent(Stamped):
    """Processor time of the node so far; written every few seconds while it may meet."""

    cpu_s: Figure  # processor time of the node process and its daemon, without their start


class MeetingDone(Stamped):
    """A meeting ended, with any outcome."""

    partner: str  # PeerId, base58
    fragment: int
    outcome: str  # MeetingOutcome in lower case: completed busy refused gated misbehaved failed abandoned
    reason: str  # why not completed; of a completed one, that the partner may not know it
    route: str  # how the partner was reached
    bytes_sent: int
    bytes_received: int
    seconds: Figure
    round_trip_s: Figure = math.nan  # from our decision to the partner's, its disk included; null where it decided first


class PartnerShunned(Stamped):
    """A partner's message was harmful, or its answers to micro-batches odd: it is not called for a time, and its calls are refused."""

    partner: str  # PeerId, base58
    reason: str  # one sentence: the evidence, and what was done
    until: Figure  # Unix seconds; null: for good


class IntervalSet(Stamped):
    """How often this peer meets has changed."""

    inner_steps: int  # mean countdown of a fragment
    reason: str  # what sets it


class TrafficExpected(Stamped):
    """How many bytes a day of training takes at the present interval."""

    day_bytes: Figure  # sent in meetings, and in hops of a staged run
    inner_steps: int  # the interval
    step_s: Figure  # duration of an inner step, without work included
    is_measured: bool  # whether step_s is; else it is assumed, and the line too
    day_received: Figure = math.nan  # received likewise; null in what earlier builds wrote: as many as sent
    day_hops: Figure = 0.0  # of day_bytes, in hops
    use: Figure = math.nan  # in a staged run, the share of the device that the line can feed; null: not known


class StepsGivenUp(Stamped):
    """This peer has set its global step back, because it was too far ahead of all others to meet them. Its weights stay."""

    before: int  # the global step
    after: int


class StepsLost(Stamped):
    """In a staged run: this peer takes over the global step of the other stages, and nobody gives newer weights of its stage."""

    checkpoint: int  # the global step of its weights
    after: int  # its global step from now on


class SoloStep(Stamped):
    """A fragment took its outer step without a partner."""

    fragment: int
    reason: str


class CheckpointSaved(Stamped):
    """A checkpoint is on disk."""

    step: int
    path: str
    num_bytes: int
    seconds: Figure  # for writing it, beside the inner steps
    stopped_s: Figure = 0.0  # that the trainer stood still, for the copy


class CheckpointFailed(Stamped):
    """A checkpoint could not be written; the earlier ones are untouched."""

    step: int
    reason: str


class CheckpointRejected(Stamped):
    """A checkpoint on disk is damaged; an earlier one is used."""

    path: str
    reason: str


class EvalDone(Stamped):
    """The held-out loss was measured."""

    step: int
    loss: Figure  # nats per token
    num_batches: int


class OutputsMoved(Stamped):
    """The effect of a meeting on this peer's outputs was measured."""

    fragment: int
    distance: Figure  # Jensen-Shannon, nats per token, between the outputs before and after, on a fixed held-out text


class StateTransferred(Stamped):
    """Slow weights and global step were adopted from other peers."""

    sources: tuple[str, ...]  # PeerIds, base58; who gave most comes first
    global_step: int  # of the oldest piece, taken over
    num_bytes: int  # of the whole
    fetched_bytes: int  # of these, in this start of the peer
    seconds: Figure


class FragmentSynced(Stamped):
    """A fragment sync ended: slow weights were fetched from another peer, which did not change its own."""

    source: str  # PeerId, base58
    fragment: int
    global_step: int  # of the source
    num_bytes: int  # received
    seconds: Figure
    reason: str  # why they were not taken over; empty when they were


class ResultTaken(Stamped):
    """The peer has adopted the run's result: from now on its weights equal it bit for bit."""

    name: str  # SHA-256 of the hashes of its pieces, hexadecimal
    sources: tuple[str, ...]  # PeerIds, base58; none where the weights are this peer's own
    num_bytes: int
    seconds: Figure


class NodeRestarted(Stamped):
    """The node process ended unexpectedly and was started again."""

    reason: str
    num_restarts: int  # in a row; starts at 1 again after a process that ran for ten minutes


class TrainerRestarted(Stamped):
    """The trainer process ended unexpectedly and was started again."""

    reason: str
    num_restarts: int  # in a row; starts at 1 again after a process that ran for ten minutes


class NodeStopped(Stamped):
    """The node does not run: no other peer is in sight, none is connected, and nobody reaches this one."""


class ClockSet(Stamped):
    """The machine's clock was set. Its times before and after this event are not comparable."""

    seconds: Figure  # by which it was set; negative: back


class LimitsSet(Stamped):
    """These limits hold from now on."""

    limits: dict[str, str]  # settings by name, as the operator wrote them; those that limit nothing are left out


class EnergyUsed(Stamped):
    """Energy that this start of the peer has used so far; written every 30 s."""

    watt_hours: Figure
    how: str  # measured, or estimated


class Warned(Stamped):
    """A condition that does harm if it persists."""

    topic: str  # at most one warning for each topic is in force
    words: str  # empty: the condition has ended


class EventsLost(Stamped):
    """Events before this one could not be written."""

    num_events: int
    reason: str


QUIET = "quiet"  # state of a node that pauses and whose meetings have ended
ENDED = "ended"  # state of a program that started its supervisor and that trains no longer; its reason is OVER at the end of the run
OVER = "the run is over"


class Report(Stamped):
    """The base of the events for the supervisor only: they are not written to the file."""


class ProcessReported(Report):
    """The state of the node or the trainer; the peer's state is composed of both."""

    state: str  # the trainer: ready training finishing; the node: joining waiting quiet, of states.py, without a trainer serving
    reason: str


class ProgressMade(Report):
    """Progress of a long operation, reported about once a second."""

    work: str  # the operation: downloading weights, tokenizing the text
    share: Figure  # completed part; 1 ends it


class GpuPowerRead(Report):
    """What the driver tells of the power of the GPUs."""

    watts: tuple[tuple[float | None, float | None], ...]  # of each: what it draws, and its limit; None: the driver does not tell


class OthersTrained(Report):
    """The number of tokens that the other peers in sight report, in total."""

    tokens: int


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """One member by its newest signed record. Every figure is the member's own claim; None where its release publishes none."""

    peer_id: str  # base58
    state: str  # training finished paused starting
    sequence: int  # of the record
    expires: float  # Unix seconds of this machine; a member that leaves publishes a record that expires at once
    step: int  # the member's global step
    tokens: int  # trained since it joined
    own_steps: int | None = None
    loss: float | None = None
    joined: int | None = None  # Unix seconds
    carried_mb: int | None = None  # in its meetings since it joined
    is_own: bool = False  # this peer itself
    stage: int = 0  # that it holds in a staged run, counted from one; 0: none said
    group: str = ""  # its Sybil group: the members of one invite, or met in one network, have one name; empty: a group by itself


@dataclass(frozen=True, slots=True)
class LaneSeen:
    """One lane, as it is now."""

    partner: str  # PeerId, base58
    stage: int  # that the partner holds, counted from one
    hops: int  # that have passed on it, declined ones too
    unanswered: int  # of these
    window: int  # that may be unanswered at once
    usual_s: float | None  # until the partner's answer; None: no answer yet, or the partner holds the stage before


class PipelineSeen(Report):
    """In a staged run: the lanes of this peer, and who holds the stages."""

    lanes: tuple[LaneSeen, ...]
    holders: tuple[int, ...]  # peers in sight that hold each stage, heard from lately, this one among them
    unheard: tuple[int, ...] = ()  # likewise, not heard from for two minutes


class MembersSeen(Report):
    """The members of the run, this peer among them, whose records are new since the event before."""

    members: tuple[MemberSeen, ...]


class CurveTold(Report):
    """What another member has seen of the run: its own claim, in an answer that it signed."""

    source: str  # PeerId, base58
    group: str  # its Sybil group, as in MemberSeen
    is_issuer: bool  # the manifest names it as an issuer of invites
    points: tuple[tuple[float | None, ...], ...]  # Unix seconds, step, loss and its range (None: none), live members, tokens


class MonthCounted(Report):
    """Network traffic of this peer in the current month (local time), over all its starts."""

    num_bytes: int


class TrafficCounted(Report):
    """Network traffic of this node process so far."""

    sent_bytes: int
    received_bytes: int


class ProcessFailed(Report):
    """The error that ends a process."""

    error: str
    hint: str
    exit_code: int
    final: bool  # a restart would fail in the same way


Event = Stamped  # any event

KINDS: Any = Union[tuple(kind for kind in (*Stamped.__subclasses__(), *Report.__subclasses__()) if kind is not Report)]  # noqa: UP007
_LINES: TypeAdapter[Event] = TypeAdapter(Annotated[KINDS, Field(discriminator="event")])


def older(path: Path) -> Path:
    """Name the file that a full log is moved to."""
    return path.with_name(path.name + ".1")


def to_line(event: Event) -> bytes:
    """Serialize an event to one line; numbers that JSON does not know (a loss that is not finite) become null."""
    return _LINES.dump_json(event) + b"\n"


def from_line(line: bytes) -> Event | None:
    """Read an event back, also by its names of before; None for a torn line, or for an event of another version."""
    with contextlib.suppress(ValidationError):
        return _LINES.validate_json(renamed(line))
    return None


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log, oldest first, with the older file's before; skips what cannot be read. A missing log is empty."""
    for file in (older(path), path):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
            yield from filter(None, map(from_line, lines))
