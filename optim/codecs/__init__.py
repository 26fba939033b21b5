"""Codecs by name and by wire id. What a codec is: `optim.codecs.interface`."""

from __future__ import annotations

import torch

from optim.codecs.blockwise import Int8
from optim.codecs.dense import Dense
from optim.codecs.interface import Codec, Direct, Encoded, Gap, Packing
from optim.codecs.lowbit import E3M0, NF4, Q2, SIGN1
from optim.codecs.modulo import Modulo
from optim.codecs.topk import TopK, TopK12
from optim.names import nearest

_DENSE = (Dense("fp32", 0, torch.float32), Dense("bf16", 1, torch.bfloat16))
PACKINGS: dict[str, Packing] = {packing.name: packing for packing in (*_DENSE, Int8(), NF4, E3M0(), Q2, SIGN1, TopK(), TopK12())}
CODECS: dict[str, Codec] = {packing.name: Direct(packing) for packing in PACKINGS.values()}
# Half-widths of the windows in gap scales: docs/log.md has the table they were chosen from.
CODECS |= {known.name: known for known in (Modulo(8, 16, 8.0), Modulo(6, 17, 7.0), Modulo(4, 18, 5.5), Modulo(3, 19, 5.5))}

__all__ = ["CODECS", "PACKINGS", "Codec", "Direct", "Encoded", "Gap", "Packing", "codec", "codec_by_wire_id"]


def codec(name: str) -> Codec:
    """Return the codec of that name. Raises ValueError that names the nearest ones."""
    if name not in CODECS:
        raise ValueError(f"There is no codec named {name!r}. Did you mean {nearest(name, CODECS)}?")
    return CODECS[name]


def codec_by_wire_id(wire_id: int) -> Codec:
    """Return the codec with that number on the wire. Raises ValueError for an unknown one."""
    for known in CODECS.values():
        if known.wire_id == wire_id:
            return known
    raise ValueError(f"No codec has the wire id {wire_id}.")
