"""Models cut into stages: one holder computes a contiguous range of blocks.

The first stage has the embedding, the last one the final norm, the head and the loss. A stage is the transformers model itself with
identity layers where other stages have theirs, so names of parameters, fragments and optimizer groups are those of the whole model.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from gossamer.peer.machine.stage_line import COMPUTE, COMPUTE_LAST
from gossamer.peer.model.computing import DOCUMENT_END, computing_in, inputs_of, mask_documents
from gossamer.peer.model.model import auto_classes, hollow_model, state_tensors
from gossamer.peer.model.trainable import shapes_of
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.layout import Shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gossamer.protocol.run.manifest import StagedManifest
    from gossamer.protocol.run.sections import ModelSection

TRIED_TOKENS: Final = 4
_Balance = tuple[tuple[int, int], tuple[int, ...]]  # largest cost of a stage and sum of the squares; the ends of the stages
ELSE_WHOLE: Final = "train it whole, with [stages] count = 1, or choose an architecture such as 'llama'"


@dataclass(frozen=True, slots=True)
class Cut:
    """Stage `stage`, from 0 on, of a model whose stages have these numbers of blocks. Raises ValueError for a cut that cannot be."""

    blocks: tuple[int, ...]
    stage: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage < len(self.blocks) or min(self.blocks) < 1:
            raise ValueError(f"There is no stage {self.stage} of {len(self.blocks)} with {self.blocks} blocks.")

    @property
    def is_first(self) -> bool:
        """Return whether the stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the final norm, the head and the loss."""
        return self.stage == len(self.blocks) - 1

    @property
    def span(self) -> range:
        """Return the numbers of the stage's blocks in the whole model."""
        ends = list(accumulate(self.blocks, initial=0))
        return range(ends[self.stage], ends[self.stage + 1])


def manifest_cuts(manifest: StagedManifest) -> tuple[Cut, ...]:
    """Return the run's stages, balanced unless the manifest says how many blocks each has. Raises BadManifest as `need_stages`."""
    blocks = manifest.stages.blocks
    if blocks:
        need_stages(manifest.model, len(blocks))
        _need_blocks(hollow_model(manifest.model), blocks)
    else:
        blocks = balanced_blocks(manifest.model, manifest.stages.count)
    return tuple(Cut(blocks, stage) for stage in range(len(blocks)))


def build_stage(section: ModelSection, cut: Cut, seed: int) -> PreTrainedModel:
    """Build one stage in float32 on the CPU, in training mode, with weights from (seed, stage). No memory is used for other stages.

    torch's generator is restored. Raises BadManifest as `need_stages`.
    """
    need_stages(section, len(cut.blocks))
    hollow = _hollow_stage(section, cut)
    with auto_classes(section.architecture), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stage_seed(seed, cut.stage))
        return _with_values(hollow)


def stage_seed(seed: int, stage: int) -> int:
    """Return the seed of a stage's initial weights."""
    return int.from_bytes(hashlib.sha256(f"{seed}/stage/{stage}".encode()).digest()[:8], "little")


def stage_shapes(section: ModelSection, cut: Cut) -> Shapes:
    """Return the names and shapes of what one stage trains, in the model's order, without allocating them. Raises BadManifest."""
    return shapes_of(state_tensors(_hollow_stage(section, cut)))


def _hollow_stage(section: ModelSection, cut: Cut) -> PreTrainedModel:
    """Build one stage on the meta device. Raises BadManifest."""
    hollow = hollow_model(section)
    _need_blocks(hollow, cut.blocks)
    return keep_stage(hollow, cut)


def stage_of(model: PreTrainedModel, cut: Cut) -> PreTrainedModel:
    """Return a stage of a whole model. It shares the model's parameters and buffers, and nothing else."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return keep_stage(copy.deepcopy(model, shared), cut)


def stage_output(model: PreTrainedModel, tokens: Tensor, hidden: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what a stage sends to the next one, f32[B, L, hidden], with its graph.

    `tokens` int64[B, L+1] are the micro-batch, at each stage: documents are masked by them. `hidden` f32[B, L, hidden] is the output of the
    stage before; None at the first. At the last stage call `computing.next_token_loss` with `hidden`.
    """
    with computing_in(dtype, tokens.device):
        output: Tensor = model.base_model(**inputs_of(model, tokens, hidden), use_cache=False).last_hidden_state
        return output.float()


def mask_stage(model: PreTrainedModel, cut: Cut, document_end: int) -> None:
    """Mask documents from each other in a stage. Raises BadManifest, at the first stage, for a model that cannot."""
    if cut.is_first:
        mask_documents(model, document_end)
    else:
        setattr(model, DOCUMENT_END, document_end)


def stage_flops_per_token(model: PreTrainedModel, cut: Cut, sequence_length: int) -> float:
    """Return the floating point operations of an inner step of a stage per token, without recomputation; as `flops_per_token` counts."""
    text = model.config.get_text_config()
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2)
    looked_up = text.vocab_size * text.hidden_size if cut.is_first else 0
    return float(6 * (matrices - looked_up) + 12 * len(cut.span) * text.hidden_size * sequence_length)


def stage_operations(section: ModelSection, cut: Cut, sequence_length: int) -> float:
    """Return the operations that a holder spends on a token, recomputation included. Raises BadManifest."""
    once = stage_flops_per_token(_hollow_stage(section, cut), cut, sequence_length) / COMPUTE_LAST
    return once * (COMPUTE_LAST if cut.is_last else COMPUTE)


def balanced_blocks(section: ModelSection, num_stages: int) -> tuple[int, ...]:
    """Return how many blocks each stage takes so that the slowest one computes as little as possible. Raises BadManifest.

    A stage but the last computes its blocks twice forward. The embedding is a look-up and counts nothing; the head counts like a block's
    weights.
    """
    need_stages(section, num_stages)
    model = hollow_model(section)
    layers = [_num_values(layer) for layer in _layers(model)]
    after = sum(_num_values(getattr(owner, name)) for owner, name, is_first in _ends(model) if not is_first)
    before = list(accumulate(layers, initial=0))

    def joined(ends: tuple[int, ...], end: int) -> _Balance:
        """Add a stage that ends before block `end` to the stages before it."""
        values, is_last = before[end] - before[ends[-1]], len(ends) == num_stages
        cost = COMPUTE_LAST * (values + after) if is_last else COMPUTE * values
        (largest, squares), _ = best[ends[-1]]
        return (max(largest, cost), squares + cost * cost), (*ends, end)

    best: dict[int, _Balance] = {0: ((0, 0), (0,))}  # by the number of blocks in the stages so far
    for stage in range(1, num_stages + 1):
        stops = range(stage, len(layers) - (num_stages - stage) + 1)
        best = {stop: min(joined(ends, stop) for end, (_, ends) in best.items() if end < stop) for stop in stops}
    _, ends = best[len(layers)]
    return tuple(end - start for start, end in pairwise(ends))


def need_stages(section: ModelSection, num_stages: int) -> None:
    """Raise BadManifest, with the way out, for a model that cannot be cut into so many stages."""
    if section.hub is not None:
        raise BadManifest(
            "a model from the hub cannot be cut into stages", hint="set architecture and config in [model], or [stages] count = 1"
        )
    hollow = hollow_model(section)
    config = hollow.config
    if getattr(config, "tie_word_embeddings", False):
        raise BadManifest(
            "embedding and head are one tensor, which the first and the last stage would both hold",
            hint="set tie_word_embeddings = false in [model] config",
        )
    if getattr(config, "output_router_logits", False):
        raise BadManifest(
            "the auxiliary loss of a router needs all stages at once", hint="set output_router_logits = false in [model] config"
        )
    if not getattr(config, "base_model_pp_plan", None) or not hasattr(hollow.base_model, "layers"):
        raise BadManifest(f"transformers has no plan to cut {section.architecture} into stages", hint=ELSE_WHOLE)
    if num_stages > (num_blocks := len(_layers(hollow))):
        raise BadManifest(
            f"{num_stages} stages need a block each, and the model has {num_blocks}",
            hint=f"set [stages] count to {num_blocks} or less, or num_hidden_layers in [model] config to {num_stages} or more",
        )
    with auto_classes(section.architecture):
        _need_nothing_between(_without(hollow, range(num_blocks), first=True, last=True), section.architecture)


def _need_nothing_between(hollow: PreTrainedModel, name: str) -> None:
    """Raise BadManifest unless a model without blocks and ends holds no weights, and returns its input unchanged.

    A model that scales or adds to the hidden states between embedding and blocks would do so in each stage.
    """
    if left := state_tensors(hollow):
        raise BadManifest(f"{name} has weights outside of its embedding, blocks, norm and head: {min(left)}", hint=ELSE_WHOLE)
    _with_values(hollow)
    shape = 2, TRIED_TOKENS, int(hollow.config.get_text_config().hidden_size)
    hidden = torch.arange(1.0, 1.0 + math.prod(shape)).view(shape)
    with torch.no_grad():
        output = hollow.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    if not (isinstance(output, Tensor) and torch.equal(output, hidden)):
        raise BadManifest(
            f"{name} changes the hidden states between its embedding and its blocks, which each stage would do", hint=ELSE_WHOLE
        )


def _need_blocks(hollow: PreTrainedModel, blocks: tuple[int, ...]) -> None:
    if sum(blocks) != (num_blocks := len(_layers(hollow))):
        raise BadManifest(
            f"[stages] blocks sum to {sum(blocks)}, and the model has {num_blocks}",
            hint="leave blocks out: `peer host` balances the stages and pins them",
        )


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    layers: nn.ModuleList = model.base_model.layers
    return layers


def _ends(model: PreTrainedModel) -> list[tuple[nn.Module, str, bool]]:
    """Return the modules before and after the blocks: their owner, their name in it, and whether they are of the first stage."""
    plan = list(model.config.base_model_pp_plan)
    inside = [(model.base_model, name, plan.index(name) < plan.index("layers")) for name in plan if name != "layers"]
    heads = [(model, name, False) for name, _ in model.named_children() if name != model.base_model_prefix]
    return [(owner, name, is_first) for owner, name, is_first in (*inside, *heads) if getattr(owner, name, None) is not None]


def keep_stage(model: PreTrainedModel, cut: Cut) -> PreTrainedModel:
    """Cut a model in place, and return it."""
    return _without(model, [*range(cut.span.start), *range(cut.span.stop, sum(cut.blocks))], first=not cut.is_first, last=not cut.is_last)


def _without(model: PreTrainedModel, blocks: Iterable[int], *, first: bool, last: bool) -> PreTrainedModel:
    """Replace blocks, the ends of the first stage, and those of the last one, by identity layers, in place; return the model."""
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    layers = _layers(model)
    for number in blocks:
        layers[number] = PipelineIdentityLayer()
    for owner, name, is_first in _ends(model):
        if first if is_first else last:
            setattr(owner, name, PipelineIdentityLayer())
    return model


def _with_values(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model on the meta device random weights on the CPU, and buffers that follow from its config, like rotary frequencies."""
    model.to_empty(device="cpu")
    model.init_weights()
    return model.train()


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
