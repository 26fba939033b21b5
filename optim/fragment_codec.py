"""A codec applied to a whole fragment: the large tensors through the codec, the small ones appended in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optim.codecs import Codec, Encoded, Gap, codec
from gossamer.optim.fragments import Fragment


@dataclass(frozen=True, slots=True)
class FragmentEncoded(Encoded):
    """Both parts of a coded fragment; `payload` is their payloads, one after the other."""

    coded: Encoded
    plain: Encoded


class FragmentCodec:
    """The same stages as a `Codec` for one fragment's flat vector of `fragment.numel` values; all sizes are fixed by the fragment.

    Several threads may call it, as long as no thread changes torch's precision of f32 products. Raises as the codec does.
    """

    def __init__(self, fragment: Fragment, coded: Codec) -> None:
        self.fragment = fragment
        self.codec = coded
        self._plain = codec("fp32")
        self._num_coded = fragment.num_coded
        self._num_plain = fragment.numel - fragment.num_coded
        self._coded_bytes = coded.payload_bytes(self._num_coded)
        self.sketch_bytes = coded.sketch_bytes(self._num_coded)
        self.payload_bytes = self._coded_bytes + self._plain.payload_bytes(self._num_plain)
        self.num_blocks = coded.num_blocks(self._num_coded)

    def sketch(self, message: Tensor, seed: int) -> Tensor:
        """Return uint8[sketch_bytes]."""
        return self.codec.sketch(message[: self._num_coded], seed)

    def encode(self, message: Tensor, seed: int, own_sketch: Tensor, partner_sketch: Tensor) -> FragmentEncoded:
        """Return the coded fragment; its payload is uint8[payload_bytes]."""
        coded = self.codec.encode(message[: self._num_coded], seed, own_sketch, partner_sketch)
        plain = self._plain.encode(message[self._num_coded :], seed, own_sketch, partner_sketch)
        payload = torch.cat((coded.payload, plain.payload))
        return FragmentEncoded(payload, message.numel(), coded, plain)

    def gap(self, own: FragmentEncoded, partner_payload: Tensor) -> Gap:
        """Return the gap partner minus own, f32[numel], and the failed blocks, bool[num_blocks]; values of failed blocks are zero."""
        if partner_payload.shape != (self.payload_bytes,):
            raise ValueError(f"Fragment {self.fragment.name} takes {self.payload_bytes} bytes, not {tuple(partner_payload.shape)}.")
        plain = self._plain.gap(own.plain, partner_payload[self._coded_bytes :])
        gap = self.codec.gap(own.coded, partner_payload[: self._coded_bytes], room=self._num_plain)
        gap.values[self._num_coded :] = plain.values
        return gap

    def failed_values(self, failed_blocks: Tensor) -> Tensor | None:
        """Spread both sides' failed blocks over the values: bool[numel], None for none. Raises ValueError for a bitmap of another size."""
        if failed_blocks.shape != (self.num_blocks,):
            raise ValueError(f"Fragment {self.fragment.name} has {self.num_blocks} blocks, not {tuple(failed_blocks.shape)}.")
        if not bool(failed_blocks.any()):
            return None
        values = torch.zeros(self.fragment.numel, dtype=torch.bool, device=failed_blocks.device)
        values[: self._num_coded] = failed_blocks.repeat_interleave(self.codec.block_values)[: self._num_coded]
        return values
