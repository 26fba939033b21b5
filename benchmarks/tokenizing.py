"""What tokenizing beside the inner steps costs them: on a thread of the trainer, as it is done, and in a process of its own, in one run.

    python -m benchmarks.tokenizing [--rounds N] [--seconds S]

The demo's model on one thread of torch, so that a second core is free; a BPE tokenizer of 8,192 tokens, made here from this Python's own
sources, which are the text as well, 64 documents at a time. `as fast as it trains`: as many tokens as the steps take; the aim is 99 % of
the rate alone. `without a pause`: all the time, what a device would ask for that trains as fast as text can be tokenized. Windows take
turns; the figure is the median over the rounds of a window's rate over that of the window alone before it. On a machine that is not quiet
the first is noise; so the last line has what follows from the others: the share of the time for which tokenizing is needed at all, and
what it costs then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from gossamer.peer.model.computing import Computing
from gossamer.peer.model.model import build_model
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import ResidentCorpus
from gossamer.peer.text.documents import standard_library
from gossamer.peer.text.streaming import DOCUMENTS
from gossamer.peer.text.token_cache import in_memory
from gossamer.peer.text.tokenizer import Tokenizer, load_tokenizer
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.protocol.run.manifest import Manifest

VOCABULARY: Final = 8192
DOCUMENT_END: Final = "<|end|>"
CHARACTERS: Final = 4096  # of a document, about a web page's
THREAD, PROCESS = "a thread, without a pause", "a process, without a pause"
MODEL_CHARACTERS: Final = 4_000_000  # by which the tokenizer is made


def documents() -> list[str]:
    """Return the text, cut into documents."""
    texts = [block.text for block in standard_library() if isinstance(block.text, str)]
    return [text[at : at + CHARACTERS] for text in texts for at in range(0, len(text), CHARACTERS)]


def bpe_tokenizer(texts: list[str]) -> Tokenizer:
    """Make a byte-level BPE tokenizer."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    some = texts[: MODEL_CHARACTERS // CHARACTERS]
    fast.train_from_iterator(
        some, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[DOCUMENT_END], initial_alphabet=alphabet, show_progress=False)
    )
    pretrained = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=DOCUMENT_END)
    return Tokenizer("bpe", len(pretrained), pretrained.eos_token_id, "", pretrained)


@dataclass(frozen=True)
class Gauge:
    """When a worker may tokenize: `permits` for a batch each, or always while `is_unpaced`. Of threads, or of processes."""

    permits: Any  # Semaphore
    is_unpaced: Any  # Event
    is_over: Any  # Event


def work(tokenizer: Tokenizer, texts: list[str], gauge: Gauge) -> None:
    """Tokenize batches of documents when it may."""
    for at in itertools.cycle(range(0, len(texts) - DOCUMENTS, DOCUMENTS)):
        while not gauge.is_unpaced.is_set() and not gauge.permits.acquire(timeout=0.1):
            if gauge.is_over.is_set():
                return
        if gauge.is_over.is_set():
            return
        tokenizer.encode_documents(texts[at : at + DOCUMENTS])


class Training:
    """The demo's model, stepping; it gives `gauge` a permit for each batch of documents that its steps have used up."""

    def __init__(self) -> None:
        manifest = Manifest.checked({})
        draw = Draw(0, b"me", manifest.inner.batch_size, manifest.inner.sequence_length)
        corpus = ResidentCorpus(in_memory(standard_library(), load_tokenizer(manifest.tokenizer)), draw)
        self._inner = InnerLoop(manifest, build_model(manifest.model, 0), corpus, Computing(), lambda event: None)
        self._numbers = itertools.count()
        self.step_tokens = manifest.inner.batch_size * manifest.inner.sequence_length

    def steps_per_s(self, seconds: float, gauge: Gauge | None = None, batch_tokens: float = 1.0) -> float:
        """Train for so long."""
        began_s, num_steps, owed = time.monotonic(), 0, 0.0
        while time.monotonic() - began_s < seconds:
            self._inner.gradient(next(self._numbers), 0)
            self._inner.step(1e-4)
            num_steps += 1
            owed += self.step_tokens
            while gauge is not None and owed >= batch_tokens:
                owed -= batch_tokens
                gauge.permits.release()
        return num_steps / (time.monotonic() - began_s)


@contextmanager
def unpaced(gauge: Gauge) -> Iterator[None]:
    """Have a worker tokenize all the time inside."""
    gauge.is_unpaced.set()
    try:
        yield
    finally:
        gauge.is_unpaced.clear()


@contextmanager
def working(of: Any, start: Callable[..., Any], *inputs: Any) -> Iterator[Gauge]:
    """Have a worker of one kind there inside, which tokenizes when its gauge says so."""
    gauge = Gauge(of.Semaphore(0), of.Event(), of.Event())
    worker = start(target=work, args=(*inputs, gauge))
    worker.start()
    try:
        yield gauge
    finally:
        gauge.is_over.set()
        worker.join()


def tokens_per_s(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Return how fast a thread tokenizes with nothing beside it."""
    began_s = time.monotonic()
    return sum(map(len, tokenizer.encode_documents(texts))) / (time.monotonic() - began_s)


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """Return the rates of all ways, over that alone."""
    texts = documents()
    tokenizer, training, spawning = bpe_tokenizer(texts), Training(), multiprocessing.get_context("spawn")
    batch_tokens = sum(map(len, tokenizer.encode_documents(texts[:DOCUMENTS])))
    ratios: dict[str, list[float]] = {}
    rates = []
    with working(threading, threading.Thread, tokenizer, texts) as thread, working(spawning, spawning.Process, tokenizer, texts) as process:
        training.steps_per_s(seconds)
        ways: dict[str, Callable[[], float]] = {
            "a thread, as fast as it trains": lambda: training.steps_per_s(seconds, thread, batch_tokens),
            THREAD: lambda: _with(unpaced(thread), training, seconds),
            PROCESS: lambda: _with(unpaced(process), training, seconds),
        }
        for _ in range(rounds):
            for way, rate in ways.items():
                rates.append(training.steps_per_s(seconds))
                ratios.setdefault(way, []).append(rate() / rates[-1])
    trained = statistics.median(rates) * training.step_tokens
    return {
        "trained_tokens_per_second": trained,
        "tokenized_tokens_per_second": tokens_per_s(tokenizer, texts[: 16 * DOCUMENTS]),
        "of_rate_alone": {way: statistics.median(found) for way, found in ratios.items()},
        "lowest_and_highest": {way: [min(found), max(found)] for way, found in ratios.items()},
    }


def _with(inside: AbstractContextManager[None], training: Training, seconds: float) -> float:
    with inside:
        return training.steps_per_s(seconds)


def main() -> None:
    """Print the figures, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="a window")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.rounds, given.seconds)
    if given.json:
        print(json.dumps(found))
        return
    trained, tokenized = found["trained_tokens_per_second"], found["tokenized_tokens_per_second"]
    print(f"tokens a second: trained {trained:,.0f}, tokenized {tokenized:,.0f} on one thread")
    ratios = found["of_rate_alone"]
    for way, ratio in ratios.items():
        low, high = found["lowest_and_highest"][way]
        print(f"{way:<34}{ratio:>8.1%} of the rate alone ({low:.1%} to {high:.1%})")
    share = trained / tokenized
    costs = [share * (1.0 - ratios[way]) for way in (THREAD, PROCESS)]
    print(f"needed for {share:.2%} of the time: costs {costs[0]:.2%} of the rate on a thread, {costs[1]:.2%} in a process")


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread of tokenizing beside one of training
    main()
