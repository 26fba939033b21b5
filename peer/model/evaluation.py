"""Held-out loss of a model in training, of a home's newest checkpoint, and of a swarm, its average and a lone peer.

Deterministic: always the same windows of held-out text, no dropout, no random numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gossamer.peer.machine.config import saved_settings
from gossamer.peer.machine.home import Home
from gossamer.peer.model.accelerator import choose_device
from gossamer.peer.model.computing import Computing, compute_dtype, evaluating, mask_documents, mask_marked_documents, next_token_loss
from gossamer.peer.model.model import placed
from gossamer.peer.model.start import base_folder, initial_model
from gossamer.peer.model.weights import Show, fast_weights, held_manifest, load_trained, mean_weights, set_weights, show_nothing
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, load_corpus
from gossamer.peer.text.labels import num_targets
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.run.fine_tuning import FineTuningDataSection
from gossamer.protocol.run.manifest import Manifest, need_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TOKENS: Final = 131_072  # of held-out text for reported figures, about: NUM_BATCHES of the demo's model
PART_TOKENS: Final = 8192  # measured at once: a whole batch of a large model would take as much memory as an inner step
MEASURED_BY_PROGRAM: Final = "the program measures it as it trains: `peer status` and `peer logs` show the loss"
NUM_BATCHES: Final = 256  # for reported figures: 131072 tokens of the demo's model, two seconds; 32 batches are 0.05 nats off

Follow = Callable[[int, int, float], None]  # called after each batch with the number of batches so far and in total, and the mean loss
FollowEach = Callable[[int, int, int, float], None]  # model (in the order of SwarmLosses), its tokens so far and in total, mean loss


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss of a checkpoint."""

    step: int
    loss: float  # nats per token
    perplexity: float  # per token
    byte_perplexity: float  # per UTF-8 byte, comparable between tokenizers
    num_tokens: int  # predicted


@dataclass(frozen=True, slots=True)
class SwarmLosses:
    """A swarm's held-out losses, nats per token."""

    start: float  # of the initial weights
    peers: tuple[float, ...]
    averaged: float  # of the mean of the peers' weights
    alone: float  # of the peer that trained without partners


def held_out_loss(
    model: torch.nn.Module,
    corpus: Corpus,
    num_batches: int,
    follow: Follow = lambda done, num_batches, loss: None,
    computing: Computing = Computing(),  # noqa: B008 - frozen
    most_tokens: int | None = None,  # of all batches together: of large batches only the first sequences, at least one of each
) -> float:
    """Return the mean loss over held-out batches, in nats per token that trains. Keeps the model's mode and draws no random numbers."""
    device, losses, weights = next(model.parameters()).device, list[float](), list[int]()
    with evaluating(model):
        for number, whole in enumerate(corpus.held_out_batches(num_batches), 1):
            batch = whole if most_tokens is None else whole[: max(1, most_tokens // (num_batches * (whole.shape[1] - 1)))]
            for part in torch.split(batch, computing.micro_batch or len(batch)):
                weights.append(int(num_targets(part)))
                losses.append(float(next_token_loss(model, part.to(device), computing.dtype)) * weights[-1])
            follow(number, num_batches, math.fsum(losses) / sum(weights))
    return math.fsum(losses) / sum(weights)


def num_measured(corpus: Corpus, num_batches: int) -> int:
    """Return the number of held-out tokens of which `held_out_loss` is the mean."""
    return sum(int(num_targets(batch)) for batch in corpus.held_out_batches(num_batches))


def measured_loss(model: PreTrainedModel, manifest: Manifest, home: Home, corpus: Corpus, num_batches: int, show: Show) -> float:
    """Return the held-out loss on the device and in the number format in which a peer would train here; the model stays on that device."""
    device, _ = choose_device("auto")
    mask_as_run(model, manifest, home.tokenizer)
    part = max(1, PART_TOKENS // manifest.inner.sequence_length)
    computing = Computing(compute_dtype(manifest.inner.precision, device), part)
    return held_out_loss(placed(model, device), corpus, num_batches, partial(show, "measuring the model"), computing)


def reported_batches(manifest: Manifest) -> int:
    """Return the number of this run's batches that hold NUM_TOKENS, at most NUM_BATCHES."""
    return min(NUM_BATCHES, math.ceil(NUM_TOKENS / (manifest.inner.batch_size * manifest.inner.sequence_length)))


def mask_as_run(model: PreTrainedModel, manifest: Manifest, tokenizer: Path | None = None) -> None:
    """Mask documents from each other if the manifest says so.

    `tokenizer`: a folder that may hold the run's. Raises BadManifest.
    """
    data = manifest.data
    if data.mask_documents and isinstance(data, FineTuningDataSection) and data.has_prompts:
        mask_marked_documents(model)
    elif data.mask_documents:
        mask_documents(model, load_tokenizer(manifest.tokenizer, tokenizer).document_end)


def evaluate_home(home: Home, data: Path | None = None, num_batches: int | None = None, show: Show = show_nothing) -> Evaluation:
    """Measure the fast weights of a home's newest checkpoint; `data` is the operator's text, if the run needs one.

    Raises BadManifest or BadSettings for a home or text that cannot be loaded.
    """
    manifest = need_text(held_manifest(home), MEASURED_BY_PROGRAM)
    trained = load_trained(home, show)
    model = initial_model(manifest, base_folder(home))
    with closing(open_corpus(manifest, home, data)) as corpus:
        set_weights(model, fast_weights(trained.checkpoint))
        num_batches = num_batches or reported_batches(manifest)
        loss = measured_loss(model, manifest, home, corpus, num_batches, show)
        num_tokens = num_measured(corpus, num_batches)
    return Evaluation(trained.checkpoint.step, loss, math.exp(loss), math.exp(loss / corpus.bytes_per_token), num_tokens)


def compare_homes(
    homes: Sequence[Path],
    alone: Path,
    data: Path | None = None,
    num_batches: int = NUM_BATCHES,
    follow: FollowEach = lambda model, num_tokens, total_tokens, loss: None,
) -> SwarmLosses:
    """Measure the peers of a run, the mean of their weights, and a peer that trained alone, on the same text. Raises as evaluate_home.

    Several models are measured at a time, so `follow` is called from several threads. Peers with equal weights, as after the end of a run,
    are measured once.
    """
    manifest = need_text(held_manifest(Home(homes[0])), MEASURED_BY_PROGRAM)
    swarm = [load_trained(Home(home)) for home in homes]
    model = initial_model(manifest, base_folder(Home(homes[0])))
    batch_tokens = manifest.inner.batch_size * manifest.inner.sequence_length
    mask_as_run(model, manifest, Home(homes[0]).tokenizer)
    fast = [fast_weights(peer.checkpoint) for peer in swarm]
    weights = (None, *fast, mean_weights(fast), fast_weights(load_trained(Home(alone)).checkpoint))  # None: as the model was built

    firsts = [next(number for number, other in enumerate(weights) if _same_weights(one, other)) for one in weights]

    def measure(first: int) -> float:
        def follow_alike(done: int, _: int, loss: float) -> None:
            for number in (number for number, other in enumerate(firsts) if other == first):
                follow(number, done * batch_tokens, num_batches * batch_tokens, loss)

        mine = copy.deepcopy(model)
        if (chosen := weights[first]) is not None:
            set_weights(mine, chosen)
        return held_out_loss(mine, corpus, num_batches, follow_alike)

    with closing(open_corpus(manifest, Home(homes[0]), data)) as corpus, _one_thread_each() as pool:
        distinct = sorted(set(firsts))
        losses = dict(zip(distinct, pool.map(measure, distinct), strict=True))
    start, *peers, averaged, lone = (losses[first] for first in firsts)
    return SwarmLosses(start, tuple(peers), averaged, lone)


def _same_weights(one: Mapping[str, Tensor] | None, other: Mapping[str, Tensor] | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


@contextmanager
def _one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """Run as many models at a time as torch has threads, one thread each: that is faster for small models."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def open_corpus(manifest: Manifest, home: Home, data: Path | None) -> Corpus:
    """Load a run's corpus to measure on: `data`, else the text that the home's peer trained on. Raises as load_corpus."""
    if data is None and (saved := saved_settings(home).get("data")) is not None:
        data = Path(saved)
    draw = Draw(manifest.run.seed, b"", manifest.inner.batch_size, manifest.inner.sequence_length)
    return load_corpus(manifest.data, load_tokenizer(manifest.tokenizer, home.tokenizer), draw, data, home.cache)
