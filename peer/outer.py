"""The outer loop of one replica: slow weights, momentum and open meetings of every fragment, as the link's requests see them.

Synchronous, on the trainer's thread and device. A fragment is in at most one meeting; while it is, its slow weights and momentum stand
still and the inner steps go on in the fast weights. Every refusal to act leaves all state as it was.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim import merge, noloco
from optim.codecs import Gap
from optim.fragment_codec import FragmentCodec, FragmentEncoded
from optim.fragments import gather, scatter
from optim.noloco import FINISH, OuterSettings
from peer import bitmaps
from peer import requests as ask
from peer.gate import Lengths, MergeGate
from peer.payloads import PayloadFolder
from peer.requests import File, Stage, payload_name

SLAB_VALUES = 1 << 15  # 128 KiB: what one operation leaves in the processor's cache, the next one finds there
JOURNALED = 256  # meetings remembered as applied; the node never asks for an older one again


@dataclass(slots=True)
class FragmentState:
    """One fragment between meetings."""

    codec: FragmentCodec
    slow: Tensor  # f32[numel]
    momentum: Tensor  # f32[numel]
    tokens: int = 0  # trained since the last outer step
    meeting: int | None = None


@dataclass(slots=True)
class OpenMeeting:
    """What a meeting has gathered so far."""

    fragment: int
    snapshot: Tensor  # f32[numel], fast weights when it was opened
    tokens: int
    weight: float = 0.5
    partner_clock_steps: int = 0
    seed: int = 0
    settings: OuterSettings | None = None
    message: Tensor | None = None
    encoded: FragmentEncoded | None = None
    gap: Gap | None = None  # of a partner's payload that was accepted
    gap_length: float = 0.0
    own: Lengths | None = None


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
        self._settings = settings
        self._payloads = payloads
        self._on_outer_step = on_outer_step
        self._gate = MergeGate(len(codecs))
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

    def answer(self, request: ask.MeetingRequest, clock_steps: int, stage: Stage) -> ask.Reply:
        """Carry out one step of a meeting. What cannot be carried out is answered by Unavailable and changes nothing."""
        try:
            match request:
                case ask.Open():
                    return self._open(request, clock_steps, stage)
                case ask.Prepare():
                    return self._prepare(request)
                case ask.Encode():
                    return self._encode(request.meeting)
                case ask.Check():
                    return self._check(request.meeting)
                case ask.Apply():
                    return self._apply(request)
        except (ValueError, OSError, torch.OutOfMemoryError) as error:  # bytes that no honest partner sends; a full disk or device
            return ask.Unavailable(request.meeting, str(error))

    def drop(self, number: int) -> int | None:
        """Forget a meeting that does not count, and return its fragment; None when there is no such meeting."""
        return self._forget(number) if number in self._meetings else None

    def drop_all(self) -> None:
        """Forget every meeting: none can be decided any more."""
        for number in list(self._meetings):
            self._forget(number)

    def solo(self, fragment: int, stage: Stage) -> bool:
        """Take the outer step of a fragment alone; False (and nothing done) while it is in a meeting."""
        state = self.fragments[fragment]
        if state.meeting is not None:
            return False
        settings = FINISH if stage is Stage.FINISH else self._settings
        fast = gather(state.codec.fragment, self._parameters)
        self._step(state, fast, lambda part: noloco.solo_step(state.slow[part], state.momentum[part], fast[part], settings))
        state.tokens = 0
        self._on_outer_step(fragment, 0)
        return True

    def _open(self, request: ask.Open, clock_steps: int, stage: Stage) -> ask.Reply:
        """Lock the fragment and snapshot its fast weights."""
        state = self.fragments[request.fragment]
        if state.meeting is not None:
            return ask.Unavailable(request.meeting, "the fragment is in another meeting")
        if request.meeting in self._meetings:
            return ask.Unavailable(request.meeting, "this meeting is open already")
        snapshot = gather(state.codec.fragment, self._parameters)
        self._meetings[request.meeting] = OpenMeeting(request.fragment, snapshot, state.tokens)
        state.meeting = request.meeting
        return ask.Opened(request.meeting, state.tokens, clock_steps, stage)

    def _prepare(self, request: ask.Prepare) -> ask.Reply:
        """Form the message u; write the sketch, or the payload where the codec has no sketch."""
        meeting = self._meetings.get(request.meeting)
        if meeting is None:
            return _unknown(request.meeting)
        state = self.fragments[meeting.fragment]
        finish = request.stage is Stage.FINISH
        meeting.weight = 0.5 if finish else noloco.token_weight(meeting.tokens, request.partner_tokens)
        meeting.settings = FINISH if finish else self._settings
        meeting.seed = request.seed
        meeting.partner_clock_steps = request.partner_clock_steps
        meeting.message = noloco.message(state.slow, meeting.snapshot, meeting.weight, meeting.settings)
        if not state.codec.sketch_bytes:
            return self._encode(request.meeting)
        self._write(request.meeting, File.OWN_SKETCH, state.codec.sketch(meeting.message, meeting.seed))
        return ask.SketchReady(request.meeting)

    def _encode(self, number: int) -> ask.Reply:
        """Encode the message against both sketches."""
        meeting = self._meetings.get(number)
        if meeting is None or meeting.message is None:
            return _unknown(number)
        codec = self.fragments[meeting.fragment].codec
        own, partner = self._read(number, File.OWN_SKETCH), self._read(number, File.PARTNER_SKETCH)
        encoded = codec.encode(meeting.message, meeting.seed, own, partner)
        digest = self._write(number, File.OWN_PAYLOAD, encoded.payload)
        meeting.encoded, meeting.message = encoded, None
        return ask.PayloadReady(number, digest)

    def _check(self, number: int) -> ask.Reply:
        """Decode the partner's payload and judge it; what is not accepted cannot be applied."""
        meeting = self._meetings.get(number)
        if meeting is None or meeting.encoded is None:
            return _unknown(number)
        state = self.fragments[meeting.fragment]
        try:
            gap = state.codec.gap(meeting.encoded, self._read(number, File.PARTNER_PAYLOAD))
        except ValueError as error:
            return ask.Checked(number, False, str(error), "")
        gap_length, own = _length(gap.values), _lengths(state, meeting.snapshot)
        reason = self._gate.judge(meeting.fragment, gap_length, own)
        if reason:
            return ask.Checked(number, False, reason, "")
        meeting.gap, meeting.gap_length, meeting.own = gap, gap_length, own
        return ask.Checked(number, True, "", bitmaps.pack(gap.failed))

    def _apply(self, request: ask.Apply) -> ask.Reply:
        """Take the outer step of a meeting that counts, once per meeting id."""
        if request.meeting_id in self.applied:
            self.drop(request.meeting)
            return ask.Applied(request.meeting)
        meeting = self._meetings.get(request.meeting)
        if meeting is None or meeting.gap is None or meeting.own is None or meeting.settings is None:
            return _unknown(request.meeting)
        state, settings, gap, fast = self.fragments[meeting.fragment], meeting.settings, meeting.gap, meeting.snapshot
        failed = state.codec.failed_values(bitmaps.unpack(request.failed_blocks, state.codec.num_blocks, gap.failed.device))

        def step(part: slice) -> tuple[Tensor, Tensor]:
            alone = None if failed is None else failed[part]
            return noloco.pair_step(state.slow[part], state.momentum[part], fast[part], meeting.weight, gap.values[part], settings, alone)

        self._step(state, fast, step)
        self._gate.accept(meeting.fragment, meeting.gap_length, meeting.own)
        state.tokens -= meeting.tokens
        self._remember(request.meeting_id)
        self._forget(request.meeting)
        self._on_outer_step(meeting.fragment, meeting.partner_clock_steps)
        return ask.Applied(request.meeting)

    def _step(self, state: FragmentState, snapshot: Tensor, step: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
        """Take an outer step and merge it into the fast weights, slab by slab; all or nothing, for the last write allocates nothing."""
        slow, momentum = torch.empty_like(state.slow), torch.empty_like(state.momentum)
        fast = gather(state.codec.fragment, self._parameters)
        for part in _slabs(slow):
            slow[part], momentum[part] = step(part)
            fast[part] = merge.additive(slow[part], fast[part], snapshot[part])
        scatter(state.codec.fragment, fast, self._parameters)
        state.slow, state.momentum = slow, momentum

    def _remember(self, meeting_id: str) -> None:
        self.applied[meeting_id] = None
        while len(self.applied) > JOURNALED:
            self.applied.popitem(last=False)

    def _forget(self, number: int) -> int:
        fragment = self._meetings.pop(number).fragment
        self.fragments[fragment].meeting = None
        for file in (File.OWN_SKETCH, File.OWN_PAYLOAD):
            self._payloads.remove(payload_name(number, file))
        return fragment

    def _write(self, number: int, file: File, data: Tensor) -> str:
        content = data.cpu().numpy().data
        self._payloads.write(payload_name(number, file), content)
        return hashlib.sha256(content).hexdigest()

    def _read(self, number: int, file: File) -> Tensor:
        data = self._payloads.read(payload_name(number, file))
        device = self.fragments[0].slow.device
        if not data:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.frombuffer(data, dtype=torch.uint8).to(device)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the tensors: JSON-able. Open meetings are not part of it."""
        return {"tokens": [f.tokens for f in self.fragments], "applied": list(self.applied), "gate": self._gate.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; the tensors are the caller's to copy into `fragments`."""
        for fragment, tokens in zip(self.fragments, state["tokens"], strict=True):
            fragment.tokens = tokens
        self.applied = OrderedDict.fromkeys(state["applied"])
        self._gate.restore(state["gate"])


def _length(values: Tensor) -> float:
    length = float(values.norm())
    return length if math.isfinite(length) else float(values.double().norm())  # the square of a legal value can overflow f32


def _slabs(values: Tensor) -> Iterator[slice]:
    size = SLAB_VALUES if values.device.type == "cpu" else values.numel()
    return (slice(start, start + size) for start in range(0, values.numel(), size))


def _lengths(state: FragmentState, snapshot: Tensor) -> Lengths:
    return Lengths(_length(snapshot - state.slow), _length(state.momentum), _length(state.slow))


def _unknown(number: int) -> ask.Unavailable:
    return ask.Unavailable(number, "no such meeting here: the trainer or the link was restarted")
