"""How one peer's tensor reaches a whole group: coded once, decoded alike by everybody, the sender included.

For group methods (gradients, pseudo-gradients). A packing goes as it is, with error feedback where its few bits need it. A modulo codec
is read against a message of zeros: its window then spans the values themselves, its sketch travels along, and blocks that do not decode
count as zero.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from optim.codecs import PACKINGS
from optim.codecs.feedback import Feedback
from optim.fragment_codec import FragmentCodec
from peer.simulator.replicas import coding

# What the codecs' sources use: 2503.09799 none from 4 bits up, 1-bit Adam 1, SparseLoCo 0.95.
FEEDBACK_DECAY: Final = {"q2": 1.0, "sign1": 1.0, "topk": 0.95, "topk12": 0.95}


class Channel:
    """One peer's way to the group for one fragment; owns the residual of its error feedback, if there is one."""

    def __init__(self, codec: FragmentCodec, decay: float | None, device: torch.device) -> None:
        self._codec = codec
        self._num_coded = codec.fragment.num_coded
        name = codec.codec.name
        chosen = FEEDBACK_DECAY.get(name, 0.0) if decay is None else decay
        self._feedback = Feedback(PACKINGS[name], chosen, self._num_coded, device) if name in PACKINGS and chosen else None

    @property
    def num_bytes(self) -> int:
        """Return what one message sends."""
        return self._codec.sketch_bytes + self._codec.payload_bytes

    def send(self, values: Tensor, seed: int) -> Tensor:
        """Return what everybody decodes of f32[numel] values, as a new tensor. Raises Diverged for values that cannot be sent."""
        with coding("a group of peers"):
            return self._decoded(values, seed)

    def _decoded(self, values: Tensor, seed: int) -> Tensor:
        if self._feedback is not None:
            _, decoded = self._feedback.pack(values[: self._num_coded])
            return torch.cat((decoded, values[self._num_coded :]))
        zeros = torch.zeros_like(values)
        sketch, nothing = self._codec.sketch(values, seed), self._codec.sketch(zeros, seed)
        sent = self._codec.encode(values, seed, sketch, nothing)
        return self._codec.gap(self._codec.encode(zeros, seed, nothing, sketch), sent.payload).values
