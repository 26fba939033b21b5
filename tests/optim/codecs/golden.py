"""Golden payloads: the SHA-256 of what each codec sends for one message, so that no codec changes its bytes by accident.

A new codec needs a line in `golden.json`. A codec that is in use must not change: peers of two releases would merge other values than
each sends. Give the new form another name and wire id instead, then

    python -m tests.optim.codecs.golden --rewrite

The message is of multiples of 1/16, small enough that every sum of them, and of their squares, is exact in any order.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from gossamer.optim.codecs import CODECS, Codec

FILE = Path(__file__).with_name("golden.json")
NUM_VALUES = 4096
SEED = 7


def messages() -> tuple[Tensor, Tensor]:
    """Return the messages of two sides, f32[NUM_VALUES]: the second differs from the first by one or two sixteenths."""
    number = torch.arange(NUM_VALUES)
    own = (number * 37 % 31 - 15).float() / 16
    return own, own + (number * 11 % 5 - 2).float() / 16


def sent(codec: Codec) -> dict[str, object]:
    """Return the wire id of a codec, and the hashes of a sketch and of a payload."""
    own, partner = messages()
    own_sketch, partner_sketch = codec.sketch(own, SEED), codec.sketch(partner, SEED)
    encoded = codec.encode(own, SEED, own_sketch, partner_sketch)
    return {"wire_id": codec.wire_id, "sketch": digest(own_sketch), "payload": digest(encoded.payload)}


def digest(content: Tensor) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def main() -> None:
    """Write `golden.json` anew."""
    if sys.argv[1:] != ["--rewrite"]:
        raise SystemExit(__doc__)
    FILE.write_text(json.dumps({name: sent(codec) for name, codec in CODECS.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
