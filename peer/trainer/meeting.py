"""One side of one meeting over one fragment, as tensors: message, sketch, encode, gap, gate, clip, step, probe, merge.

Real peers (exchange.py) add the link's requests, files and locks; simulated peers (peer/simulator/pairs.py) pass one side's tensors
straight to the other. Between the snapshot and the merge everything here reads the fragment and writes only to the meeting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gossamer.optim.codecs import Gap
from gossamer.optim.compiled import compiled_step_for
from gossamer.optim.fragment_codec import FragmentEncoded
from gossamer.optim.noloco import FINISH, NoLoCo, token_weight
from gossamer.peer.model.accelerator import mark
from gossamer.peer.trainer.fragment_state import FragmentState, Lengths, OuterStep, length_of
from gossamer.peer.trainer.probe import Judgement, Probe, ProbeGate, Shifts

BEHIND: Final = 0.6  # of a gap leads back along our own movement: the partner has not come as far
LAG_STEPS: Final = 10  # at least: the global steps of peers that train together differ by a few
MEAN: Final = "mean"  # how the names of means end in batch norms and their like: running_mean
MAX_TOKEN_RATIO = 16  # the speeds of peers that train together differ by less


@dataclass(frozen=True, slots=True)
class Accepted:
    """A partner's message that passed the gate, with the lengths that the gate judged."""

    gap: Gap
    gap_length: float
    part: float  # of the outer step with the partner that is taken; the rest is the solo step
    own: Lengths


class MeetingSide:
    """One side of a meeting: `prepare`, `encode`, `judge`, `step`, `merge`, in this order. The constructor takes the snapshot.

    Sketches, payloads and bitmaps of failed blocks lie on the fragment's device. The constructor and `merge` need weights that nobody
    changes meanwhile; the other methods may run on a second thread, one at a time. A call out of order raises ValueError, and so does the
    codec for weights that are not finite, a malformed sketch, or a bitmap of another size. Then nothing has changed.
    """

    _rule: NoLoCo  # set by `prepare`, like the next three
    _weight: float
    _seed: int
    _sketch: Tensor

    def __init__(self, state: FragmentState) -> None:
        self.state = state
        self.snapshot = state.fast()  # f32[numel]
        self.taken = mark(self.snapshot.device)
        self.since = state.since  # at the snapshot
        self._message: Tensor | None = None
        self._encoded: FragmentEncoded | None = None
        self._accepted: Accepted | None = None
        self._probed: tuple[ProbeGate, Judgement] | None = None
        self._most_part = 1.0
        self._place = ""

    def prepare(self, rule: NoLoCo, weight: float, seed: int) -> Tensor:
        """Form the message and return its sketch, uint8[sketch_bytes]. Both sides must pass the same seed.

        The mean of the pair is conserved if the weights of both sides add up to 1: if neither side counts fewer of the other's tokens.
        """
        state = self.state
        message = rule.message(state.on_device(state.slow), self.snapshot, weight)
        self._sketch = state.codec.sketch(message, seed)
        self._rule, self._weight, self._seed, self._message = rule, weight, seed, message
        return self._sketch

    def encode(self, partner_sketch: Tensor) -> Tensor:
        """Code the message against both sketches and return the payload, uint8[payload_bytes]."""
        if self._message is None or self._encoded is not None:
            raise ValueError("There is no message to encode in this meeting.")
        self._encoded = self.state.codec.encode(self._message, self._seed, self._sketch, partner_sketch)
        return self._encoded.payload

    def judge(self, partner_payload: Tensor, share: float = 1.0, most_part: float = 1.0, place: str = "") -> str:
        """Decode the partner's message; return why it must not be merged, empty if it may.

        `most_part`: of the outer step with this partner, that is taken at most, whatever a probe says. `place`: where the partner is.

        A gap that is longer than `share` of the gate's limit is clipped to that length, with our own weights as the centre, unless a probe
        shows that the whole is of use. Where one side clips, the mean of the pair moves by what it cuts off.
        """
        if self._encoded is None or self._message is None:
            raise ValueError("Nothing was sent in this meeting that an answer could be read against.")
        state, self._accepted, self._probed, self._most_part, self._place = self.state, None, None, most_part, place
        try:
            gap = state.codec.gap(self._encoded, partner_payload)
        except ValueError as error:
            return str(error)
        gap_length = length_of(gap.values)
        own = self._lengths(self._message, gap.values, gap_length)
        if reason := state.gate.judge(gap_length, own) or self._signs(self._message, gap.values):
            return reason
        self._accepted = Accepted(gap, gap_length, state.gate.kept(gap_length, own, share), own)
        return ""

    def _signs(self, message: Tensor, gap: Tensor) -> str:
        """Return why statistics cannot be those of the same model: values below zero where ours have none, as in a variance.

        A mean may have any sign, and those of a few channels often have the same by chance.
        """
        fragment, start = self.state.codec.fragment, 0
        for piece in fragment.pieces if fragment.holds_statistics else ():
            place = slice(start, start + piece.numel)
            ours, theirs = self.snapshot[place], message[place] + gap[place]
            if not piece.name.endswith(MEAN) and bool((ours >= 0.0).all()) and bool((theirs < 0.0).any()):
                return f"{piece.name} has values below zero, ours has none"
            start += piece.numel
        return ""

    @property
    def part(self) -> float:
        """The part of the outer step with the partner that is taken."""
        return min(self._most_part, self._need_accepted().part)

    @property
    def is_whole(self) -> bool:
        """Whether the whole message is accepted; before a probe: the gap is not too long to be merged unprobed."""
        return self._need_accepted().part == 1.0

    def probe(self, probe: Probe, gate: ProbeGate, failed_blocks: Tensor, *, lag_steps: int) -> tuple[Judgement, OuterStep]:
        """Judge what the merge would do to the loss on our own text, while nobody changes the weights; return the step that is left.

        A message that is harmful is no longer accepted. `lag_steps`: the global steps that the partner says to be behind us. A partner is
        behind too if its gap mostly leads back along our own movement.
        """
        clipped = self._need_accepted()
        solo, whole = self._part_of_step(0.0, failed_blocks), self._part_of_step(1.0, failed_blocks)
        is_behind = lag_steps > max(LAG_STEPS, 2 * self.since.steps) or clipped.own.back > BEHIND * clipped.gap_length
        shifts = Shifts(whole.shift, solo.shift, self.snapshot - self.state.on_device(self.state.slow))
        judgement = probe.judge(gate, self.state.codec.fragment, shifts, min(0.5, clipped.part), is_behind=is_behind)
        self._probed = gate, judgement
        part = judgement.part if judgement.part < 1.0 or gate.is_of_use(judgement.gain) else clipped.part
        self._accepted = None if judgement.reason else replace(clipped, part=part)
        return judgement, whole if judgement.reason or self.part == 1.0 else self._part_of_step(self.part, failed_blocks)

    def take_nothing(self) -> None:
        """Merge nothing of a message that was accepted."""
        self._accepted = replace(self._need_accepted(), part=0.0)

    def step_as_decided(self, probe: Probe | None, gate: ProbeGate, failed_blocks: Tensor, *, lag_steps: int) -> OuterStep:
        """Compute the outer step of a meeting that counts, while nobody changes the weights.

        If the partner lists failed blocks beyond our own, what is left of its message was not measured, and is measured now. A meeting that
        counts is not refused any more: of a harmful rest nothing is merged.
        """
        accepted = self._need_accepted()
        if probe is None or not self.is_wider(failed_blocks):
            return self.step(failed_blocks)
        judgement, _ = self.probe(probe, gate, failed_blocks, lag_steps=lag_steps)
        part = 0.0 if self._accepted is None else min(accepted.part, self._accepted.part)
        self._accepted = replace(accepted, part=part)
        return self.step(failed_blocks)

    def is_wider(self, failed_blocks: Tensor) -> bool:
        """Return whether these blocks are more than failed on our side."""
        return bool((failed_blocks & ~self.failed_blocks).any())

    @property
    def failed_blocks(self) -> Tensor:
        """Return bool[num_blocks]: the blocks that could not be decoded here."""
        return self._need_accepted().gap.failed

    def step(self, failed_blocks: Tensor) -> OuterStep:
        """Compute the outer step with the partner; blocks that failed on either side, the same for both, are taken alone."""
        return self._part_of_step(self.part, failed_blocks)

    def _part_of_step(self, taken: float, failed_blocks: Tensor) -> OuterStep:
        """Compute this part of the outer step with the partner; the rest is the step without one."""
        accepted, state = self._need_accepted(), self.state
        failed = state.codec.failed_values(failed_blocks)
        compiled = compiled_step_for(self.snapshot.device)
        if compiled is not None:
            momentum, gap = state.momentum if state.has_momentum else None, accepted.gap.values
            slow, moved, shift = self._rule.compiled_pair_step(
                compiled, state.slow, momentum, self.snapshot, self._weight, gap, failed, taken
            )
            return OuterStep(slow, state.momentum if moved is None else moved, shift)

        def step(slow: Tensor, momentum: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            alone, gap, fast = None if failed is None else failed[part], accepted.gap.values[part], self.snapshot[part]
            return self._rule.pair_step(slow, momentum, fast, self._weight, gap, alone, taken)

        return state.in_slabs(self.snapshot, step)

    def merge(self, step: OuterStep) -> None:
        """Merge the outer step into the fragment, and update the gate. Inner steps made meanwhile are kept.

        The model's own weights are moved by `FragmentState.move_fast_weights`.
        """
        accepted = self._need_accepted()
        self.state.merge(step, self.since)
        self.state.gate.accept(accepted.gap_length, accepted.own, self.part, self._most_part, self._place)
        if self._probed is not None:
            gate, judgement = self._probed
            gate.accept(judgement)
        if self._rule is FINISH:
            self.state.final_gap = max(self.state.final_gap, accepted.gap_length)

    def _lengths(self, message: Tensor, gap: Tensor, gap_length: float) -> Lengths:
        movement = self.snapshot - self.state.on_device(self.state.slow)
        moved, own = length_of(movement), length_of(message)
        partner = math.sqrt(max(0.0, own**2 + gap_length**2 + 2.0 * float(torch.dot(message, gap))))
        back = -float(torch.dot(movement, gap)) / moved if moved else 0.0
        return Lengths(self.since.moved(moved), moved / max(1, self.since.steps), own, partner, back)

    def _need_accepted(self) -> Accepted:
        if self._accepted is None:
            raise ValueError("No message was accepted in this meeting.")
        return self._accepted


def bounded_weight(own_tokens: int, partner_tokens: int) -> float:
    """Return our share of the pair's tokens: at least a sixteenth of the partner's, but 0 for a peer without tokens.

    A peer claims its own tokens. Without the bound, a peer that overstates them would count for the whole pair. The weights of both sides
    add up to 1 if both compute them from the same two numbers.
    """
    if not own_tokens or not partner_tokens:  # a joining peer has trained nothing yet: its weights are other peers', and count with them
        return token_weight(own_tokens, partner_tokens)
    own, partner = max(own_tokens, partner_tokens // MAX_TOKEN_RATIO), max(partner_tokens, own_tokens // MAX_TOKEN_RATIO)
    return token_weight(own, partner)


def pack(failed: Tensor) -> str:
    """Write bool[num_blocks] as hex, the lowest bit first, padded with zeros to whole bytes; empty where nothing failed."""
    return np.packbits(failed.cpu().numpy(), bitorder="little").tobytes().hex() if bool(failed.any()) else ""


def unpack(text: str, num_blocks: int, device: torch.device) -> Tensor:
    """Read bool[num_blocks] back. Raises ValueError for a list of another number of blocks."""
    packed = np.frombuffer(bytes.fromhex(text) or bytes(-(-num_blocks // 8)), np.uint8)
    if packed.size != -(-num_blocks // 8):
        raise ValueError(f"A list of failed blocks of {packed.size} bytes does not fit {num_blocks} blocks.")
    return torch.from_numpy(np.unpackbits(packed, count=num_blocks, bitorder="little")).bool().to(device)
