"""A model and a text small enough to train in a test: three fragments, some milliseconds a step."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.machine.events import Event
from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import build_model, placed
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import ResidentCorpus
from gossamer.peer.text.token_cache import Tokens
from gossamer.peer.trainer.exchange import TrainerExchange
from gossamer.peer.trainer.replica import Replica
from gossamer.peer.trainer.text_training import TextProgram, TextReplica
from gossamer.protocol.run.manifest import Manifest

T = TypeVar("T")
DEVICE = os.environ.get("GOSSAMER_TEST_DEVICE", "cpu")  # on which the tests' replicas train, see tests/device

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def small_manifest(**sections: dict[str, Any]) -> Manifest:
    """The small job; a section's keys given here replace the defaults below."""
    given: dict[str, dict[str, Any]] = {
        "run": {"total_steps": 60, "access": "open"},
        "model": {"config": LLAMA},
        "inner": {"batch_size": 2, "sequence_length": 16, "warmup_steps": 5, "rewarm_steps": 10},
        "outer": {"inner_steps": 6, "alpha": 0.5, "beta": 0.7, "gamma": 0.7},
        "fragments": {"blocks_per_fragment": 1},
        "codec": {"name": "int8"},
    }
    for name, keys in sections.items():
        given[name] = given.get(name, {}) | keys
    return Manifest.checked(given)


def small_corpus(manifest: Manifest, peer: bytes = b"me") -> ResidentCorpus:
    """Repeating text with some noise: a small model learns it, slowly."""
    draws = np.random.default_rng(3)
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 200, dtype=np.uint8).copy()
    text[draws.integers(0, len(text), 900)] = draws.integers(0, 256, 900)
    inner = manifest.inner
    return ResidentCorpus(Tokens(text[:8000], text[8000:], 1.0), Draw(0, peer, inner.batch_size, inner.sequence_length))


def ignored(event: Event) -> None:
    """Where nobody asks what happens."""


class NoLink:
    """A TrainerEnd to which no node ever connects."""

    session = 0

    def poll(self) -> list[messages.Request]:
        return []

    def send(self, record: messages.Answer, session: int) -> None:
        assert not session

    def wait(self, seconds: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Nothing is open."""


class EqualDraws(random.Random):
    """Draws the same for each meeting, so that a peer that was restarted judges as one that was not."""

    def random(self) -> float:
        return 0.0

    def sample(self, population: Sequence[T], k: int, *, counts: Iterable[int] | None = None) -> list[T]:
        return list(population)[:k]


class AskedReplica(TextReplica):
    """A replica of which the test asks what a node asks: `handle` carries a request out at a step boundary."""

    program: TextProgram
    payloads: PayloadFolder
    emit: Callable[[Event], None]

    @cached_property
    def exchange(self) -> TrainerExchange:
        return TrainerExchange(NoLink(), self.payloads, self, self.emit, EqualDraws())

    def handle(self, request: messages.Request) -> messages.Reply | None:
        return self.exchange.carry_out(request)


def small_replica(
    folder: Path,
    manifest: Manifest,
    peer: bytes = b"me",
    emit: Callable[[Event], None] = ignored,
    device: str = DEVICE,
    computing: Computing = Computing(),  # noqa: B008 - frozen
) -> AskedReplica:
    """A replica at its start, as the trainer process builds it; its payloads lie in `folder`."""
    model = placed(build_model(manifest.model, manifest.run.seed), torch.device(device))
    program = TextProgram(manifest, model, small_corpus(manifest, peer), emit, computing)
    replica = AskedReplica(manifest, program, int.from_bytes(peer, "little"))
    replica.payloads, replica.emit = PayloadFolder(folder), emit
    return replica


def fingerprint(replica: Replica) -> str:
    """Hash all that a checkpoint holds."""
    digest = hashlib.sha256(json.dumps(replica.kept().state, sort_keys=True).encode())
    for name, tensor in sorted(replica.kept().tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
