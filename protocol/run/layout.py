"""The layout of a model: names and shapes of the tensors that peers exchange, in their order, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def layout_digest(shapes: Shapes) -> str:
    """Return the SHA-256 of the tensors' names, shapes and order, which must be equal for peers to decode each other's fragments."""
    return hashlib.sha256(json.dumps([[name, *shape] for name, shape in shapes.items()]).encode()).hexdigest()


def by_name(shapes: Shapes) -> Shapes:
    """Return the shapes in the order in which the tensors of a program travel: that of their names, so that no script determines it."""
    return dict(sorted(shapes.items()))


def num_chars(shapes: Shapes) -> int:
    """Return the length of the names and shapes as text, which the manifest bounds."""
    return sum(len(name) + len(str(list(shape))) for name, shape in shapes.items())


def first_difference(theirs: Shapes, ours: Shapes) -> str:
    """Describe the first tensor, by name, that two layouts do not share; empty for equal layouts."""
    for name in sorted({*theirs, *ours}):
        if name not in theirs:
            return f"only this model has {name} {list(ours[name])}"
        if name not in ours:
            return f"only the run's has {name} {list(theirs[name])}"
        if theirs[name] != ours[name]:
            return f"{name} is {list(ours[name])} here, {list(theirs[name])} in the run"
    return ""
