"""A model of two layers whose step takes a millisecond, its manifest, and its text: what the peers of a test swarm train."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.machine.events import SoloStep
from gossamer.peer.model.plan import fragment_codecs, model_plan
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import ResidentCorpus
from gossamer.peer.text.token_cache import Tokens
from gossamer.peer.trainer.text_training import TextProgram, TextReplica
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.run.manifest import Manifest

VOCABULARY = 32
WIDTH = 64  # so that each layer's matrix has just the 4096 values that go through the codec


class TinyModel(nn.Module):
    """Embedding, two residual layers, the embedding again: three fragments."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=draws) * 0.3)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        for parameter in self.layers.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draws) * 0.05

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        hidden = self.embedding[input_ids]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return SimpleNamespace(logits=hidden @ self.embedding.T)


@functools.cache
def _initial() -> TinyModel:
    return TinyModel()


def tiny_manifest(**sections: dict[str, Any]) -> Manifest:
    """The tiny job; a section's keys given here replace the defaults below."""
    given: dict[str, dict[str, Any]] = {
        "run": {"total_steps": 1000, "access": "open"},
        "inner": {"batch_size": 2, "sequence_length": 8, "warmup_steps": 5, "rewarm_steps": 5, "learning_rate": 0.004},
        "outer": {"inner_steps": 6, "alpha": 0.5, "beta": 0.7, "gamma": 0.7, "deadline_s": 10.0, "max_clock_gap_steps": 60},
        "fragments": {"blocks_per_fragment": 1},
        "codec": {"name": "int8"},
    }
    for name, keys in sections.items():
        given[name] = given.get(name, {}) | keys
    return Manifest.checked(given)


def tiny_terms(manifest: Manifest) -> RunTerms:
    codecs = fragment_codecs(manifest, {name: tuple(p.shape) for name, p in _initial().named_parameters()})
    return RunTerms.from_manifest(manifest).with_plan(model_plan(codecs, manifest.outer.alpha))


@functools.cache
def _tokens(text: int) -> Tokens:
    """A noisy walk over the vocabulary: there is something to learn, and always something left. Half of each other text is of its own."""
    draws = np.random.default_rng(5 + text)
    strides = draws.integers(1, 4, 6000)
    strides[3000:] += 7 * text
    draws.shuffle(strides)
    walk = (np.cumsum(strides) % VOCABULARY).astype(np.uint8)
    return Tokens(walk[:5000], walk[5000:], 1.0)


class CountedReplica(TextReplica):
    """A replica that counts the outer steps which its meetings really take, by their ids."""

    program: TextProgram
    counted: Counter[str]
    payloads: PayloadFolder

    def journal(self, meeting_id: str) -> None:
        super().journal(meeting_id)
        self.counted[meeting_id] += 1


def tiny_replica(
    manifest: Manifest, payloads: PayloadFolder, peer: bytes, emit: Callable[[SoloStep], None], text: int = 0
) -> CountedReplica:
    """A replica at its start, with the same initial weights for every peer and a text order of its own, or a text of its own."""
    draw = Draw(manifest.run.seed, peer, manifest.inner.batch_size, manifest.inner.sequence_length)
    model: Any = copy.deepcopy(_initial())
    program = TextProgram(manifest, model, ResidentCorpus(_tokens(text), draw), emit)
    replica = CountedReplica(manifest, program, int.from_bytes(peer[-6:], "little"))
    replica.counted, replica.payloads = Counter(), payloads
    return replica
