"""A trainable low-rank cut between two stages, in the place of a number format: what it costs, by how much narrower it is.

    python -m benchmarks.bottleneck [--width 256] [--blocks 4] [--steps 300] [--narrower 8 16 32 64] [--seeds 1 2 3] [--anchor]

One peer trains a whole Llama on the built-in text. After half of its blocks the hidden states, d values a token, pass through two trained
matrices, d x k and k x d. Both begin as the identity on the first k values, so that part of the residual stream passes unchanged (the form
of ResBM, arXiv 2604.11947). `--anchor`: the second stage adds an embedding of its own of the token, which travels anyway. *costs*: held-out
loss above the model without a cut, of the same seed. Any load; half a minute for a run of the defaults on an idle core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.optim.inner import InnerSettings, build_optimizer, learning_rate, set_learning_rate
from gossamer.peer.model.computing import next_token_loss
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.model.model import build_model
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.run.manifest import Manifest

EVAL_BATCHES = 64
CLIP_NORM = 1.0
PEER = b"bottleneck"


class Cut(torch.nn.Module):
    """What passes between two stages: `narrow` values a token in the place of `width`. Keeps the last tokens for the anchor."""

    def __init__(self, width: int, narrow: int, vocabulary: int, *, has_anchor: bool) -> None:
        super().__init__()
        self.down, self.up = torch.nn.Linear(width, narrow, bias=False), torch.nn.Linear(narrow, width, bias=False)
        self.anchor = torch.nn.Embedding(vocabulary, width) if has_anchor else None
        self.tokens: Tensor | None = None
        torch.nn.init.eye_(self.down.weight)
        torch.nn.init.eye_(self.up.weight)
        if self.anchor is not None:
            torch.nn.init.zeros_(self.anchor.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the second stage receives."""
        received: Tensor = self.up(self.down(hidden))
        if self.anchor is None:
            return received
        assert self.tokens is not None
        anchored: Tensor = received + self.anchor(self.tokens)
        return anchored


def manifest(width: int, num_blocks: int, steps: int) -> Manifest:
    """Return the run of a small Llama."""
    config = {
        "hidden_size": width, "intermediate_size": width * 43 // 16, "num_hidden_layers": num_blocks, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    tables = {"run": {"total_steps": steps}, "model": {"config": config}, "inner": {"batch_size": 8, "sequence_length": 64}}
    return Manifest.checked(tables)


def with_cut(model: PreTrainedModel, narrow: int, *, has_anchor: bool) -> PreTrainedModel:
    """Put a cut after half of a model's blocks; its parameters are trained with the model's."""
    text = model.config.get_text_config()
    cut = Cut(text.hidden_size, narrow, text.vocab_size, has_anchor=has_anchor)
    layers = model.base_model.layers
    layers[len(layers) // 2].register_module("cut", cut)

    def see_tokens(module: torch.nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        cut.tokens = named.get("input_ids", given[0] if given else None)

    model.base_model.register_forward_pre_hook(see_tokens, with_kwargs=True)
    layers[len(layers) // 2].register_forward_pre_hook(lambda module, given: (cut(given[0]), *given[1:]))
    return model


def trained_loss(run: Manifest, corpus: Corpus, seed: int, narrow: int, *, has_anchor: bool) -> float:
    """Train a model, with a cut if `narrow` is not 0, and return its held-out loss."""
    torch.manual_seed(seed)
    model = build_model(run.model, seed)
    if narrow:
        with_cut(model, narrow, has_anchor=has_anchor)
    inner = run.inner
    settings = InnerSettings(run.run.total_steps, inner.learning_rate, warmup_steps=run.run.total_steps // 6)
    optimizer = build_optimizer(inner.optimizer, model.named_parameters(), settings)
    for step in range(run.run.total_steps):
        set_learning_rate(optimizer, learning_rate(step, step, settings))
        optimizer.zero_grad()
        next_token_loss(model, corpus.batch(step)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
    return held_out_loss(model, corpus, EVAL_BATCHES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--narrower", type=int, nargs="+", default=[8, 16, 32, 64], metavar="TIMES")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--anchor", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run = manifest(given.width, given.blocks, given.steps)
    print(f"{'narrower':>8}{'values':>8}  " + "".join(f"{f'seed {seed}':>10}" for seed in given.seeds) + f"{'costs, nats':>14}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bottleneck-") as cache:
        alone: list[float] = []
        for times in (1, *given.narrower):
            losses = []
            for seed in given.seeds:
                draw = Draw(seed, PEER, run.inner.batch_size, run.inner.sequence_length)
                corpus = load_corpus(run.data, load_tokenizer(run.tokenizer), draw, None, Path(cache))
                losses.append(trained_loss(run, corpus, seed, given.width // times if times > 1 else 0, has_anchor=given.anchor))
                corpus.close()
            alone = alone or losses
            costs = statistics.mean(loss - one for loss, one in zip(losses, alone, strict=True))
            words = "".join(f"{loss:>10.4f}" for loss in losses)
            print(f"{times:>8}{given.width // times:>8}  {words}{costs:>14.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
