"""Codecs by name. Their interface is in `optim.codecs.interface`."""

from __future__ import annotations

from gossamer.optim.codecs.interface import Codec, Encoded, Gap, Packing
from gossamer.optim.codecs.modulo import Modulo
from gossamer.optim.codecs.packings import BLOCKWISE, DENSE
from gossamer.optim.names import look_up

PACKINGS: dict[str, Packing] = {packing.name: packing for packing in (*DENSE, *BLOCKWISE)}
# The last number is kappa, the half-width of the window in gap scales (chosen from a table in docs/log.md).
MODULO = (Modulo(8, 16, 8.0), Modulo(6, 17, 7.0), Modulo(4, 18, 5.5), Modulo(3, 19, 5.5))
CODECS: dict[str, Codec] = {**PACKINGS, **{known.name: known for known in MODULO}}

__all__ = ["CODECS", "PACKINGS", "Codec", "Encoded", "Gap", "Packing", "codec"]


def codec(name: str) -> Codec:
    """Return the codec of that name. Raises ValueError with a suggestion."""
    return look_up("codec", name, CODECS)
