"""The names of methods, codecs and optimizers, and the error for a name that is not among them. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final, TypeVar

Value = TypeVar("Value")
MAX_LISTED = 16
# The tables with what these names stand for import torch, which takes longer than the answer to a typing error may.
METHOD_NAMES: Final = ("noloco",)
SIMULATED_NAMES: Final = ("diloco", "diloco-heavy-ball", "streaming", "ddp", "local")  # methods of the simulator alone
CODEC_NAMES: Final = ("fp32", "bf16", "int8", "nf4", "e3m0", "q2", "sign1", "modulo8", "modulo6", "modulo4", "modulo3")
OPTIMIZER_NAMES: Final = ("adamw", "muon")


def look_up(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """Return the entry of that name. Raises ValueError with a suggestion."""
    if name not in table:
        raise ValueError(f"There is no {kind} named {name!r}: {suggestion(name, table)}.")
    return table[name]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the known names that look most like it, and all of them where they are few."""
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.4)
    parts = [f"did you mean {' or '.join(close)}?"] if close else []
    if len(names) <= MAX_LISTED or not close:
        parts.append(f"choose from {', '.join(names)}")
    return " ".join(parts)
