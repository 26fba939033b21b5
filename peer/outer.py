"""The outer loop of one replica: slow weights, momentum and open meetings of every fragment, as the link's requests see them.

Synchronous, on the trainer's thread and device. A fragment is in at most one meeting; while it is, its slow weights and momentum stand
still and the inner steps go on in the fast weights. Every refusal to act leaves all state as it was.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optim import merge, noloco
from optim.codecs import Gap
from optim.fragment_codec import FragmentCodec, FragmentEncoded
from optim.fragments import gather, scatter
from optim.noloco import FINISH, OuterSettings
from peer import requests as ask
from peer.gate import MergeGate
from peer.payloads import PayloadFolder
from peer.requests import File, Stage, payload_name

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
    gap: Gap | None = None


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

    def open(self, request: ask.Open, clock_steps: int, stage: Stage) -> ask.Opened | ask.Unavailable:
        """Lock the fragment and snapshot its fast weights."""
        state = self.fragments[request.fragment]
        if state.meeting is not None:
            return ask.Unavailable(request.meeting, "the fragment is in another meeting")
        state.meeting = request.meeting
        snapshot = gather(state.codec.fragment, self._parameters)
        self._meetings[request.meeting] = OpenMeeting(request.fragment, snapshot, state.tokens)
        return ask.Opened(request.meeting, state.tokens, clock_steps, stage)

    def prepare(self, request: ask.Prepare) -> ask.Reply:
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
            return self._encode(request.meeting, meeting)
        self._write(request.meeting, File.OWN_SKETCH, state.codec.sketch(meeting.message, meeting.seed))
        return ask.SketchReady(request.meeting)

    def encode(self, request: ask.Encode) -> ask.Reply:
        """Encode the message against both sketches."""
        meeting = self._meetings.get(request.meeting)
        if meeting is None or meeting.message is None:
            return _unknown(request.meeting)
        return self._encode(request.meeting, meeting)

    def _encode(self, number: int, meeting: OpenMeeting) -> ask.Reply:
        assert meeting.message is not None
        codec = self.fragments[meeting.fragment].codec
        own, partner = self._read(number, File.OWN_SKETCH), self._read(number, File.PARTNER_SKETCH)
        try:
            meeting.encoded = codec.encode(meeting.message, meeting.seed, own, partner)
        except ValueError as error:
            return ask.Unavailable(number, str(error))
        digest = self._write(number, File.OWN_PAYLOAD, meeting.encoded.payload)
        meeting.message = None
        return ask.PayloadReady(number, digest)

    def check(self, request: ask.Check) -> ask.Reply:
        """Decode the partner's payload and judge it."""
        meeting = self._meetings.get(request.meeting)
        if meeting is None or meeting.encoded is None:
            return _unknown(request.meeting)
        state = self.fragments[meeting.fragment]
        try:
            meeting.gap = state.codec.gap(meeting.encoded, self._read(request.meeting, File.PARTNER_PAYLOAD))
        except ValueError as error:
            return ask.Checked(request.meeting, False, str(error), "")
        reason = self._gate.judge(meeting.fragment, float(meeting.gap.values.norm()), float((meeting.snapshot - state.slow).norm()))
        return ask.Checked(request.meeting, not reason, reason, _bitmap(meeting.gap.failed))

    def apply(self, request: ask.Apply) -> ask.Reply:
        """Take the outer step of a meeting that counts, once per meeting id."""
        if request.meeting_id in self.applied:
            return ask.Applied(request.meeting)
        meeting = self._meetings.get(request.meeting)
        if meeting is None or meeting.gap is None or meeting.settings is None:
            return _unknown(request.meeting)
        state = self.fragments[meeting.fragment]
        failed = state.codec.failed_values(_from_bitmap(request.failed_blocks, meeting.gap.failed))
        slow, momentum = noloco.pair_step(
            state.slow, state.momentum, meeting.snapshot, meeting.weight, meeting.gap.values, meeting.settings, failed
        )
        self._gate.accept(meeting.fragment, float(meeting.gap.values.norm()))
        self._replace(meeting.fragment, slow, momentum, meeting.snapshot)
        state.tokens -= meeting.tokens
        self._remember(request.meeting_id)
        self._forget(request.meeting)
        self._on_outer_step(meeting.fragment, meeting.partner_clock_steps)
        return ask.Applied(request.meeting)

    def drop(self, number: int) -> None:
        """Forget a meeting that does not count."""
        if number in self._meetings:
            self._forget(number)

    def drop_all(self) -> None:
        """Forget every meeting: the link broke, so none can be decided any more."""
        for number in list(self._meetings):
            self._forget(number)

    def solo(self, fragment: int, stage: Stage) -> bool:
        """Take the outer step of a fragment alone; False (and nothing done) while it is in a meeting."""
        state = self.fragments[fragment]
        if state.meeting is not None:
            return False
        settings = FINISH if stage is Stage.FINISH else self._settings
        fast = gather(state.codec.fragment, self._parameters)
        slow, momentum = noloco.solo_step(state.slow, state.momentum, fast, settings)
        self._replace(fragment, slow, momentum, fast)
        state.tokens = 0
        self._on_outer_step(fragment, 0)
        return True

    def _replace(self, fragment: int, slow: Tensor, momentum: Tensor, snapshot: Tensor) -> None:
        state = self.fragments[fragment]
        fast = gather(state.codec.fragment, self._parameters)
        scatter(state.codec.fragment, merge.additive(slow, fast, snapshot), self._parameters)
        state.slow, state.momentum = slow, momentum

    def _remember(self, meeting_id: str) -> None:
        self.applied[meeting_id] = None
        while len(self.applied) > JOURNALED:
            self.applied.popitem(last=False)

    def _forget(self, number: int) -> None:
        self.fragments[self._meetings.pop(number).fragment].meeting = None
        for file in (File.OWN_SKETCH, File.OWN_PAYLOAD):
            self._payloads.remove(payload_name(number, file))

    def _write(self, number: int, file: File, data: Tensor) -> str:
        array = data.cpu().numpy()
        self._payloads.write(payload_name(number, file), array)
        return hashlib.sha256(array).hexdigest()

    def _read(self, number: int, file: File) -> Tensor:
        data = self._payloads.read(payload_name(number, file))
        device = self.fragments[0].slow.device
        if not data:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)

    def state(self) -> dict[str, object]:
        """Return what a checkpoint must hold beside the tensors: JSON-able."""
        return {"tokens": [f.tokens for f in self.fragments], "applied": list(self.applied), "gate": self._gate.state()}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over what `state` returned; the tensors are the caller's to copy into `fragments`."""
        for fragment, tokens in zip(self.fragments, _list(state["tokens"]), strict=True):
            fragment.tokens = int(str(tokens))
        self.applied = OrderedDict((str(meeting_id), None) for meeting_id in _list(state["applied"]))
        gate = state["gate"]
        assert isinstance(gate, dict)
        self._gate.restore(gate)


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def _unknown(number: int) -> ask.Unavailable:
    return ask.Unavailable(number, "no such meeting here: the trainer or the link was restarted")


def _bitmap(failed: Tensor) -> str:
    """Pack bool[num_blocks] into hex, lowest bit first; empty when none failed."""
    if not bool(failed.any()):
        return ""
    bits = torch.nn.functional.pad(failed.to(torch.uint8), (0, -failed.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=failed.device)
    return bytes((bits * weights).sum(1).to(torch.uint8).cpu().tolist()).hex()


def _from_bitmap(text: str, like: Tensor) -> Tensor:
    """Unpack hex into bool[num_blocks] on the device of `like`."""
    if not text:
        return torch.zeros_like(like)
    packed = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
    bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[: like.numel()].to(device=like.device, dtype=torch.bool)
