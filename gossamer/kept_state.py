"""State dictionaries of any optimizer, loader or module, in a checkpoint: tensors by name, and all else as JSON.

Nothing is pickled, so nothing in a checkpoint can run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer.peer.model.checkpoint import DTYPES
from gossamer.protocol.errors import BadSettings

PLAIN = (str, int, float, bool, type(None))


def pack(value: object, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; its tensors are put into `tensors`, not copied, under names that begin with `name`.

    Dictionaries, lists, tuples, bytes, numbers, texts and tensors are kept. Raises BadSettings, with the place, for anything else.
    """
    match value:
        case Tensor():
            _need_storable(value, name)
            while name in tensors:  # keys 1 and "1", or "a/b" and "b" in "a"
                name += "'"
            tensors[name] = value.detach()
            return {"tensor": name}
        case bytes():
            return {"bytes": value.hex()}
        case list() | tuple():
            packed = [pack(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": packed}
        case Mapping():
            return {"dict": [[_plain(key, name), pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
        case _:
            return {"value": _plain(value, name)}


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `pack` was given; tensors are the given ones. Raises KeyError or ValueError for anything else."""
    ((kind, content),) = packed.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "bytes":
            return bytes.fromhex(content)
        case "list" | "tuple":
            items = [unpack(item, tensors) for item in content]
            return items if kind == "list" else tuple(items)
        case "dict":
            return {key: unpack(item, tensors) for key, item in content}
        case "value":
            return content
    raise ValueError(f"unknown kind {kind!r}")


def _need_storable(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"of {tensor.dtype}" if tensor.dtype not in DTYPES else str(tensor.layout)
        raise BadSettings(
            f"a checkpoint cannot keep {name}: it is a tensor {kind}", hint="return a dense tensor of a common type from state_dict()"
        )


def _plain(value: object, name: str) -> object:
    if isinstance(value, PLAIN):
        return value
    raise BadSettings(
        f"a checkpoint cannot keep {name}: it is of type {type(value).__name__}",
        hint="return numbers, texts, bytes, tensors, lists and dictionaries from state_dict()",
    )
