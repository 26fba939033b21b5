"""The outer loop of one replica: slow weights, momentum and open meetings of every fragment, as the link's requests see them.

Synchronous, on the trainer's thread and device, but for `code` and `step_ahead`, which a second thread may call. A fragment is in at most
one meeting; while it is, its slow weights and momentum stand still and the inner steps go on in the fast weights. Every refusal to act
leaves all state as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from optim import noloco
from optim.fragment_codec import FragmentCodec
from optim.fragments import add, gather
from optim.noloco import FINISH, OuterSettings
from peer.link import records as ask
from peer.link.payload_folder import PayloadFolder
from peer.trainer.meeting import FragmentState, OpenMeeting, OuterStep, Surroundings, in_slabs, unknown
from peer.trainer.merge_gate import MergeGate
from protocol.messages.messages import RunPhase

JOURNALED = 256  # meetings remembered as applied; the node never asks for an older one again


class OuterLoop:
    """Slow weights and meetings of one replica. `parameters` are the model's own tensors, by name, and are written to."""

    def __init__(
        self,
        codecs: tuple[FragmentCodec, ...],
        parameters: Mapping[str, Tensor],
        settings: OuterSettings,
        payloads: PayloadFolder,
        on_outer_step: Callable[[int, int], None],  # (fragment, partner's clock or 0)
    ) -> None:
        self._parameters = parameters
        self._around = Surroundings(settings, payloads, MergeGate(len(codecs)))
        self._on_outer_step = on_outer_step
        self._meetings: dict[int, OpenMeeting] = {}
        self.applied: OrderedDict[str, None] = OrderedDict()
        self.fragments = tuple(self._initial(codec) for codec in codecs)

    def _initial(self, codec: FragmentCodec) -> FragmentState:
        slow = gather(codec.fragment, self._parameters)
        return FragmentState(codec, slow, torch.zeros_like(slow))

    def count_tokens(self, num_tokens: int) -> None:
        """Credit an inner step's tokens to every fragment."""
        for fragment in self.fragments:
            fragment.tokens += num_tokens

    # ------------------------------------------------------------------ meetings

    def answer(self, request: ask.MeetingRequest, clock_steps: int, phase: RunPhase) -> ask.Reply:
        """Carry out one step of a meeting, at a step boundary. What cannot be is answered by Unavailable and changes nothing."""
        if not isinstance(request, ask.Open | ask.Apply):
            return self.code(request)
        try:
            return self._open(request, clock_steps, phase) if isinstance(request, ask.Open) else self._apply(request)
        except (ValueError, torch.OutOfMemoryError) as error:
            return ask.Unavailable(request.meeting, str(error))

    def code(self, request: ask.CodingRequest) -> ask.Reply:
        """Carry out what needs no step boundary; may be called from a second thread. Unavailable as `answer`."""
        meeting = self._meetings.get(request.meeting)
        return unknown(request.meeting) if meeting is None else meeting.code(request)

    def step_ahead(self, request: ask.Apply) -> None:
        """Compute the outer step that `answer` will take with the same request; may be called from a second thread.

        Raises what `answer` would answer by Unavailable: ValueError, torch.OutOfMemoryError.
        """
        meeting = self._meetings.get(request.meeting)
        if meeting is not None and request.meeting_id not in self.applied:
            meeting.step(request.failed_blocks)

    def drop(self, number: int) -> int | None:
        """Forget a meeting that does not count, and return its fragment; None when there is no such meeting."""
        return self._forget(number) if number in self._meetings else None

    def drop_all(self) -> None:
        """Forget every meeting: none can be decided any more."""
        for number in list(self._meetings):
            self._forget(number)

    def solo(self, fragment: int, phase: RunPhase) -> bool:
        """Take the outer step of a fragment alone; False (and nothing done) while it is in a meeting."""
        state = self.fragments[fragment]
        if state.meeting is not None:
            return False
        settings = FINISH if phase is RunPhase.FINISH else self._around.settings
        fast = gather(state.codec.fragment, self._parameters)
        step = in_slabs(state, fast, lambda part: noloco.solo_step(state.slow[part], state.momentum[part], fast[part], settings))
        self._merge(state, step)
        state.tokens = 0
        self._on_outer_step(fragment, 0)
        return True

    def _open(self, request: ask.Open, clock_steps: int, phase: RunPhase) -> ask.Reply:
        """Lock the fragment and snapshot its fast weights."""
        state = self.fragments[request.fragment]
        if state.meeting is not None:
            return ask.Unavailable(request.meeting, "the fragment is in another meeting")
        if request.meeting in self._meetings:
            return ask.Unavailable(request.meeting, "this meeting is open already")
        snapshot = gather(state.codec.fragment, self._parameters)
        self._meetings[request.meeting] = OpenMeeting(request, state, snapshot, self._around)
        state.meeting = request.meeting
        return ask.Opened(request.meeting, state.tokens, clock_steps, phase)

    def _apply(self, request: ask.Apply) -> ask.Reply:
        """Take the outer step of a meeting that counts, once per meeting id."""
        if request.meeting_id in self.applied:
            self.drop(request.meeting)
            return ask.Applied(request.meeting)
        meeting = self._meetings.get(request.meeting)
        step = None if meeting is None else meeting.step(request.failed_blocks)
        if meeting is None or meeting.accepted is None or step is None:
            return unknown(request.meeting)
        state = self.fragments[meeting.fragment]
        self._merge(state, step)
        self._around.gate.accept(meeting.fragment, meeting.accepted.gap_length, meeting.accepted.own)
        state.tokens -= meeting.tokens
        self._remember(request.meeting_id)
        self._forget(request.meeting)
        self._on_outer_step(meeting.fragment, meeting.partner_clock_steps)
        return ask.Applied(request.meeting)

    def _merge(self, state: FragmentState, step: OuterStep) -> None:
        """Make an outer step count, and merge it into the fast weights; all or nothing, for nothing is allocated."""
        add(state.codec.fragment, step.shift, self._parameters)
        if step.shift.is_cuda:  # made on the coding thread's stream: its memory may serve that stream again only after this one is through
            for tensor in (step.shift, step.slow, step.momentum):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        state.slow, state.momentum = step.slow, step.momentum

    def _remember(self, meeting_id: str) -> None:
        self.applied[meeting_id] = None
        while len(self.applied) > JOURNALED:
            self.applied.popitem(last=False)

    def _forget(self, number: int) -> int:
        meeting = self._meetings.pop(number)
        meeting.close()
        self.fragments[meeting.fragment].meeting = None
        return meeting.fragment

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the tensors: JSON-able. Open meetings are not part of it."""
        return {"tokens": [f.tokens for f in self.fragments], "applied": list(self.applied), "gate": self._around.gate.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; the tensors are the caller's to copy into `fragments`."""
        for fragment, tokens in zip(self.fragments, state["tokens"], strict=True):
            fragment.tokens = tokens
        self.applied = OrderedDict.fromkeys(state["applied"])
        self._around.gate.restore(state["gate"])
