"""A program of several ranks. Its tensors are whole on each rank (DDP), or sharded over the ranks by rows (FSDP2).

Rank 0 acts for all ranks. A method that needs the other ranks begins with `Ranks.order`: then they run the same method beside rank 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from gossamer.channel import FIRST, Order, Ranks, bytes_of
from gossamer.module_program import Evaluate, Evaluation, Model, ModuleProgram, Stateful
from gossamer.optim.fragments import Fragment, Piece, add, gather, scatter, split
from gossamer.peer.model.trainable import base_digest, frozen_tensors, is_sharded, shapes_of
from gossamer.peer.trainer.losses import Losses, MeasureFailed
from gossamer.peer.trainer.program import Kept
from gossamer.peer.trainer.weights import Weights
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.layout import layout_digest

CUT_VALUES: Final = 1 << 24  # of a checkpoint, that rank 0 gathers at a time: 64 MiB
STATES: Final = "program/"  # in the names of a checkpoint's tensors
BY_ROWS: Final = "shard the model with fully_shard over one mesh of all ranks, by rows, as it does without shard_placement_fn"


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a fragment that one rank holds."""

    fragment: Fragment  # the same, of the rows that this rank holds
    places: tuple[slice, ...]  # of its pieces in the flat vector of the whole

    def of(self, flat: Tensor) -> Tensor:
        """Return this rank's part of the flat vector of the whole: a copy."""
        return torch.cat([flat[:0], *(flat[place] for place in self.places)])

    def put(self, part: Tensor, flat: Tensor) -> None:
        """Copy this rank's part into the flat vector of the whole."""
        for place, values in zip(self.places, torch.split(part, [piece.numel for piece in self.fragment.pieces]), strict=True):
            flat[place] = values


class ShardedWeights(Weights):
    """Weights of which each rank holds some rows, and rank 0 what is not sharded."""

    is_sharded = True

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> None:
        super().__init__(tensors)
        self._ranks = ranks
        self._device = device
        self._cuts = split(shapes_of(tensors), CUT_VALUES)

    def gather(self, fragment: Fragment) -> Tensor:
        """As Weights.gather on rank 0; nothing elsewhere."""
        ranks = self._ranks
        flat = self._empty(fragment.numel if ranks.is_first else 0)
        others = [(number, share, self._empty(share.fragment.numel)) for number, share in self._others_shares(fragment)]
        ranks.order("gather", asdict(fragment))  # what fails for want of memory has failed before
        own = self._own_share(fragment)
        part = gather(own.fragment, self._parts(_names(own.fragment))) if own.places else flat[:0]
        if ranks.is_first:
            own.put(part, flat)
        elif own.places:
            ranks.send(part, FIRST)
        for number, share, received in others:
            share.put(ranks.receive(received, number), flat)
        return flat

    def scatter(self, fragment: Fragment, flat: Tensor | None) -> None:
        """As Weights.scatter; None on the other ranks."""
        self._spread(fragment, flat, scatter)

    def add(self, fragment: Fragment, flat: Tensor | None) -> None:
        """As Weights.add; None on the other ranks."""
        self._spread(fragment, flat, add)

    def values(self) -> dict[str, Tensor]:
        """As Weights.values, on rank 0."""
        whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in self.tensors.items()}
        for cut in self._cuts:
            scatter(cut, self.gather(cut), whole)
        return whole

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """As Weights.restore, on rank 0."""
        for cut in self._cuts:
            self.scatter(cut, gather(cut, values))

    def remember(self, names: Collection[str] | None) -> None:
        """Copy the values of these tensors, on all ranks."""
        self._ranks.order("remember", None if names is None else list(names))
        super().remember(names)

    def put_back(self) -> None:
        """Put them back."""
        self._ranks.order("put_back")
        super().put_back()

    def forget(self) -> None:
        """Forget them."""
        self._ranks.order("forget")
        super().forget()

    def _spread(self, fragment: Fragment, flat: Tensor | None, change: Callable[[Fragment, Tensor, Mapping[str, Tensor]], None]) -> None:
        own = self._own_share(fragment)
        if flat is None:
            part = self._empty(own.fragment.numel)
            if own.places:
                self._ranks.receive(part, FIRST)
        else:
            if flat.shape != (fragment.numel,):
                raise ValueError(f"Fragment {fragment.name} has {fragment.numel} values, the flat vector has shape {tuple(flat.shape)}.")
            part = own.of(flat).to(self._device)
            others = [(number, share.of(flat).to(self._device)) for number, share in self._others_shares(fragment)]
            self._ranks.order(change.__name__, asdict(fragment))
            for number, theirs in others:
                self._ranks.send(theirs, number)
        change(own.fragment, part, self._parts(_names(own.fragment)))

    def _own_share(self, fragment: Fragment) -> Share:
        return share_of(fragment, self.tensors, self._ranks.number, self._ranks.count)

    def _others_shares(self, fragment: Fragment) -> list[tuple[int, Share]]:
        """Return, on rank 0, what the other ranks hold of a fragment, if anything."""
        count = self._ranks.count if self._ranks.is_first else 0
        shares = [(number, share_of(fragment, self.tensors, number, count)) for number in range(1, count)]
        return [(number, share) for number, share in shares if share.places]

    def _empty(self, num_values: int) -> Tensor:
        return torch.empty(num_values, dtype=torch.float32, device=self._device)

    def _parts(self, names: Collection[str] | None) -> Mapping[str, Tensor]:
        tensors = super()._parts(names)
        return {name: local(tensor) for name, tensor in tensors.items()}


class CommonEvaluation(Evaluation):
    """Calls `evaluate` on all ranks, whose shards it needs. The losses of rank 0 count."""

    def __init__(self, evaluate: Evaluate, model: Model, device: torch.device, ranks: Ranks) -> None:
        super().__init__(evaluate, model, device)
        self._model = model
        self._ranks = ranks

    def __call__(self) -> Losses:
        """Measure the weights. Raises MeasureFailed, on rank 0 alone, where it fails on a rank."""
        self._ranks.order("evaluate")
        losses, failure = Losses((0.0,)), ""
        try:
            losses = super().__call__()
        except MeasureFailed as error:
            failure = str(error)
        reshard(self._model)
        for number, words in enumerate(self._ranks.collect(failure)):
            if words:
                raise MeasureFailed(f"{words} (rank {number})", hint="see the traceback in your program")
        return losses


class RankProgram(ModuleProgram):
    """The program's part on this rank. Raises BadSettings, with a hint, for tensors that are sharded otherwise than by rows."""

    def __init__(
        self, model: Model, optimizers: Sequence[Optimizer], evaluate: Evaluate | None, kept: Mapping[str, Stateful], ranks: Ranks
    ) -> None:
        reshard(model)
        super().__init__(model, optimizers, evaluate, kept)
        self.ranks = ranks
        sharded = {name: tensor for name, tensor in (self.parameters | frozen_tensors(model)).items() if is_sharded(tensor)}
        meshes = [_mesh_of(name, tensor, ranks) for name, tensor in sharded.items()]
        self._mesh = meshes[0] if meshes else None
        if self._is_sharded:
            self.weights = ShardedWeights(self.parameters, ranks, self.device)
        if self._mesh is not None and evaluate is not None:
            self._evaluation = CommonEvaluation(evaluate, model, self.device, ranks)

    @property
    def layout(self) -> str:
        """The layout of the model and the names of its sharded tensors: equal on all ranks, or the program is refused."""
        return f"{layout_digest(shapes_of(self.parameters))} {[name for name, tensor in self.parameters.items() if is_sharded(tensor)]}"

    @functools.cached_property
    def base(self) -> str:
        """As ModuleProgram.base, on rank 0."""
        self.ranks.order("give_base")
        return base_digest(self._model, self._whole)

    def obey(self, order: Order) -> None:
        """Carry out an order of rank 0, on another rank."""
        arguments, weights = order.arguments, self.weights
        match order.name:
            case "gather":
                weights.gather(_fragment(arguments[0]))
            case "scatter" | "add" as name if isinstance(weights, ShardedWeights):
                (weights.add if name == "add" else weights.scatter)(_fragment(arguments[0]), None)
            case "remember" | "put_back" | "forget" as name:
                getattr(weights, name)(*arguments)
            case "evaluate":
                self._evaluate_beside()
            case "even_out":
                self.even_out(_fragment(arguments[0]))
            case "give_base":
                for tensor in frozen_tensors(self._model).values():
                    self._whole(tensor)
            case "give_states":
                self._give_states(*arguments)
            case "take_states":
                self._take_states(*arguments)
            case "forget_optimizer":
                self.forget_optimizer()
            case name:
                raise AssertionError(f"no such order: {name}")

    def reshard(self) -> None:
        """Free whole parameters that a forward pass without a backward one has left: what is written to the shards counts then."""
        reshard(self._model)

    def even_out(self, fragment: Fragment) -> None:
        """Give the other ranks rank 0's values of the fragment's tensors that each holds whole."""
        pieces = tuple(piece for piece in fragment.pieces if not is_sharded(self.parameters[piece.name]))
        if not pieces:
            return
        self.ranks.order("even_out", asdict(fragment))
        common = Fragment(fragment.id, fragment.name, pieces, 0)
        flat = gather(common, self.parameters)
        self.ranks.broadcast(flat)
        if not self.ranks.is_first:
            scatter(common, flat, self.parameters)

    def kept(self) -> Kept:
        """As ModuleProgram.kept, on rank 0; copies on the host where the program is sharded, and the names of what is."""
        own, state = super().kept()
        if not self._is_sharded:
            return Kept(own, state)
        names = [name for name, tensor in own.items() if is_sharded(tensor)]
        self.ranks.order("give_states", names)
        whole = {name: self._whole(tensor) if is_sharded(tensor) else tensor.to("cpu", copy=True) for name, tensor in own.items()}
        return Kept(whole, state | {"sharded": names})

    def changes(self, name: str) -> bool:
        """As ModuleProgram.changes."""
        return not self._is_sharded

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """As ModuleProgram.restore, on rank 0 for all: each rank gets its rows of what is sharded, and all of the rest."""
        own = {name: tensor.cpu() for name, tensor in tensors.items() if name.startswith(STATES)}
        sharded = self._sharded_names(own, state.get("sharded", ()))
        layout = {name: [str(one.dtype).removeprefix("torch."), list(one.shape), name in sharded] for name, one in own.items()}
        self.ranks.order("take_states", state["kept"], layout)
        for name, tensor in own.items():
            if name in sharded:
                for number in range(1, self.ranks.count):
                    if (part := rows_of(tensor, number, self.ranks.count)).numel():
                        self.ranks.send(part, number)
                own[name] = self._from_rows(rows_of(tensor, FIRST, self.ranks.count), tensor.shape)
            elif tensor.numel():
                self.ranks.broadcast(bytes_of(tensor))
        super().restore(own, state)

    def forget_optimizer(self) -> None:
        """As ModuleProgram.forget_optimizer, on all ranks."""
        self.ranks.order("forget_optimizer")
        super().forget_optimizer()

    @property
    def _is_sharded(self) -> bool:
        return any(map(is_sharded, self.parameters.values()))

    def _evaluate_beside(self) -> None:
        if self._evaluation is None:
            self.ranks.collect("evaluate is None")
        else:
            self._evaluation()

    def _give_states(self, names: Sequence[str]) -> None:
        own = super().kept().tensors
        for name in names:
            self._whole(own[name])

    def _take_states(self, kept: Mapping[str, Any], layout: Mapping[str, tuple[str, Sequence[int], bool]]) -> None:
        tensors, number, count = {}, self.ranks.number, self.ranks.count
        for name, (dtype, shape, is_by_rows) in layout.items():
            first, last = row_range(shape[0], number, count) if is_by_rows else (0, 0)
            tensors[name] = torch.empty((last - first, *shape[1:]) if is_by_rows else shape, dtype=getattr(torch, dtype), device="cpu")
            if tensors[name].numel() and is_by_rows:
                self.ranks.receive(tensors[name], FIRST)
            elif tensors[name].numel():
                self.ranks.broadcast(bytes_of(tensors[name]))
            if is_by_rows:
                tensors[name] = self._from_rows(tensors[name], torch.Size(shape))
        try:
            super().restore(tensors, {"kept": kept})
        except (KeyError, ValueError, RuntimeError) as error:
            reason = f"the state that rank 0 has restored does not fit this rank: {error}"
            raise BadSettings(reason, hint="pass the same optimizers and the same names in `state` on every rank") from error

    def _sharded_names(self, tensors: Mapping[str, Tensor], recorded: Collection[str]) -> set[str]:
        """Return which tensors of a checkpoint are to be sharded: those that were, and states of optimizers shaped as sharded parameters.

        A checkpoint of one process, or of DDP ranks, has none that were.
        """
        if self._mesh is None:
            return set()
        like = {
            f"{STATES}optimizer{number}/state/{place}/": parameter.shape
            for number, optimizer in enumerate(self._optimizers)
            for place, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])
            if is_sharded(parameter)
        }
        shaped = {name for name, tensor in tensors.items() if like.get(f"{name.rpartition('/')[0]}/") == tensor.shape}
        return shaped | (set(recorded) & tensors.keys())

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor whole on the host, on rank 0; elsewhere give rank 0 this rank's rows of it."""
        if not is_sharded(tensor):
            return tensor
        _mesh_of("a tensor of the program's state", tensor, self.ranks)
        part, ranks = local(tensor), self.ranks
        if not ranks.is_first:
            if part.numel():
                ranks.send(part, FIRST)
            return part
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for number in range(ranks.count):
            if (place := rows_of(whole, number, ranks.count)).numel():
                place.copy_(part if number == FIRST else ranks.receive(torch.empty_like(place, device=part.device), number))
        return whole

    def _from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        assert self._mesh is not None, "only a program with sharded tensors has any"
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(rows.to(self.device), self._mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)


def reshard(model: Model) -> None:
    """Free the whole parameters of FSDP2's modules, between two steps."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def row_range(num_rows: int, number: int, count: int) -> tuple[int, int]:
    """Return the first row that a rank holds, and one past its last: equal parts, of which the last ones may be shorter or empty."""
    size = -(-num_rows // count)
    return min(num_rows, number * size), min(num_rows, (number + 1) * size)


def rows_of(whole: Tensor, number: int, count: int) -> Tensor:
    """Return the rows of a whole tensor that a rank holds: a view."""
    first, last = row_range(whole.shape[0], number, count)
    return whole[first:last]


def share_of(fragment: Fragment, tensors: Mapping[str, Tensor], number: int, count: int) -> Share:
    """Return what a rank holds of a fragment. Tensors that are not sharded count as rank 0's."""
    pieces, places, start = [], [], 0
    for piece in fragment.pieces:
        shape = tensors[piece.name].shape
        if not is_sharded(tensors[piece.name]):
            if number == FIRST:
                pieces.append(piece)
                places.append(slice(start, start + piece.numel))
        else:
            first, last = piece.rows or (0, shape[0])
            own_first, own_last = row_range(shape[0], number, count)
            row_values, begin, end = piece.numel // (last - first), max(first, own_first), min(last, own_last)
            if begin < end:
                pieces.append(Piece(piece.name, (end - begin) * row_values, (begin - own_first, end - own_first)))
                places.append(slice(start + (begin - first) * row_values, start + (end - first) * row_values))
        start += piece.numel
    return Share(Fragment(fragment.id, fragment.name, tuple(pieces), 0), tuple(places))


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: a view, good until the next forward pass."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _mesh_of(name: str, tensor: Tensor, ranks: Ranks) -> DeviceMesh:
    """Return the mesh over which a tensor is sharded by rows. Raises BadSettings for one that is sharded in another way."""
    assert isinstance(tensor, DTensor), "the others are whole"
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1:
        raise BadSettings(f"{name} lies on a mesh of {mesh.ndim} dimensions {list(mesh.shape)}; a peer shards over one", hint=BY_ROWS)
    if mesh.mesh.tolist() != list(range(ranks.count)):
        raise BadSettings(f"{name} lies on ranks {mesh.mesh.tolist()}, the program has {ranks.count}", hint=BY_ROWS)
    first, last = row_range(tensor.shape[0] if tensor.ndim else 0, ranks.number, ranks.count)
    if not placements[0].is_shard(0) or local(tensor).shape != (last - first, *tensor.shape[1:]):
        raise BadSettings(f"{name} is placed as {placements[0]}, not sharded by its rows", hint=BY_ROWS)
    return mesh


def _names(fragment: Fragment) -> set[str]:
    return {piece.name for piece in fragment.pieces}


def _fragment(fields: Mapping[str, Any]) -> Fragment:
    """Read what `asdict` has made of a fragment, and JSON of that."""
    pieces = tuple(Piece(one["name"], one["numel"], None if one["rows"] is None else tuple(one["rows"])) for one in fields["pieces"])
    return Fragment(fields["id"], fields["name"], pieces, fields["num_coded"])
