"""Computing a model of any size on a device: number format, head in parts, recomputed activations, compiled blocks.

The weights are always f32. A large head is computed some tokens at a time, and again in the backward pass, because its logits can take
more memory than all else (docs/decisions/2026-11-22-inner-step.md).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gossamer.optim.fragments import BLOCK_NAME
from gossamer.optim.inner import BF16_KINDS
from gossamer.peer.text.labels import BEGINS, IGNORED, ids_of, positions_from, positions_of, targets_of
from gossamer.protocol.errors import BadManifest

SHARES: Final = "shares_sequences"  # attribute of a model that masks documents in one sequence from each other, by their marks
DOCUMENT_END: Final = "document_end"  # attribute of a model that masks documents from each other, by the token that ends one
MAX_LOGITS: Final = 1 << 26  # at once: 256 MiB in f32
TRIED_TOKENS: Final = 16  # by need_causal
CAUSAL_ERROR: Final = 1e-4  # of the later logits' change; rounding moves a causal model's earlier ones by 2e-7, an encoder by 9e-4
LANGUAGE_MODEL: Final = "take a causal language model of transformers, such as 'llama'"
OUT_OF_MEMORY: Final = ("DefaultCPUAllocator", "MPS backend out of memory")
_PLAIN_HEADS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_COMPILED: WeakSet[nn.Module] = WeakSet()  # models whose blocks are compiled


@dataclass(frozen=True, slots=True)
class Computing:
    """How one peer computes: affects speed and memory; affects the training by rounding only."""

    dtype: torch.dtype = torch.float32  # of matrix products
    micro_batch: int = 0  # sequences at a time on a device; 0: its whole share of a batch
    recompute: bool = False  # recompute activations block by block in the backward pass
    compiles: bool = False  # compile the blocks
    num_devices: int = 1  # that share each batch
    optimizer_on_host: bool = False  # the optimizer's state rests in the host's memory between steps, if the device has its own

    def rows(self, batch_size: int) -> int:
        """Return the largest number of sequences of a batch on one device."""
        return -(-batch_size // self.num_devices)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the number format of matrix products: the manifest's, or with `auto` bf16 on a CUDA or XPU GPU that has it, else f32."""
    has_bf16 = device.type in BF16_KINDS and torch.get_device_module(device).is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and has_bf16) else torch.float32


@contextlib.contextmanager
def computing_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Compute matrix products inside the context in a number format, from weights in f32."""
    with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        yield


def next_token_loss(
    model: nn.Module,
    tokens: Tensor,  # int64[B, L+1], marked (text/labels.py)
    dtype: torch.dtype = torch.float32,
    hidden: Tensor | None = None,  # f32[B, L, hidden], for the last stage of a model (stages.py): the output of the stage before
) -> Tensor:  # f32[], nats per token
    """Return the mean cross entropy of each token that trains, given its predecessors, with its graph."""
    with computing_in(dtype, tokens.device):
        config = getattr(model, "config", None)
        num_logits = tokens[:, 1:].numel() * config.get_text_config().vocab_size if config is not None else 0
        if num_logits <= MAX_LOGITS or not has_plain_head(model):
            logits: Tensor = model(**inputs_of(model, tokens, hidden), use_cache=False).logits
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets_of(tokens).flatten())
        return loss_in_parts(model, tokens, math.ceil(num_logits / MAX_LOGITS), hidden)


def inputs_of(model: nn.Module, tokens: Tensor, hidden: Tensor | None = None) -> dict[str, Tensor]:
    """Return what a model reads of int64[B, L+1], marked: all but the last token, and their positions if documents share a sequence.

    A stage that is not the first reads `hidden`, the output of the stage before, in place of the tokens.
    """
    inputs = tokens[:, :-1]
    read = {"input_ids": ids_of(inputs)} if hidden is None else {"inputs_embeds": hidden}
    if getattr(model, SHARES, False):
        return read | {"position_ids": positions_of(inputs)}
    if hidden is not None and (document_end := getattr(model, DOCUMENT_END, None)) is not None:
        return read | {"position_ids": document_positions(inputs, document_end)}  # where whole models have mask_documents' hook
    return read


def token_losses(model: nn.Module, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the cross entropy of each token of int64[B, L+1] that trains, given its predecessors: f32[targets], at most B * L.

    Holds all logits at once.
    """
    targets = targets_of(tokens).flatten()
    with computing_in(dtype, tokens.device):
        logits: Tensor = model(**inputs_of(model, tokens), use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")[targets != IGNORED]


def predictions(model: nn.Module, batch: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a model's log-probabilities of each token of int64[B, L+1] that trains: f32[targets, vocabulary]."""
    tokens = batch.to(next(model.parameters()).device)
    with evaluating(model), computing_in(dtype, tokens.device):
        logits: Tensor = model(**inputs_of(model, tokens), use_cache=False).logits
        return logits.flatten(0, 1)[targets_of(tokens).flatten() != IGNORED].float().log_softmax(-1)


def output_distance(outputs: Sequence[Tensor]) -> float:
    """Return the Jensen-Shannon distance of several models' `predictions`: nats per token, 0 for equal outputs, at most ln(models)."""
    stacked = torch.stack(tuple(outputs))
    mean = torch.logsumexp(stacked, 0) - math.log(len(outputs))
    return max(0.0, float((stacked.exp() * (stacked - mean)).sum(-1).mean()))


def loss_in_parts(model: Any, tokens: Tensor, num_parts: int, hidden: Tensor | None = None) -> Tensor:
    """Return the loss of a model with a plain head on int64[B, L+1] without holding all logits at once; `hidden` as `next_token_loss`."""
    targets = targets_of(tokens).flatten()
    outputs: Tensor = model.base_model(**inputs_of(model, tokens, hidden), use_cache=False).last_hidden_state.flatten(0, 1)
    head = model.get_output_embeddings()

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(head(hidden).float(), targets, reduction="sum")

    losses = [checkpoint(part, *both, use_reentrant=False) for both in zip(outputs.chunk(num_parts), targets.chunk(num_parts), strict=True)]
    return torch.stack(losses).sum() / (targets != IGNORED).sum()


def has_plain_head(model: nn.Module) -> bool:
    """Return whether a model's logits are its head applied to the last hidden state; tried once per model."""
    if model not in _PLAIN_HEADS:
        _PLAIN_HEADS[model] = hasattr(model, "get_output_embeddings") and _try_head(model)
    return _PLAIN_HEADS[model]


def _try_head(model: Any) -> bool:
    tokens = torch.zeros((1, 3), dtype=torch.int64, device=next(model.parameters()).device)
    if isinstance(tokens, FakeTensor):
        return True  # there are no values to compare, and nearly all heads are plain
    is_stage = isinstance(model.get_input_embeddings(), nn.Identity)  # the last one (stages.py), which reads hidden states
    inputs = inputs_of(
        model, tokens, torch.ones((1, 2, model.config.get_text_config().hidden_size), device=tokens.device) if is_stage else None
    )
    with evaluating(model), torch.autocast(tokens.device.type, enabled=False):
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        return torch.equal(model.get_output_embeddings()(hidden), model(**inputs, use_cache=False).logits)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients inside the context, and restore the model's mode after it.

    Compiled blocks run as they are written: each other shape and mode would compile them again, for seconds in which nobody trains.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if model in _COMPILED else contextlib.nullcontext():
            yield
    finally:
        model.train(was_training)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's transformer blocks."""
    found = ((BLOCK_NAME.search(f"{name}."), name, module) for name, module in model.named_modules())
    return [module for match, name, module in found if match is not None and match.end() == len(name) + 1]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block at its first call; blocks of equal code share one compilation."""
    for block in blocks(model):
        block.compile(dynamic=False)
    _COMPILED.add(model)


def need_causal(model: Any, name: str) -> None:
    """Raise BadManifest for a model whose predictions depend on later tokens, as an encoder's do: its loss would measure copying.

    Tried on random or trained weights: other tokens in the second half must not move the logits of the first half. A model on the meta
    device has no values to compare.
    """
    if next(model.parameters()).is_meta:
        return
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 2 * TRIED_TOKENS
    num_tokens = max(2, min(TRIED_TOKENS, longest // 2))  # some models reserve the first positions
    tokens = torch.arange(num_tokens, device=next(model.parameters()).device)[None] % text.vocab_size
    half = num_tokens // 2
    others = torch.cat([tokens[:, :half], (tokens[:, half:] + 1) % text.vocab_size], dim=1)
    moved = (_logits(model, tokens) - _logits(model, others)).abs()
    if moved[:, :half].max() > CAUSAL_ERROR * moved[:, half:].max():
        is_encoder = getattr(model.config, "is_decoder", True) is False
        raise BadManifest(
            f"the predictions of {name} see the tokens that they predict, so training would teach it to copy",
            hint=f"{LANGUAGE_MODEL}{', or set is_decoder = true in its config' if is_encoder else ''}",
        )


def _logits(model: Any, tokens: Tensor) -> Tensor:
    """Return a model's logits without dropout; a model that draws random numbers draws the same ones at each call."""
    with torch.random.fork_rng(devices=[]), evaluating(model):
        torch.default_generator.manual_seed(0)
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits


def mask_documents(model: Any, document_end: int) -> None:
    """Mask documents from each other: no token attends to an earlier document, and each document begins at position 0.

    transformers derives the mask from the restarting positions. Raises BadManifest for a model that ignores them.
    """

    def positions(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if given.get("inputs_embeds") is not None:
            return None  # a stage, which gets its positions from the tokens
        tokens = given["input_ids"] if "input_ids" in given else args[0]
        return args, {**given, "position_ids": document_positions(tokens, document_end)}

    setattr(model, DOCUMENT_END, document_end)
    model.base_model.register_forward_pre_hook(positions, with_kwargs=True)
    one = int(document_end == 0)
    _need_masked(model, [[token, document_end, one, one, one] for token in (one, document_end)])


def mask_marked_documents(model: Any) -> None:
    """As `mask_documents`, for marked tokens (text/labels.py), which say where documents begin."""
    setattr(model, SHARES, True)
    _need_masked(model, [[0, BEGINS, 0, 0, 0], [1, BEGINS, 0, 0, 0]])


def _need_masked(model: Any, sequences: list[list[int]]) -> None:
    """Raise BadManifest if the first token of two sequences, which is another document, moves what follows the second."""
    tokens = torch.tensor(sequences, device=next(model.parameters()).device)
    with evaluating(model):
        after_one, after_other = model(**inputs_of(model, tokens), use_cache=False).logits[:, 1:]
    if not torch.allclose(after_one, after_other, rtol=1e-3, atol=1e-4):
        raise BadManifest("this architecture does not mask documents from each other", hint="set [data] mask_documents = false")


def document_positions(tokens: Tensor, document_end: int) -> Tensor:
    """Return each token's position in its document: int64[B, L]; the token that ends a document is the first of the next."""
    return positions_from(tokens == document_end)


def can_recompute(model: Any) -> bool:
    """Return whether a model's activations can be recomputed in the backward pass."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def recompute_blocks(model: Any) -> bool:
    """Keep only the inputs of each block and recompute the rest in the backward pass; return False for a model that cannot."""
    if not can_recompute(model):
        return False
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return True


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, on any device; for the CPU and MPS torch has no own type."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)
