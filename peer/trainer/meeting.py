"""What the trainer holds of one meeting on one fragment, from the snapshot to the outer step that it computes.

Everything here reads the fragment and writes only to the meeting and its files: slow weights and momentum stand still while a meeting is
open, and the fast weights are in the snapshot. So all of it may run on a second thread, beside the inner steps (coding_thread.py); only the
snapshot before and the merge after need a step boundary (outer_loop.py).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from optim import merge, noloco
from optim.codecs import Gap
from optim.fragment_codec import FragmentCodec, FragmentEncoded
from optim.noloco import FINISH, OuterSettings
from peer.link import records as ask
from peer.link.payload_folder import PayloadFolder
from peer.link.records import File, payload_name
from peer.trainer import meeting as bitmaps
from peer.trainer.merge_gate import Lengths, MergeGate
from protocol.messages.messages import RunPhase

MAX_TOKEN_RATIO = 16  # more than the speeds of peers that train together differ by
SLAB_VALUES = 1 << 15  # 128 KiB: what one operation leaves in the processor's cache, the next one finds there


@dataclass(slots=True)
class FragmentState:
    """One fragment between meetings."""

    codec: FragmentCodec
    slow: Tensor  # f32[numel]
    momentum: Tensor  # f32[numel]
    tokens: int = 0  # trained since the last outer step
    meeting: int | None = None


@dataclass(frozen=True, slots=True)
class OuterStep:
    """A fragment's next slow weights and momentum, and what to add to its fast weights."""

    slow: Tensor  # f32[numel]
    momentum: Tensor  # f32[numel]
    shift: Tensor  # f32[numel]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A partner's message that passed the gate, with the lengths by which it was judged."""

    gap: Gap
    gap_length: float
    own: Lengths


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every meeting of a replica shares."""

    settings: OuterSettings
    payloads: PayloadFolder
    gate: MergeGate


class OpenMeeting:
    """One meeting's side in the trainer. `code` and `step` may be called from another thread than the rest, which is the opener's."""

    def __init__(self, request: ask.Open, state: FragmentState, snapshot: Tensor, around: Surroundings) -> None:
        self.fragment = request.fragment
        self.snapshot = snapshot  # f32[numel], fast weights when it was opened
        self.tokens = state.tokens
        self.partner_clock_steps = 0
        self.accepted: Accepted | None = None
        self._number = request.meeting
        self._state = state
        self._around = around
        self._settings = around.settings
        self._weight = 0.5
        self._seed = 0
        self._message: Tensor | None = None
        self._encoded: FragmentEncoded | None = None
        self._step: tuple[str, OuterStep] | None = None  # and the failed blocks for which it holds
        self._is_closed = False
        self._working = threading.Lock()

    def code(self, request: ask.CodingRequest) -> ask.Reply:
        """Carry out one stage. What cannot be carried out is answered by Unavailable and changes nothing."""
        with self._working:
            if self._is_closed:
                return unknown(self._number)
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
        """Compute the outer step for the failed blocks of both sides, once; None when nothing was accepted.

        Raises ValueError for a bitmap of another size.
        """
        with self._working:
            if self.accepted is None or self._is_closed:
                return None
            if self._step is None or self._step[0] != failed_blocks:
                self._step = failed_blocks, self._pair_step(self.accepted.gap, failed_blocks)
            return self._step[1]

    def close(self) -> None:
        """Wait for what a second thread is doing here, and remove the meeting's own files; nothing is carried out any more."""
        with self._working:
            self._is_closed = True
            for file in (File.OWN_SKETCH, File.OWN_PAYLOAD):
                self._around.payloads.remove(payload_name(self._number, file))

    def _prepare(self, request: ask.Prepare) -> ask.Reply:
        """Form the message u; write the sketch, or the payload where the codec has no sketch."""
        state = self._state
        finish = request.phase is RunPhase.FINISH
        self._weight = 0.5 if finish else bounded_weight(self.tokens, request.partner_tokens)
        self._settings = FINISH if finish else self._around.settings
        self._seed = request.seed
        self.partner_clock_steps = request.partner_clock_steps
        self._message = noloco.message(state.slow, self.snapshot, self._weight, self._settings)
        if not state.codec.sketch_bytes:
            return self._encode()
        self._write(File.OWN_SKETCH, state.codec.sketch(self._message, self._seed))
        return ask.SketchReady(self._number)

    def _encode(self) -> ask.Reply:
        """Encode the message against both sketches."""
        if self._message is None:
            return unknown(self._number)
        own, partner = self._read(File.OWN_SKETCH), self._read(File.PARTNER_SKETCH)
        encoded = self._state.codec.encode(self._message, self._seed, own, partner)
        digest = self._write(File.OWN_PAYLOAD, encoded.payload)
        self._encoded, self._message = encoded, None
        return ask.PayloadReady(self._number, digest)

    def _check(self) -> ask.Reply:
        """Decode the partner's payload and judge it; what is not accepted cannot be applied."""
        if self._encoded is None:
            return unknown(self._number)
        state = self._state
        try:
            gap = state.codec.gap(self._encoded, self._read(File.PARTNER_PAYLOAD))
        except ValueError as error:
            return ask.Checked(self._number, False, str(error), "")
        gap_length, own = _length(gap.values), _lengths(state, self.snapshot)
        reason = self._around.gate.judge(self.fragment, gap_length, own)
        if reason:
            return ask.Checked(self._number, False, reason, "")
        self.accepted = Accepted(gap, gap_length, own)
        return ask.Checked(self._number, True, "", bitmaps.pack(gap.failed))

    def _pair_step(self, gap: Gap, failed_blocks: str) -> OuterStep:
        state, snapshot, weight, settings = self._state, self.snapshot, self._weight, self._settings
        failed = state.codec.failed_values(bitmaps.unpack(failed_blocks, state.codec.num_blocks, gap.failed.device))

        def step(part: slice) -> tuple[Tensor, Tensor]:
            alone = None if failed is None else failed[part]
            return noloco.pair_step(state.slow[part], state.momentum[part], snapshot[part], weight, gap.values[part], settings, alone)

        return in_slabs(state, snapshot, step)

    def _write(self, file: File, data: Tensor) -> str:
        content = data.cpu().numpy().data
        self._around.payloads.write(payload_name(self._number, file), content)
        return hashlib.sha256(content).hexdigest()

    def _read(self, file: File) -> Tensor:
        data = self._around.payloads.read(payload_name(self._number, file))
        device = self._state.slow.device
        if not data:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.frombuffer(data, dtype=torch.uint8).to(device)


def bounded_weight(own_tokens: int, partner_tokens: int) -> float:
    """Return one's share of the pair's tokens, where neither side counts less than a sixteenth of the other.

    Tokens are what a peer says of itself: without the bound, one that boasts would take the whole of the pair's progress for its own. Both
    sides compute it from the same two numbers, so their weights still sum to 1.
    """
    own, partner = max(own_tokens, partner_tokens // MAX_TOKEN_RATIO), max(partner_tokens, own_tokens // MAX_TOKEN_RATIO)
    return noloco.token_weight(own, partner)


def in_slabs(state: FragmentState, snapshot: Tensor, step: Callable[[slice], tuple[Tensor, Tensor]]) -> OuterStep:
    """Compute a fragment's outer step, slab by slab."""
    slow, momentum, shift = (torch.empty_like(state.slow) for _ in range(3))
    for part in _slabs(slow):
        slow[part], momentum[part] = step(part)
        shift[part] = merge.shift(slow[part], snapshot[part])
    return OuterStep(slow, momentum, shift)


def _slabs(values: Tensor) -> Iterator[slice]:
    """Cut a flat tensor into parts that stay in the processor's cache; one part on other devices."""
    size = SLAB_VALUES if values.device.type == "cpu" else values.numel()
    return (slice(start, start + size) for start in range(0, values.numel(), size))


def unknown(meeting: int) -> ask.Unavailable:
    """Answer a request of a meeting that is not open, or not so far."""
    return ask.Unavailable(meeting, "no such meeting here: the trainer or the link was restarted")


def _length(values: Tensor) -> float:
    length = float(values.norm())
    return length if math.isfinite(length) else float(values.double().norm())  # the square of a legal value can overflow f32


def _lengths(state: FragmentState, snapshot: Tensor) -> Lengths:
    return Lengths(_length(snapshot - state.slow), _length(state.momentum), _length(state.slow))


def pack(failed: Tensor) -> str:
    """Write bool[num_blocks] as hex, padded with zeros to whole bytes."""
    if not bool(failed.any()):
        return ""
    bits = functional.pad(failed.to(torch.uint8), (0, -failed.numel() % 8)).view(-1, 8)
    return bytes((bits << _places(failed.device)).sum(1).tolist()).hex()


def unpack(text: str, num_blocks: int, device: torch.device) -> Tensor:
    """Read bool[num_blocks] back. Raises ValueError for a list of another number of blocks."""
    packed = bytes.fromhex(text)
    if packed and len(packed) != -(-num_blocks // 8):
        raise ValueError(f"A list of failed blocks of {len(packed)} bytes does not fit {num_blocks} blocks.")
    if not packed:
        return torch.zeros(num_blocks, dtype=torch.bool, device=device)
    bits = (torch.tensor(list(packed), dtype=torch.uint8, device=device).unsqueeze(1) >> _places(device)) & 1
    return bits.flatten()[:num_blocks].bool()


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
