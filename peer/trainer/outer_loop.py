"""The outer loop of one replica: the meetings of all its fragments, as the link's requests and files see them.

Synchronous, on the trainer's thread and device, but for `code` and `step_ahead`, which a second thread may call. A fragment is in at most
one meeting; while it is, its slow weights and momentum stand still and the inner steps go on in the fast weights. Every refusal to act
leaves all state as it was. What a meeting computes stands in meeting.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.noloco import FINISH, NoLoCo
from gossamer.peer.link import records as ask
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.records import File, payload_name
from gossamer.peer.trainer.fragment_state import FragmentState, OuterStep, Since
from gossamer.peer.trainer.meeting import MeetingSide, bounded_weight
from gossamer.peer.trainer.pulling import Pulls
from gossamer.peer.trainer.shared_state import payload_tensor, write_state
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.newest import keep_newest

JOURNALED = 256  # meetings remembered as applied; the node never asks for an older one again


class OpenMeeting:
    """One meeting in the trainer: its side, and its files. `code` and `step` may be called from another thread than the opener's."""

    def __init__(self, number: int, fragment: int, side: MeetingSide, rule: NoLoCo, payloads: PayloadFolder) -> None:
        self.fragment = fragment
        self.side = side
        self.partner_clock_steps = 0
        self._number = number
        self._rule = rule  # while the run trains
        self._payloads = payloads
        self._step: tuple[str, OuterStep] | None = None  # and the failed blocks for which it holds
        self._is_closed = False
        self._working = threading.Lock()

    def code(self, request: ask.CodingRequest) -> ask.Reply:
        """Carry out one stage. What cannot be carried out is answered by Unavailable and changes nothing."""
        with self._working:
            if self._is_closed:
                return _unknown(self._number)
            try:
                match request:
                    case ask.Prepare():
                        return self._prepare(request)
                    case ask.Encode():
                        return self._encode()
                    case ask.Check():
                        return self._check()
            except (ValueError, OSError, torch.OutOfMemoryError) as error:  # what no honest partner sends; a full disk or device
                return ask.Unavailable(self._number, str(error))

    def step(self, failed_blocks: str) -> OuterStep | None:
        """Compute the outer step for the failed blocks of both sides, once; None for a meeting that was closed.

        Raises ValueError for a bitmap of another size, and when nothing was accepted.
        """
        with self._working:
            if self._is_closed:
                return None
            if self._step is None or self._step[0] != failed_blocks:
                state = self.side.state
                self._step = failed_blocks, self.side.step(unpack(failed_blocks, state.codec.num_blocks, state.device))
            return self._step[1]

    def close(self) -> None:
        """Wait for what a second thread is doing here, and remove the meeting's own files; nothing is carried out any more."""
        with self._working:
            self._is_closed = True
            for file in (File.OWN_SKETCH, File.OWN_PAYLOAD):
                self._payloads.remove(payload_name(self._number, file))

    def _prepare(self, request: ask.Prepare) -> ask.Reply:
        """Form the message; write the sketch, or the payload where the codec has no sketch."""
        finish = request.phase is RunPhase.FINISH
        weight = 0.5 if finish else bounded_weight(self.side.since.tokens, request.partner_tokens)
        sketch = self.side.prepare(FINISH if finish else self._rule, weight, request.seed)
        self.partner_clock_steps = request.partner_clock_steps
        if not sketch.numel():
            return self._encode()
        return ask.SketchReady(self._number, self._write(File.OWN_SKETCH, sketch))

    def _encode(self) -> ask.Reply:
        payload = self.side.encode(self._read(File.PARTNER_SKETCH))
        return ask.PayloadReady(self._number, self._write(File.OWN_PAYLOAD, payload))

    def _check(self) -> ask.Reply:
        """Judge the partner's payload; what is not accepted cannot be applied."""
        reason = self.side.judge(self._read(File.PARTNER_PAYLOAD))
        return ask.Checked(self._number, not reason, reason, "" if reason else pack(self.side.failed_blocks))

    def _write(self, file: File, data: Tensor) -> str:
        content = data.cpu().numpy().data
        self._payloads.write(payload_name(self._number, file), content)
        return hashlib.sha256(content).hexdigest()

    def _read(self, file: File) -> Tensor:
        return payload_tensor(self._payloads, payload_name(self._number, file), self.side.snapshot.device)


class OuterLoop:
    """Slow weights and meetings of one replica. `parameters` are the model's own tensors, by name, and are written to."""

    def __init__(
        self,
        codecs: tuple[FragmentCodec, ...],
        parameters: Mapping[str, Tensor],
        rule: NoLoCo,  # while the run trains
        payloads: PayloadFolder,
        on_outer_step: Callable[[int, int], None],  # (fragment, partner's clock or 0)
    ) -> None:
        self.has_momentum = rule.alpha > 0.0
        self.fragments = tuple(FragmentState(codec, parameters, self.has_momentum) for codec in codecs)
        self.applied: dict[str, None] = {}
        self._rule = rule
        self.pulls = Pulls(self.fragments, payloads)
        self._payloads = payloads
        self._on_outer_step = on_outer_step
        self._meetings: dict[int, OpenMeeting] = {}

    def count(self, num_tokens: int) -> None:
        """Credit an inner step to every fragment."""
        for fragment in self.fragments:
            fragment.count(num_tokens)

    def miss(self, num_steps: int) -> None:
        """Tell every fragment that the schedule clock went on by so many steps that were not ours."""
        for fragment in self.fragments:
            fragment.miss(num_steps)

    # ------------------------------------------------------------------ meetings

    def answer(self, request: ask.MeetingRequest, clock_steps: int, phase: RunPhase) -> ask.Reply:
        """Carry out one step of a meeting, while the weights stand still; the model follows at the next `move`.

        What cannot be is answered by Unavailable and changes nothing.
        """
        if not isinstance(request, ask.Open | ask.Apply):
            return self.code(request)
        try:
            return self._open(request, clock_steps, phase) if isinstance(request, ask.Open) else self._apply(request)
        except (ValueError, torch.OutOfMemoryError) as error:
            return ask.Unavailable(request.meeting, str(error))

    def code(self, request: ask.CodingRequest) -> ask.Reply:
        """Carry out what needs no step boundary; may be called from a second thread. Unavailable as `answer`."""
        meeting = self._meetings.get(request.meeting)
        return _unknown(request.meeting) if meeting is None else meeting.code(request)

    def write(self, request: ask.WritingRequest) -> ask.Written:
        """Write what others fetch, or read what was pulled; may be called from a second thread."""
        try:
            match request:
                case ask.CopyState():
                    write_state(self.fragments, self.has_momentum, self._payloads, request.name)
                case ask.SketchSlow():
                    self.pulls.sketch(request)
                case ask.CodeSlow():
                    self.pulls.code(request)
                case ask.DecodeSlow():
                    self.pulls.decode(request)
        except (OSError, ValueError, torch.OutOfMemoryError) as error:
            return ask.Written(request.name, getattr(error, "strerror", None) or str(error))
        return ask.Written(request.name, "")

    def step_ahead(self, request: ask.Apply) -> None:
        """Compute the outer step that `answer` will take with the same request; may be called from a second thread.

        Raises what `answer` would answer by Unavailable: ValueError, torch.OutOfMemoryError.
        """
        meeting = self._meetings.get(request.meeting)
        if meeting is not None and request.meeting_id not in self.applied:
            meeting.step(request.failed_blocks)

    def snapshot_taken(self, number: int) -> torch.cuda.Event | None:
        """Return the mark after an open meeting's snapshot; None where there is nothing to wait for."""
        meeting = self._meetings.get(number)
        return None if meeting is None else meeting.side.taken

    def fragment_of(self, number: int) -> int | None:
        """Return the fragment of an open meeting; None where there is no such meeting."""
        meeting = self._meetings.get(number)
        return None if meeting is None else meeting.fragment

    def drop(self, number: int) -> int | None:
        """Forget a meeting that has been decided or does not count, and return its fragment; None when there is no such meeting."""
        meeting = self._meetings.pop(number, None)
        if meeting is None:
            return None
        meeting.close()
        self.fragments[meeting.fragment].meeting = None
        return meeting.fragment

    def drop_all(self) -> None:
        """Forget every meeting: none can be decided any more."""
        for number in list(self._meetings):
            self.drop(number)
        self.pulls.forget()

    def move(self) -> None:
        """Move the model by what counts: at a step boundary."""
        for fragment in self.fragments:
            fragment.move()

    def solo(self, fragment: int, phase: RunPhase) -> bool:
        """Take the outer step of a fragment alone, the model at the next `move`; False (and nothing done) while it is in a meeting."""
        state = self.fragments[fragment]
        if state.meeting is not None:
            return False
        rule = FINISH if phase is RunPhase.FINISH else self._rule
        state.step_alone(rule)
        self._on_outer_step(fragment, 0)
        return True

    def _open(self, request: ask.Open, clock_steps: int, phase: RunPhase) -> ask.Reply:
        """Lock the fragment and snapshot its fast weights."""
        state = self.fragments[request.fragment]
        if state.meeting is not None:
            return ask.Unavailable(request.meeting, "the fragment is in another meeting")
        if request.meeting in self._meetings:
            return ask.Unavailable(request.meeting, "this meeting is open already")
        side = MeetingSide(state)
        self._meetings[request.meeting] = OpenMeeting(request.meeting, request.fragment, side, self._rule, self._payloads)
        state.meeting = request.meeting
        return ask.Opened(request.meeting, state.tokens, clock_steps, phase)

    def _apply(self, request: ask.Apply) -> ask.Reply:
        """Take the outer step of a meeting that counts, once per meeting id; the model follows at the next `move`."""
        if request.meeting_id in self.applied:
            self.drop(request.meeting)
            return ask.Applied(request.meeting)
        meeting = self._meetings.get(request.meeting)
        step = None if meeting is None else meeting.step(request.failed_blocks)
        if meeting is None or step is None:
            return _unknown(request.meeting)
        meeting.side.merge(step)
        keep_newest(self.applied, request.meeting_id, None, JOURNALED)
        self.drop(request.meeting)
        self._on_outer_step(meeting.fragment, meeting.partner_clock_steps)
        return ask.Applied(request.meeting)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the tensors: JSON-able. Open meetings are not part of it."""
        return {
            "since": [asdict(f.since) for f in self.fragments],
            "applied": list(self.applied),
            "gate": [f.gate.state() for f in self.fragments],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; the tensors are the caller's to copy into `fragments`."""
        for fragment, since, gate in zip(self.fragments, state["since"], state["gate"], strict=True):
            fragment.since = Since(**since)
            fragment.gate.restore(gate)
        self.applied = dict.fromkeys(state["applied"])


def _unknown(meeting: int) -> ask.Unavailable:
    """Answer a request of a meeting that is not open, or not any more."""
    return ask.Unavailable(meeting, "no such meeting here: the trainer or the link was restarted")


def pack(failed: Tensor) -> str:
    """Write bool[num_blocks] as hex, the lowest bit first, padded with zeros to whole bytes; empty where nothing failed."""
    return np.packbits(failed.cpu().numpy(), bitorder="little").tobytes().hex() if bool(failed.any()) else ""


def unpack(text: str, num_blocks: int, device: torch.device) -> Tensor:
    """Read bool[num_blocks] back. Raises ValueError for a list of another number of blocks."""
    packed = np.frombuffer(bytes.fromhex(text) or bytes(-(-num_blocks // 8)), np.uint8)
    if packed.size != -(-num_blocks // 8):
        raise ValueError(f"A list of failed blocks of {packed.size} bytes does not fit {num_blocks} blocks.")
    return torch.from_numpy(np.unpackbits(packed, count=num_blocks, bitorder="little")).bool().to(device)
