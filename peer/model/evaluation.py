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
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from gossamer.peer.machine.config import saved_settings
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.model.accelerator import choose_device
from gossamer.peer.model.computing import Computing, compute_dtype, evaluating, mask_documents, mask_marked_documents, next_token_loss
from gossamer.peer.model.model import placed
from gossamer.peer.model.start import base_folder, initial_model
from gossamer.peer.model.weights import Show, Trained, fast_weights, load_trained, mean_weights, set_weights, show_nothing
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, load_corpus
from gossamer.peer.text.labels import num_targets
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest, need_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TOKENS: Final = 131_072  # of held-out text for reported figures, if there is so much; an eighth of it is 0.05 nats off
PART_TOKENS: Final = 8192  # measured at once: a whole batch of a large model would take as much memory as an inner step
MEASURED_BY_PROGRAM: Final = "the program measures it as it trains: `peer status` and `peer logs` show the loss"

Follow = Callable[[int, int, float], None]  # called after each batch with the number of batches so far and in total, and the mean loss
FollowEach = Callable[[int, int, int, float], None]  # model (in the order of SwarmLosses), its tokens so far and in total, mean loss


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss of a checkpoint."""

    step: int
    loss: float  # nats per token
    perplexity: float | None  # per token; None: more than a float holds
    byte_perplexity: float | None  # per UTF-8 byte, comparable between tokenizers
    num_tokens: int  # predicted


@dataclass(frozen=True, slots=True)
class SwarmLosses:
    """A swarm's held-out losses, nats per token."""

    start: float  # of the initial weights
    peers: tuple[float, ...]  # empty in a staged run: no stage has a loss of its own
    averaged: float  # of the mean of the peers' weights; in a staged run of the stages put together
    alone: float  # of the peer that trained without partners


def held_out_loss(
    model: torch.nn.Module,
    corpus: Corpus,
    num_batches: int,
    follow: Follow = lambda done, num_batches, loss: None,
    computing: Computing = Computing(),  # noqa: B008 - frozen
    most_tokens: int | None = None,  # of all batches together: of large batches only some sequences, at least one for each
) -> float:
    """Return the mean loss over held-out batches, in nats per token that trains. Keeps the model's mode and draws no random numbers."""
    return _measured(model, held_out_rows(corpus, num_batches, most_tokens), num_batches, follow, computing)[0]


def _measured(model: torch.nn.Module, rows: Tensor, num_batches: int, follow: Follow, computing: Computing) -> tuple[float, int]:
    """Return the mean loss over these sequences, and how many of their tokens train; `follow` counts them as `num_batches`."""
    device, losses, weights = next(model.parameters()).device, list[float](), list[int]()
    num_done = 0
    with evaluating(model):
        for part in torch.split(rows, computing.micro_batch or -(-len(rows) // num_batches)):
            weights.append(int(num_targets(part)))
            losses.append(float(next_token_loss(model, part.to(device), computing.dtype)) * weights[-1])
            num_done += len(part)
            follow(num_done * num_batches // len(rows), num_batches, math.fsum(losses) / sum(weights))
    return math.fsum(losses) / sum(weights), sum(weights)


def held_out_rows(corpus: Corpus, num_batches: int, most_tokens: int | None = None) -> Tensor:
    """Return held-out sequences, int64[N, L+1]; with `most_tokens` as many of them, spread evenly, and at least one for each batch."""
    rows = torch.cat(corpus.held_out_batches(num_batches))
    if most_tokens is None:
        return rows
    num_rows = min(len(rows), max(num_batches, most_tokens // (rows.shape[1] - 1)))
    return rows[torch.arange(num_rows) * len(rows) // num_rows]


def measured_loss(model: PreTrainedModel, manifest: Manifest, home: Home, corpus: Corpus, size: EvalSize, show: Show) -> tuple[float, int]:
    """Return the held-out loss, and on how many tokens it was measured; the model stays on the device.

    It computes on the device and in the number format in which a peer would train here.
    """
    device, _ = choose_device("auto")
    mask_as_run(model, manifest, home.tokenizer)
    computing = Computing(compute_dtype(manifest.inner.precision, device), part_rows(manifest.inner.sequence_length))
    follow = partial(show, "measuring the model")
    rows = held_out_rows(corpus, size.num_batches, size.most_tokens)
    return _measured(placed(model, device), rows, size.num_batches, follow, computing)


def part_rows(sequence_length: int) -> int:
    """Return how many sequences are measured at once: small batches one by one would spend their time between the threads."""
    return max(1, PART_TOKENS // sequence_length)


class EvalSize(NamedTuple):
    """How much held-out text is measured."""

    num_batches: int
    most_tokens: int | None = None  # of all batches together, where the batches hold more than asked for


def measured_size(manifest: Manifest, corpus: Corpus, num_tokens: int | None = None) -> EvalSize:
    """Return the size of a measurement of so many tokens, of NUM_TOKENS by default: no more than that, and no text twice."""
    wanted, inner = num_tokens or NUM_TOKENS, manifest.inner
    batch_tokens = inner.batch_size * inner.sequence_length
    num_batches = min(math.ceil(wanted / batch_tokens), max(1, corpus.num_held_out() // inner.batch_size))
    is_less = num_tokens is not None and num_tokens < num_batches * batch_tokens
    return EvalSize(num_batches, num_tokens if is_less else None)


def mask_as_run(model: PreTrainedModel, manifest: Manifest, tokenizer: Path | None = None) -> None:
    """Mask documents from each other if the manifest says so.

    `tokenizer`: a folder that may hold the run's. Raises BadManifest.
    """
    data = manifest.data
    if data.mask_documents and data.has_prompts:
        mask_marked_documents(model)
    elif data.mask_documents:
        mask_documents(model, load_tokenizer(manifest.tokenizer, tokenizer).document_end)


def evaluate_home(home: Home, data: Path | None = None, num_tokens: int | None = None, show: Show = show_nothing) -> Evaluation:
    """Measure the fast weights of a home's newest checkpoint, on so many tokens; `data` is the operator's text, if the run needs one.

    Raises BadManifest or BadSettings for a home or text that cannot be loaded.
    """
    manifest = need_text(need_manifest(home).manifest(), MEASURED_BY_PROGRAM)
    if manifest.num_stages > 1:
        raise BadSettings(
            "this peer holds one stage of the model, which has no loss of its own",
            hint="`peer export --with HOME` puts the stages together and measures them; `peer status` has the run's loss",
        )
    trained = load_trained(home, show)
    model = initial_model(manifest, base_folder(home))
    with closing(open_corpus(manifest, home, data)) as corpus:
        set_weights(model, fast_weights(trained.checkpoint))
        loss, measured = measured_loss(model, manifest, home, corpus, measured_size(manifest, corpus, num_tokens), show)
    return Evaluation(trained.checkpoint.step, loss, perplexity(loss), perplexity(loss / corpus.bytes_per_token), measured)


def perplexity(nats: float) -> float | None:
    """Return the perplexity at this loss; None where it is more than a float holds, as of a run with far too high a learning rate."""
    try:
        return math.exp(nats)
    except OverflowError:
        return None


def compare_homes(
    homes: Sequence[Path],
    alone: Path,
    data: Path | None = None,
    num_tokens: int | None = None,
    follow: FollowEach = lambda model, num_tokens, total_tokens, loss: None,
) -> SwarmLosses:
    """Measure the peers of a run, the mean of their weights, and a peer that trained alone, on the same text. Raises as evaluate_home.

    Several models are measured at a time, so `follow` is called from several threads. Peers with equal weights, as after the end of a run,
    are measured once.
    """
    manifest = need_text(need_manifest(Home(homes[0])).manifest(), MEASURED_BY_PROGRAM)
    swarm = [load_trained(Home(home)) for home in homes]
    model = initial_model(manifest, base_folder(Home(homes[0])))
    batch_tokens = manifest.inner.batch_size * manifest.inner.sequence_length
    computing = Computing(micro_batch=part_rows(manifest.inner.sequence_length))
    mask_as_run(model, manifest, Home(homes[0]).tokenizer)
    fast, together = _of_swarm(swarm, [Home(home) for home in homes])
    weights = (None, *fast, together, fast_weights(load_trained(Home(alone)).checkpoint))  # None: as the model was built

    firsts = [next(number for number, other in enumerate(weights) if _same_weights(one, other)) for one in weights]

    def measure(first: int) -> float:
        def follow_alike(done: int, _: int, loss: float) -> None:
            for number in (number for number, other in enumerate(firsts) if other == first):
                follow(number, done * batch_tokens, size.num_batches * batch_tokens, loss)

        mine = copy.deepcopy(model)
        if (chosen := weights[first]) is not None:
            set_weights(mine, chosen)
        return held_out_loss(mine, corpus, size.num_batches, follow_alike, computing, size.most_tokens)

    with closing(open_corpus(manifest, Home(homes[0]), data)) as corpus, _one_thread_each() as pool:
        size = measured_size(manifest, corpus, num_tokens)
        distinct = sorted(set(firsts))
        losses = dict(zip(distinct, pool.map(measure, distinct), strict=True))
    start, *peers, averaged, lone = (losses[first] for first in firsts)
    return SwarmLosses(start, tuple(peers), averaged, lone)


def _of_swarm(swarm: Sequence[Trained], homes: Sequence[Home]) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the weights of each peer that can be measured, and those of the swarm."""
    if swarm[0].manifest.num_stages == 1:
        fast = [fast_weights(peer.checkpoint) for peer in swarm]
        return fast, mean_weights(fast)
    from gossamer.peer.model.staged_weights import load_parts, whole_weights  # of staged runs only

    stages = whole_weights(load_parts(homes[0], swarm[0], homes[1:]), use_slow_weights=False)
    return [], {name: tensor for part in stages for name, tensor in part.items()}


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
