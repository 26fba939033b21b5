"""The peers' batches: of one text, each peer in its own order, or skewed so that each peer sees more of its own part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Final, Protocol

import torch
from torch import Tensor

from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import Corpus, ResidentCorpus, load_corpus
from gossamer.peer.text.token_cache import Tokens
from gossamer.peer.text.tokenizer import Tokenizer
from gossamer.peer.trainer.text_training import probe_pool
from gossamer.protocol.errors import BadSettings

FAR_STEPS: Final = 1_000_000
OTHER_BATCHES: Final = 64


class Batches(Protocol):
    """The source of a simulated peer's batches."""

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step: int64[B, L+1], new, on the CPU."""


@dataclass(frozen=True, slots=True)
class Skewed:
    """Batches that take some windows from the peer's own corpus and the rest from the common one; the mean share is exact."""

    own: Batches  # one window each
    common: Batches  # one window each
    batch_size: int
    num_own: Fraction  # windows per batch, on average
    phase: Fraction  # in [0, 1): decides which steps round up to whole windows

    def batch(self, step: int) -> Tensor:
        """Return the windows of an inner step, the own ones first; see Batches."""
        start, stop = self._own_before(step), self._own_before(step + 1)
        others = range(step * self.batch_size - start, (step + 1) * self.batch_size - stop)
        windows = [self.own.batch(number) for number in range(start, stop)] + [self.common.batch(number) for number in others]
        return torch.cat(windows)

    def _own_before(self, step: int) -> int:
        return math.floor(step * self.num_own + self.phase)


@dataclass(frozen=True, slots=True)
class Texts:
    """Each peer's batches, and the corpora; the first holds the held-out text on which all peers are measured."""

    batches: tuple[Batches, ...]
    corpora: tuple[Corpus, ...]

    @property
    def held_out(self) -> Corpus:
        """Return the corpus with the held-out text."""
        return self.corpora[0]

    def other(self, peer: int) -> Tensor:
        """Return sequences of a peer's text from far beyond the run, int64[N, L+1].

        Of a text with a place, which reading so far ahead would move, they are held-out ones, as those of real peers.
        """
        if self.held_out.cursor():
            return probe_pool(self.corpora[peer])
        return torch.cat([self.batches[peer].batch(step) for step in range(FAR_STEPS, FAR_STEPS + OTHER_BATCHES)])

    def close(self) -> None:
        """Stop threads and close files."""
        for corpus in self.corpora:
            corpus.close()


def load_texts(scenario: Scenario, tokenizer: Tokenizer, path: Path | None, cache: Path) -> Texts:
    """Load each peer's text, a local text once for all. Raises BadSettings as load_corpus, and for too small a part of one peer."""
    section, inner = scenario.manifest.data, scenario.manifest.inner
    peers = [b"simulated-%d" % peer for peer in range(scenario.num_peers)]
    draws = [Draw(scenario.seed, peer, inner.batch_size, inner.sequence_length) for peer in peers]
    first = load_corpus(section, tokenizer, draws[0], path, cache)
    if isinstance(first, ResidentCorpus):
        return Texts(tuple(_resident(first.tokens, scenario, draw, peer) for peer, draw in enumerate(draws)), (first,))
    if scenario.skew:
        first.close()
        what = "a mixture" if section.source == "mixture" else "a streamed data set"
        raise BadSettings(f"skew needs one local text: {what} is not divided among the peers", hint="leave --skew out")
    corpora = (first, *(load_corpus(section, tokenizer, draw, path, cache) for draw in draws[1:]))
    return Texts(corpora, corpora)


def _resident(tokens: Tokens, scenario: Scenario, draw: Draw, peer: int) -> Batches:
    if not scenario.skew:
        return ResidentCorpus(tokens, draw)
    part = _part(tokens, draw, peer, scenario.num_peers)
    own = ResidentCorpus(part, replace(draw, batch_size=1, peer=draw.peer + b"-own"))
    common = ResidentCorpus(tokens, replace(draw, batch_size=1))
    phase = Fraction(Random(f"{scenario.seed}/skew/{peer}").random())
    num_own = Fraction(repr(scenario.skew)) * draw.batch_size  # 0.1 is a tenth here, not the nearest binary number
    return Skewed(own, common, draw.batch_size, num_own, phase)


def _part(tokens: Tokens, draw: Draw, peer: int, num_peers: int) -> Tokens:
    """Return a peer's own part of the training text. Raises BadSettings when a part is too small."""
    whole = len(tokens.train)
    if whole // num_peers < draw.num_batch_tokens:
        raise BadSettings(
            f"the text holds {whole} tokens to train on; {num_peers} parts of one batch each need {num_peers * draw.num_batch_tokens}",
            hint="give --data more text, or lower --peers or --skew",
        )
    return replace(tokens, train=tokens.train[peer * whole // num_peers : (peer + 1) * whole // num_peers])
