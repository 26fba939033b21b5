"""Seeded mutations of valid bytes and JSON, for tests that every reader ends in a declared error or works."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

EDGES = (b"\xff" * 4, b"\x00" * 4, b"\xff\xff\xff\x7f", b"\xff" * 9 + b"\x01", b"\x80")
VALUES = (
    None, True, -1, 0, 1.5, 2**31, 2**32 - 1, 2**63, 10**30, -(10**30), "", "x", "\ud800", [], {}, [[]], [None], {"a": 1}, "(a+)+$", 1e308,
)  # fmt: skip


def mutated_bytes(valid: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few places changed, removed, repeated or inserted."""
    data = bytearray(valid)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place, size = rng.randrange(len(data) + 1), rng.randrange(1, 20)
        match rng.randrange(6):
            case 0:
                data[place : place + 1] = rng.randbytes(1)
            case 1:
                del data[place : place + size]
            case 2:
                data[place:place] = rng.randbytes(size)
            case 3:
                data[place : place + 4] = rng.choice(EDGES)
            case 4:
                data[place:place] = data[rng.randrange(len(data) + 1) :][:size]
            case 5:
                del data[place:]
    return bytes(data)


def mutated_json(valid: str, rng: random.Random) -> str:
    """Return JSON with a few values replaced or removed."""
    value = json.loads(valid)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if places:
            holder, key = rng.choice(places)
            if rng.random() < 0.3:
                del holder[key]
            else:
                holder[key] = rng.choice(VALUES)
    return json.dumps(value)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = list(value.items())[:40] if isinstance(value, dict) else list(enumerate(value))[:8] if isinstance(value, list) else []
    for key, item in items:
        yield value, key
        yield from _places(item)
