"""How one peer's tensor reaches a whole group: coded once, decoded alike by everybody, the sender included.

For group methods (gradients, pseudo-gradients). A packing goes as it is, with error feedback where its few bits need it. A modulo codec
is read against a message of zeros: its window then spans the values themselves, its sketch travels along, and blocks that do not decode
count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from optim.codecs import PACKINGS
from optim.codecs.packings import Feedback
from optim.fragment_codec import FragmentCodec
from peer.simulator.replicas import coding

# What the codecs' sources use: 2503.09799 none from 4 bits up, 1-bit Adam 1, SparseLoCo 0.95.
FEEDBACK_DECAY: Final = {"q2": 1.0, "sign1": 1.0, "topk": 0.95, "topk12": 0.95}
SMALL: Final = PACKINGS["fp32"]  # of small tensors, as in FragmentCodec


def feedback_decay(codec: str, decay: float | None) -> float:
    """Return the decay of a codec's error feedback, `decay` or what the codec needs (None); 0: none is kept."""
    chosen = FEEDBACK_DECAY.get(codec, 0.0) if decay is None else decay
    return chosen if codec in PACKINGS else 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """What crosses the wire, both uint8; the sketch is empty but for a modulo codec."""

    sketch: Tensor
    payload: Tensor


class Channel:
    """One peer's way to the group for one fragment; owns the residual of its error feedback, if there is one."""

    def __init__(self, codec: FragmentCodec, decay: float | None, device: torch.device) -> None:
        self._codec = codec
        self._num_coded = codec.fragment.num_coded
        self._packing = PACKINGS.get(codec.codec.name)
        chosen = feedback_decay(codec.codec.name, decay)
        self._feedback = Feedback(self._packing, chosen, self._num_coded, device) if self._packing and chosen else None

    @property
    def num_bytes(self) -> int:
        """Return what one message sends."""
        return self._codec.sketch_bytes + self._codec.payload_bytes

    def send(self, values: Tensor, seed: int) -> Tensor:
        """Return what everybody decodes of f32[numel] values, as a new tensor. Raises Diverged for values that cannot be sent."""
        with coding("a group of peers"):
            return self.decode(self.encode(values, seed), seed)

    def encode(self, values: Tensor, seed: int) -> Message:
        """Return what is sent, and keep what it loses where there is error feedback. Raises ValueError for values that cannot be sent."""
        sketch = self._codec.sketch(values, seed)
        if self._feedback is not None:
            coded, _ = self._feedback.pack(values[: self._num_coded])
            return Message(sketch, torch.cat((coded, SMALL.pack(values[self._num_coded :]))))
        nothing = sketch if self._packing else self._codec.sketch(torch.zeros_like(values), seed)
        return Message(sketch, self._codec.encode(values, seed, sketch, nothing).payload)

    def decode(self, message: Message, seed: int) -> Tensor:
        """Return f32[numel]: any peer's channel for this fragment gives the same, whatever it has sent itself."""
        numel = self._codec.fragment.numel
        if self._packing:
            coded, small = message.payload.split_with_sizes(
                [self._packing.payload_bytes(self._num_coded), SMALL.payload_bytes(numel - self._num_coded)]
            )
            return torch.cat((self._packing.unpack(coded, self._num_coded), SMALL.unpack(small, numel - self._num_coded)))
        zeros = torch.zeros(numel, device=message.payload.device)
        own = self._codec.encode(zeros, seed, self._codec.sketch(zeros, seed), message.sketch)
        return self._codec.gap(own, message.payload).values
