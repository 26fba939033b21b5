"""What peers exchange of a program's model: its trainable tensors by name. And the digest of what they do not exchange.

Names are those of the bare model, whatever it is wrapped in, so that peers on one GPU, compiled or in parallel, meet each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from gossamer.optim.fragments import STATISTICS
from gossamer.protocol import limits
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.layout import Shapes, by_name, first_difference, layout_digest
from gossamer.protocol.run.manifest import ProgramManifest

WRAPPERS: Final = {"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # of torch.compile, DDP and their like
MAX_NAME_CHARS: Final = 200
PIECE_BYTES: Final = 1 << 24  # hashed together
NUM_NAMED: Final = 3  # tensors in an error
SHARDED: Final = "torch.distributed.tensor"  # the module of DTensor; importing it takes long
HALVES: Final = (torch.float16, torch.bfloat16)
OTHER: Final = "train the model of the run's host: the same script, or one with the same names and shapes"


def trainable_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that peers average, in the order of their names, tied ones once; they are the model's own, not copies.

    Of a module, these are the parameters that require a gradient and the persistent buffers of floats, such as the statistics of a batch
    norm. The names of the latter begin with `statistics/`: peers average them and nobody extrapolates them. Of a mapping, all tensors.
    Raises BadSettings, with the reason, for tensors that no meeting can move: not in float32, without storage, sparse, empty, or parts of
    each other.
    """
    given = _of_module(model) if isinstance(model, nn.Module) else model.items()
    tensors = _named_once(given)
    if not tensors:
        raise BadSettings("the model has nothing to train", hint="pass a model with parameters that require a gradient")
    for name, tensor in tensors.items():
        _need_f32(name, tensor)
    tensors = _each_value_once(tensors)
    num_values = sum(tensor.numel() for tensor in tensors.values())
    if len(tensors) > limits.TENSORS or num_values > limits.PARAMETERS:
        most = f"{limits.TENSORS} tensors of {limits.PARAMETERS / 1e9:.0f} billion values"
        raise BadSettings(f"the model has {len(tensors)} tensors of {num_values} values; at most {most} can be trained", hint="train less")
    return tensors


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a part of a tensor: a DTensor, as FSDP2 makes of parameters."""
    return type(tensor).__module__.startswith(SHARDED)


def frozen_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a module that require no gradient, in the order of their names, tied ones once."""
    if not isinstance(model, nn.Module):
        return {}
    return _named_once(item for item in model.named_parameters(remove_duplicate=False) if not item[1].requires_grad)


def base_digest(model: nn.Module | Mapping[str, Tensor], whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> str:
    """Return the SHA-256 of the frozen parameters: names, shapes, types and bytes; empty without any. Takes seconds for a large model.

    Holds one piece of a tensor at a time; a tensor that is not contiguous is copied whole. `whole` returns all of a tensor that may be
    sharded, before the next one is asked for. Raises BadSettings for one without storage.
    """
    frozen = frozen_tensors(model)
    digest = hashlib.sha256()
    for name, tensor in frozen.items():
        _need_storage(name, tensor)
        digest.update(json.dumps([name, str(tensor.dtype), *tensor.shape]).encode())
        for piece in _pieces(whole(tensor)):
            digest.update(piece)
    return digest.hexdigest() if frozen else ""


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of weights: names, shapes and values in f32, independent of their device and number format."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, *tensor.shape]).encode())
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the tensors' shapes by name, in their order."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def need_model_of(manifest: ProgramManifest, shapes: Shapes, base: str) -> None:
    """Raise BadSettings unless a model of these shapes, with frozen parameters of this digest, is the run's."""
    theirs, digest = manifest.model, layout_digest(by_name(shapes))
    if digest != theirs.layout:
        what = first_difference(theirs.shapes, shapes) if theirs.shapes is not None else f"this one has {_in_words(shapes)}"
        raise BadSettings(f"another model than the run's: {what}; its layout has digest {digest}, the run's {theirs.layout}", hint=OTHER)
    if base != (manifest.program.base or ""):
        ours, run = base or "none", manifest.program.base or "none"
        raise BadSettings(
            f"other frozen parameters than the run's: their digest is {ours}, the run's {run}",
            hint="load the pretrained weights of the run's host, in its number format, and freeze the same parameters",
        )


def _in_words(shapes: Shapes) -> str:
    named = ", ".join(f"{name} {list(shape)}" for name, shape in list(by_name(shapes).items())[:NUM_NAMED])
    return f"{len(shapes)} tensors of {sum(map(math.prod, shapes.values()))} values: {named}, ..."


def _of_module(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, tensor) for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad)
    kept = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in kept and buffer.is_floating_point():
            yield f"{STATISTICS}{name}", buffer


def _named_once(given: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by their names in the bare model, in the order of these; a tied one by its first. Raises BadSettings."""
    named: dict[str, Tensor] = {}
    for wrapped, tensor in given:
        if not isinstance(tensor, Tensor):
            raise BadSettings(f"{wrapped} is {type(tensor).__name__}, not a tensor", hint="pass a module, or a mapping of names to tensors")
        name = _bare(wrapped)
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise BadSettings(
                f"{ascii(name)[:MAX_NAME_CHARS]} is no name of a tensor",
                hint=f"give it 1 to {MAX_NAME_CHARS} printable characters",
            )
        if named.setdefault(name, tensor) is not tensor:
            raise BadSettings(
                f"two tensors are named {name}", hint="rename one: parts of names that wrappers add, like `module`, do not count"
            )
    owners: dict[int, str] = {}
    for name in sorted(named):
        owners.setdefault(id(named[name]), name)
    return {name: named[name] for name in sorted(owners.values())}


def _each_value_once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without those that see the same values as an earlier one: so `state_dict` gives tied ones.

    A meeting would move values twice that have two names. Raises BadSettings for contiguous tensors that overlap in part.
    """
    kept: dict[str, Tensor] = {}
    places: dict[tuple[object, ...], str] = {}
    spans: list[tuple[str, int, int, str]] = []  # of memory: device, first and last byte, name
    for name, tensor in tensors.items():
        if type(tensor.data) is not Tensor:  # sharded, or of another kind without an address
            kept[name] = tensor
            continue
        device, start = str(tensor.device), tensor.data_ptr()
        if places.setdefault((device, start, tensor.shape, tensor.stride()), name) == name:
            kept[name] = tensor
            if tensor.is_contiguous():
                spans.append((device, start, start + tensor.nbytes, name))
    for (device, _, end, one), (place, start, _, other) in itertools.pairwise(sorted(spans)):
        if place == device and start < end:
            raise BadSettings(f"{one} and {other} share some of their values", hint="pass each value once: the whole tensor or its parts")
    return kept


def _bare(name: str) -> str:
    statistics, name = name.startswith(STATISTICS), name.removeprefix(STATISTICS)
    *path, last = name.split(".")
    bare = ".".join([*(part for part in path if part not in WRAPPERS), last])
    return f"{STATISTICS}{bare}" if statistics else bare


def _need_storage(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise BadSettings(f"{name} is on the meta device, without values", hint="load the weights before you pass the model")
    if tensor.layout is not torch.strided:
        raise BadSettings(f"{name} is sparse ({tensor.layout})", hint="make it dense: `tensor.to_dense()`")


def _need_f32(name: str, tensor: Tensor) -> None:
    _need_storage(name, tensor)
    if tensor.dtype in HALVES:
        raise BadSettings(
            f"{name} is {tensor.dtype}, too coarse to average: a meeting that moves bf16 weights by 0.1 % of their size loses 80 % of it",
            hint="train f32 weights under torch.autocast, or pass the f32 master weights by name",
        )
    if tensor.dtype is not torch.float32:
        raise BadSettings(
            f"{name} is {tensor.dtype}; peers average f32 values",
            hint="convert it to float32, or pass only the tensors that train, by name",
        )
    if not tensor.numel():
        raise BadSettings(f"{name} has no values (shape {list(tensor.shape)})", hint="leave it out")


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    step = max(1, PIECE_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu().view(torch.uint8).numpy().data
