"""The trainer's side of the link: every request of the node is read, carried out and answered here.

Threads. Two threads use it, with one lock between them, `_weights`: its holder may change weights, meetings and counters.

- The trainer's thread calls the public methods. It holds the lock at all times except inside `while_weights_are_read`.
- The exchange's own thread reads the link. It carries out an `AnyTimeRequest` at once, without the lock: coding and copying only read
  tensors that nobody writes to (a meeting's snapshot, and slow weights, which a merge replaces). It carries out a `BesideRequest` if it
  gets the lock without waiting, that is while the weights are only read. Every other request waits for the next `at_boundary`. A `Check`
  needs the lock only if the loss is measured, and then waits for the weights to be only read.
- Requests that wait are carried out in the order of their arrival, and no `BesideRequest` overtakes them.
- A merge changes slow weights at once. The model's own follow at `Replica.move_fast_weights`, on the trainer's thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, Writer, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import TrainerEnd
from gossamer.peer.machine.events import Event, OutputsMoved, SoloStep, Warned
from gossamer.peer.model.accelerator import behind, finish, mark
from gossamer.peer.model.computing import output_distance
from gossamer.peer.trainer.fragment_state import OuterStep, bytes_on
from gossamer.peer.trainer.fragment_syncs import FragmentSyncs
from gossamer.peer.trainer.losses import MEASURE_TOPIC, MeasureFailed
from gossamer.peer.trainer.meeting import MeetingSide, bounded_weight, pack, unpack
from gossamer.peer.trainer.open_meeting import OpenMeeting, acquire
from gossamer.peer.trainer.probe import Judgement, ProbeCost
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.shared_state import adopt, write_result, write_state
from gossamer.peer.trainer.weights import uninterrupted
from gossamer.protocol.messages.messages import RunPhase

WAIT_S = 0.1  # the thread looks so often whether it must end
LATE_SHARE = 10  # of the allowed clock gap: a fragment without an outer step for a tenth of it is too old for a joining peer
NO_NODE = "no node to find a partner"


class TrainerExchange:
    """Answers the node for a replica. The loop calls `at_boundary` between inner steps and opens `while_weights_are_read` in between.

    `rng` draws the meetings that are probed; no partner may foretell it.
    """

    def __init__(
        self, link: TrainerEnd, payloads: PayloadFolder, replica: Replica, emit: Callable[[Event], None], rng: random.Random
    ) -> None:
        self.report = messages.NodeReport(0.0, 0.0)  # the last one
        self.has_begun = False  # the trainer trains, or has trained
        self.fits: tuple[int, ...] = ()  # in a staged run: the stages that fit, from 0
        self.min_call_steps = 0  # a meeting sooner than this after its fragment's last outer step is refused; 0: none
        self.window_s = 1.0  # a loss waits so long for the next gradient to be measured beside it, else for the boundary: there it blocks
        self.measures_next = False  # whether the next merge is measured: how far it moves the model's outputs
        self.computing_s = 0.0  # spent in inner steps so far, without what the machine gave to other programs
        self.cpu_s = 0.0  # processor time of the exchange's thread
        self.has_warned = False  # of a measurement that failed
        self.has_news = threading.Event()  # requests wait for the boundary
        self._link = link
        self._payloads = payloads
        self._replica = replica
        self._emit = emit
        self._meetings: dict[int, OpenMeeting] = {}
        self._probe = replica.program.new_probe(rng)
        self.probe_cost = ProbeCost.of(self._probe)
        self._rng = rng
        self._syncs = FragmentSyncs(replica.fragments, payloads)
        self._solo_later: set[int] = set()  # fragments whose solo step waits for the end of their meeting
        self._weights = threading.Lock()
        self._weights.acquire()
        self._still: torch.Event | None = None  # on a GPU: the point after which the weights are only read
        self._waiting: deque[messages.Request | int] = deque()  # for the boundary; a number is the link's new session
        self._read_session = 0  # of the last request that the thread has read
        self._session = 0  # of the last request that a boundary has carried out
        self._is_closing = False
        self._bug: BaseException | None = None
        device = replica.program.device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)  # a program may end without `close`

    # ------------------------------------------------------------------ for the training loop

    @property
    def has_node(self) -> bool:
        """Whether a node was connected at the last boundary."""
        return self._session != 0

    @property
    def holds_weights(self) -> bool:
        """Inside `while_weights_are_read`: whether the exchange's thread keeps the program from having them back."""
        return self._weights.locked()

    def start(self) -> None:
        """Start to read the link."""
        self._thread.start()

    def at_boundary(self) -> Iterator[messages.Start | messages.FinishDone | messages.Adopted | messages.WriteResult | messages.Adopt]:
        """Carry out and answer what waits for a step boundary; yield, in order, what the training loop must act upon.

        These are Start, FinishDone, the Adopted of a state that was accepted from peers that still train, and the request about a result.
        Exhaust the iterator before the next inner step. Raises an exception of the exchange's thread: a bug of ours.
        """
        if self._bug is not None:
            raise self._bug
        self.has_news.clear()
        is_used = False  # the device
        for _ in range(len(self._waiting)):
            request = self._waiting[0]  # until it is answered: Ctrl-C leaves it to the next boundary
            if isinstance(request, int):
                self._waiting.popleft()
                self._serve_new_node(request)
                continue
            is_used = True
            reply = self.carry_out(request)
            if messages.is_about_result(request):
                yield request  # the loop saves before the node may vote for this result: no restart takes the vote back
            with uninterrupted():
                self._waiting.popleft()
                if reply is not None:
                    self._link.send(reply, self._session)
            if messages.is_about_result(request):
                self.send_progress()
            elif isinstance(request, messages.Start | messages.FinishDone):
                yield request
            elif isinstance(reply, messages.Adopted) and reply.accepted:
                yield reply
        if is_used:
            finish(self._replica.program.device)

    @contextlib.contextmanager
    def while_weights_are_read(self) -> Iterator[None]:
        """Answer the node while the code inside only reads the weights. The model itself moves at the next step boundary.

        Weights that are sharded over ranks are read at step boundaries only: there this does nothing.
        """
        if self._replica.weights.is_sharded:
            yield
            return
        self._still = mark(self._replica.program.device)
        self._weights.release()
        try:
            yield
        finally:
            acquire(self._weights)

    def carry_out(self, request: messages.Request) -> messages.Reply | None:
        """Carry out one request at a step boundary, move the model by it, and return the reply. `at_boundary` calls it for the node."""
        meeting = self._meetings.get(request.meeting) if isinstance(request, messages.Apply) and self.measures_next else None
        outputs = self._replica.program.outputs
        before = None if meeting is None else outputs()
        self.measures_next &= meeting is None or before is not None  # a program without outputs has none to measure
        reply = self._answer(request)
        self._replica.move_fast_weights()
        if meeting is not None and before is not None and isinstance(reply, messages.Applied) and (after := outputs()) is not None:
            self._emit(OutputsMoved(meeting.fragment, output_distance([before, after])))
            self.measures_next = False
        return reply

    def announce(self, due: list[int]) -> None:
        """Ask the node for partners for fragments whose countdown ran out; without a node each takes a solo step, or is counted anew."""
        for fragment in due:
            if self._session:
                self._link.send(messages.Due(fragment, self._replica.phase), self._session)
            elif self._replica.manifest.outer.no_partner == "defer":
                self._replica.countdown.reset(fragment)
            else:
                self._solo_step(fragment, NO_NODE)
                self._replica.move_fast_weights()
        if due:
            finish(self._replica.program.device)

    def send_progress(self, *, done: bool = False) -> None:
        """Send the node the trainer's counters; `done`: the result is saved and the trainer ends."""
        own, has_begun = self._replica, self.has_begun
        self._link.send(messages.Progress(own.global_step, own.phase, has_begun, done, own.tokens, own.own_steps), self._session)

    def drop_all(self) -> None:
        """Forget everything that the node has begun."""
        for number in list(self._meetings):
            self._drop(number)
        self._syncs.forget()
        self._solo_later.clear()

    def take_last_solo_steps(self) -> None:
        """Drop every meeting and take the last averaging's step of every fragment alone: its slow weights become the fast ones."""
        self.drop_all()
        for fragment in range(len(self._replica.fragments)):
            self._replica.take_solo_step(fragment, RunPhase.FINISH)
        self._replica.move_fast_weights()

    def close(self) -> None:
        """End the thread and close the link."""
        self._is_closing = True
        if self._thread.ident is not None:
            self._thread.join()
        self._link.close()

    # ------------------------------------------------------------------ the exchange's thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._link.wait(WAIT_S)
                requests = self._link.poll()
                if self._link.session != self._read_session:
                    self._read_session = self._link.session
                    self._keep(self._read_session)
                for request in requests:
                    if not self._is_done_now(request):
                        self._keep(request)
                self.cpu_s = time.thread_time()
        except BaseException as error:
            self._bug = error
            self.has_news.set()

    def _keep(self, item: messages.Request | int) -> None:
        self._waiting.append(item)
        self.has_news.set()

    def _is_done_now(self, request: messages.Request) -> bool:
        """Carry out a request beside the inner step if it allows that; return whether it is done."""
        if self._is_any_time(request):
            with behind(self._snapshot_mark(request), self._stream):
                reply = self._answer(request)
            self._send(reply)
            return True
        if isinstance(request, messages.Apply) and request.meeting_id not in self._replica.applied:
            with behind(self._snapshot_mark(request), self._stream), contextlib.suppress(ValueError, torch.OutOfMemoryError):
                self._outer_step(request, may_measure=False)  # ahead of the merge, which answers with the error if there is one
        if not isinstance(request, messages.BesideRequest) or self._waiting or (self.measures_next and isinstance(request, messages.Apply)):
            return False
        waits = isinstance(request, messages.Check) and self.has_begun and self._replica.phase is RunPhase.TRAIN
        if self._is_for_boundary(request) or not self._weights.acquire(timeout=self.window_s if waits else 0.0):
            return False
        try:
            with behind(self._still, self._stream):
                reply = self._answer(request)
        finally:
            self._weights.release()
        self._send(reply)
        return True

    def _is_for_boundary(self, request: messages.Request) -> bool:
        """Return whether a request measures the loss, by a probe that cannot run beside the program."""
        if self._probe is None or self._probe.runs_beside:
            return False
        if not isinstance(request, messages.Apply):
            return isinstance(request, messages.Check)  # one that measures nothing is carried out at any time
        meeting = self._meetings.get(request.meeting)
        return meeting is not None and (meeting.step is None or meeting.step[0] != request.failed_blocks)

    def _is_any_time(self, request: messages.Request) -> bool:
        """Return whether a request needs no lock. A Check is judged here by its length, and needs one if the loss is to be measured."""
        if not isinstance(request, messages.Check):
            return isinstance(request, messages.AnyTimeRequest)
        is_after = behind(self._snapshot_mark(request), self._stream)
        with is_after, contextlib.suppress(ValueError, torch.OutOfMemoryError), self._holding_open(request.meeting) as meeting:
            self._judge(meeting, request)
            return not meeting.is_probed
        return True  # the answer is the error

    def _send(self, reply: messages.Reply | None) -> None:
        if reply is not None:
            self._link.send(reply, self._read_session)

    def _snapshot_mark(self, request: messages.Request) -> torch.Event | None:
        """Return the mark after the snapshot that a request works on; None where there is nothing to wait for."""
        meeting = self._meetings.get(request.meeting) if isinstance(request, messages.MeetingRequest) else None
        return None if meeting is None else meeting.side.taken

    # ------------------------------------------------------------------ every request

    def _answer(self, request: messages.Request) -> messages.Reply | None:
        """Carry out a request. A message, a file or a memory that does not allow it changes nothing and is the reply."""
        try:
            return self._carry_out(request)
        except (OSError, ValueError, torch.OutOfMemoryError, MeasureFailed) as error:
            if isinstance(error, MeasureFailed):
                self.has_warned = True
                self._emit(Warned(MEASURE_TOPIC, f"{error}; nothing is adopted"))
            private = "this peer cannot measure its weights now"  # the error may name files of the operator
            reason = private if isinstance(error, MeasureFailed) else getattr(error, "strerror", None) or str(error)
            reply = messages.not_done(request, reason)
            if reply is None:
                raise
            return reply

    def _carry_out(self, request: messages.Request) -> messages.Reply | None:
        replica = self._replica
        match request:
            case messages.Open():
                return self._open(request)
            case messages.Prepare():
                return self._prepare(request)
            case messages.Encode():
                with self._holding_open(request.meeting) as meeting:
                    return self._encode(meeting)
            case messages.Check():
                return self._check(request)
            case messages.Apply():
                return self._apply(request)
            case messages.Drop(number):
                fragment = self._drop(number)
                if fragment in self._solo_later:
                    self._solo_step_if_due(fragment)
            case messages.Solo(fragment):
                self._solo_step_if_due(fragment)
            case messages.Defer(fragment):
                if fragment in replica.countdown.due():
                    replica.countdown.reset(fragment)
            case messages.CopyState(name):
                write_state(replica, self._payloads, name)
            case messages.SketchSlow():
                self._syncs.sketch(request)
            case messages.CodeSlow():
                self._syncs.code(request)
            case messages.DecodeSlow():
                self._syncs.decode(request)
            case messages.MoveFragments():
                return self._syncs.move(request, replica)
            case messages.BringUp():
                self._take_overdue_steps()
            case messages.WriteResult(name):
                self.take_last_solo_steps()
                write_result(replica)
                return self._answer(messages.CopyState(name))
            case messages.Adopt():
                return adopt(replica, request, self.drop_all)
            case messages.StepBack(global_step):
                replica.global_step = min(replica.global_step, global_step)
            case messages.NodeReport():
                self.report = request
        return messages.Written(request.name, "") if isinstance(request, messages.WritingRequest | messages.BringUp) else None

    # ------------------------------------------------------------------ meetings

    def _open(self, request: messages.Open) -> messages.Reply:
        """Lock the fragment and take a snapshot of its fast weights."""
        replica, number, state = self._replica, request.meeting, self._replica.fragments[request.fragment]
        if replica.own_steps and replica.phase is RunPhase.TRAIN and state.since.steps < self.min_call_steps:
            raise ValueError("this line cannot carry a meeting so soon after the last")
        if state.meeting is not None:
            raise ValueError("the fragment is in another meeting")
        if number in self._meetings:
            raise ValueError("this meeting is open already")
        self._meetings[number] = OpenMeeting(number, request.fragment, MeetingSide(state))
        state.meeting = number
        return messages.Opened(number, state.since.tokens, replica.global_step, replica.phase, replica.own_steps)

    def _prepare(self, request: messages.Prepare) -> messages.Reply:
        """Form the message; write its sketch, or its payload where the codec has no sketch."""
        with self._holding_open(request.meeting) as meeting:
            tokens = meeting.side.since.tokens, request.partner_tokens
            weight = bounded_weight(*tokens) if self._replica.weighs_tokens(meeting.fragment, request.phase) else 0.5
            sketch = meeting.side.prepare(self._replica.rule_of(meeting.fragment, request.phase), weight, request.seed)
            meeting.partner_global_step = request.partner_global_step
            if not sketch.numel():
                return self._encode(meeting)
            return messages.SketchReady(meeting.number, self._write(meeting, File.OWN_SKETCH, sketch))

    def _encode(self, meeting: OpenMeeting) -> messages.Reply:
        payload = meeting.side.encode(self._read(meeting, File.PARTNER_SKETCH))
        return messages.PayloadReady(meeting.number, self._write(meeting, File.OWN_PAYLOAD, payload))

    def _check(self, request: messages.Check) -> messages.Reply:
        """Judge the partner's payload, and measure its gain if it is to be; one that is not accepted cannot be applied."""
        with self._holding_open(request.meeting) as meeting:
            self._judge(meeting, request)
            judgement = self._measure(meeting) if meeting.is_probed else None
            accepted, failed = not meeting.reason, "" if meeting.reason else pack(meeting.side.failed_blocks)
            is_harmful = judgement is not None and not accepted
            told = messages.Checked(meeting.number, accepted, meeting.reason or "", failed, is_harmful=is_harmful)
            if judgement is None or not judgement.is_evidence:
                return told
            return replace(told, gain=judgement.gain.value, deviation=judgement.deviation)

    def _judge(self, meeting: OpenMeeting, request: messages.Check) -> None:
        """Judge the partner's payload by its length, once, and draw whether its gain is measured."""
        if meeting.reason is None:
            payload = self._read(meeting, File.PARTNER_PAYLOAD)
            meeting.reason = meeting.side.judge(payload, request.share, request.most_part, request.place)
            if meeting.reason or self._probe is None:
                return
            must_probe = request.must_probe or not meeting.side.is_whole or self._replica.must_probe(meeting.partner_global_step)
            meeting.is_probed = self.probe_cost.is_drawn(must_probe=must_probe, computing_s=self.computing_s, rng=self._rng)

    def _measure(self, meeting: OpenMeeting) -> Judgement:
        """Measure what the merge would do to the loss on our own text; refuse a message that does harm."""
        assert self._probe is not None, "`_judge` asks for no measurement without one"
        gate, failed_blocks = self._replica.probe_gate, meeting.side.failed_blocks
        with self.probe_cost.counted():
            judgement, step = meeting.side.probe(self._probe, gate, failed_blocks, lag_steps=self._lag_steps(meeting))
        meeting.is_probed, meeting.reason, meeting.step = False, judgement.reason, (pack(failed_blocks), step)
        return judgement

    def _lag_steps(self, meeting: OpenMeeting) -> int:
        return self._replica.global_step - meeting.partner_global_step

    def _apply(self, request: messages.Apply) -> messages.Reply:
        """Take the outer step of a meeting that counts, once for each meeting id."""
        if request.meeting_id not in self._replica.applied:
            meeting, step = self._outer_step(request)
            with uninterrupted():  # merged and counted once, though the request may be carried out again
                meeting.side.merge(step)
                self._replica.journal(request.meeting_id)
                followed = meeting.partner_global_step if meeting.side.is_whole else 0
                self._replica.count_outer_step(meeting.fragment, followed, is_met=meeting.side.part > 0.0)
                self._solo_later.discard(meeting.fragment)
        self._drop(request.meeting)
        return messages.Applied(request.meeting)

    def _outer_step(self, request: messages.Apply, *, may_measure: bool = True) -> tuple[OpenMeeting, OuterStep]:
        """Compute the outer step of a meeting for the failed blocks of both sides, once. Raises ValueError, torch.OutOfMemoryError."""
        with self._holding_open(request.meeting) as meeting:
            if meeting.step is None or meeting.step[0] != request.failed_blocks:
                side = meeting.side
                failed = unpack(request.failed_blocks, side.state.codec.num_blocks, side.state.device)
                probe = self._probe if side.is_wider(failed) else None
                if probe is not None and not may_measure:
                    raise ValueError("the partner lists failed blocks beyond ours")
                if probe is not None and not self.probe_cost.is_affordable(self.computing_s, is_needed=True):
                    side.take_nothing()
                    probe = None
                with contextlib.nullcontext() if probe is None else self.probe_cost.counted():
                    step = side.step_as_decided(probe, self._replica.probe_gate, failed, lag_steps=self._lag_steps(meeting))
                meeting.step = request.failed_blocks, step
            return meeting, meeting.step[1]

    @contextlib.contextmanager
    def _holding_open(self, number: int) -> Iterator[OpenMeeting]:
        """Keep an open meeting from being dropped meanwhile. Raises ValueError where there is none."""
        meeting = self._meetings.get(number)
        with contextlib.nullcontext() if meeting is None else meeting.working:
            if meeting is None or meeting.is_closed:
                raise ValueError("no such meeting here: the trainer or the link was restarted")
            yield meeting

    def _drop(self, number: int) -> int | None:
        """Forget a meeting that was applied or does not count, and its files; return its fragment, None where there is no such meeting."""
        meeting = self._meetings.pop(number, None)
        if meeting is None:
            return None
        with meeting.working:
            meeting.is_closed = True
            for file in (File.OWN_SKETCH, File.OWN_PAYLOAD):
                self._payloads.remove(payload_name(number, file))
        self._replica.fragments[meeting.fragment].meeting = None
        return meeting.fragment

    def _write(self, meeting: OpenMeeting, file: File, data: Tensor) -> str:
        content = data.cpu().numpy().data
        self._payloads.write(payload_name(meeting.number, file), content)
        return hashlib.sha256(content).hexdigest()

    def _read(self, meeting: OpenMeeting, file: File) -> Tensor:
        return bytes_on(meeting.side.snapshot.device, self._payloads.read(payload_name(meeting.number, file)))

    # ------------------------------------------------------------------ without a partner

    def _solo_step_if_due(self, fragment: int) -> None:
        if fragment in self._replica.countdown.due():
            self._solo_step(fragment, "no partner answered in time")

    def _solo_step(self, fragment: int, reason: str) -> None:
        """Take the outer step of a fragment alone; while the fragment is in a meeting the step waits for the meeting's end."""
        if self._replica.fragments[fragment].meeting is not None:
            self._solo_later.add(fragment)
            return
        self._replica.take_solo_step(fragment, self._replica.phase)
        self._solo_later.discard(fragment)
        self._emit(SoloStep(fragment, reason))

    def _take_overdue_steps(self) -> None:
        """Take the outer step of fragments that have long waited for a partner: a joining peer fetches their slow weights."""
        replica = self._replica
        for fragment in replica.countdown.due():
            if replica.fragments[fragment].since.steps > replica.manifest.outer.max_clock_gap_steps // LATE_SHARE:
                self._solo_step(fragment, "a joining peer fetches these weights")

    # ------------------------------------------------------------------ the node itself

    def _serve_new_node(self, session: int) -> None:
        """Forget what the former node has begun; tell the new one, if there is one, about the model, the counters and due fragments."""
        self.drop_all()
        self._payloads.clear(Writer.TRAINER)  # nobody else would
        self._session = session
        self._link.send(messages.Built(self._replica.plan, self.fits), session)  # a node reads this first
        self.send_progress()
        self.announce(self._replica.countdown.due())
