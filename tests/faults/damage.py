"""Damage of a frame by a faulty network."""

from __future__ import annotations

import random


def damaged(frame: bytes, kind: str, draws: random.Random) -> list[bytes]:
    """Return what arrives of a frame that is flipped, cut short, sent twice, or lost."""
    match kind:
        case "flipped":
            data = bytearray(frame)
            for _ in range(draws.choice((1, 1, 8))):
                data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
            return [bytes(data)]
        case "cut short":
            return [frame[: draws.randrange(len(frame))]]
        case "twice":
            return [frame, frame]
    return []
