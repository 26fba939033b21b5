"""The peers' texts: one text for all, each in an order of its own, or skewed so that each peer sees more of its own part.

Not here: what a corpus is and how it is read (peer/data.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from peer.data import Corpus, ResidentCorpus, load_corpus
from peer.simulator.scenario import Scenario
from peer.token_store import Tokens
from peer.tokenizer import Tokenizer
from peer.windows import Draw
from protocol.errors import BadSettings


class Batches(Protocol):
    """Where a simulated peer's batches come from."""

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step: int64[B, L+1], new, on the CPU."""


@dataclass(frozen=True, slots=True)
class Skewed:
    """Batches of which a part comes from one corpus and the rest from another."""

    own: Batches
    common: Batches

    def batch(self, step: int) -> Tensor:
        """Return both parts' batch of an inner step; see Batches."""
        return torch.cat((self.own.batch(step), self.common.batch(step)))


@dataclass(frozen=True, slots=True)
class Texts:
    """Each peer's batches, and the corpus with the held-out text that all are measured on."""

    batches: tuple[Batches, ...]
    corpora: tuple[Corpus, ...]

    @property
    def held_out(self) -> Corpus:
        """Return the corpus to measure on."""
        return self.corpora[0]

    def close(self) -> None:
        """Let go of threads and files."""
        for corpus in self.corpora:
            corpus.close()


def load_texts(scenario: Scenario, tokenizer: Tokenizer, path: Path | None, cache: Path) -> Texts:
    """Load each peer's text; one that lies on this machine is read once for all of them.

    Raises BadSettings as load_corpus does, or when a peer's own part of the text is too small, with the numbers.
    """
    draws = [_draw(scenario, peer) for peer in range(scenario.num_peers)]
    section = scenario.manifest.data
    first = load_corpus(section, tokenizer, draws[0], path, cache)
    if isinstance(first, ResidentCorpus):
        return Texts(tuple(_resident(first.tokens, scenario, draw, peer) for peer, draw in enumerate(draws)), (first,))
    if scenario.skew:
        first.close()
        raise BadSettings("a streamed data set has no parts to give to each peer", hint="leave --skew out")
    corpora = (first, *(load_corpus(section, tokenizer, draw, path, cache) for draw in draws[1:]))
    return Texts(corpora, corpora)


def _draw(scenario: Scenario, peer: int) -> Draw:
    inner = scenario.manifest.inner
    return Draw(scenario.seed, b"simulated-%d" % peer, inner.batch_size, inner.sequence_length)


def _resident(tokens: Tokens, scenario: Scenario, draw: Draw, peer: int) -> Batches:
    num_own = round(scenario.skew * draw.batch_size)
    common = ResidentCorpus(tokens, replace(draw, batch_size=draw.batch_size - num_own))
    if not num_own:
        return common
    part = _part(tokens, draw, peer, scenario.num_peers)
    own = ResidentCorpus(part, replace(draw, batch_size=num_own, peer=draw.peer + b"-own"))
    return own if num_own == draw.batch_size else Skewed(own, common)


def _part(tokens: Tokens, draw: Draw, peer: int, num_peers: int) -> Tokens:
    """Return a peer's own part of the training text."""
    whole = len(tokens.train)
    if whole // num_peers < draw.num_batch_tokens:
        raise BadSettings(
            f"the text holds {whole} tokens to train on; {num_peers} parts of one batch each need {num_peers * draw.num_batch_tokens}",
            hint="give --data more text, or lower --peers or --skew",
        )
    return replace(tokens, train=tokens.train[peer * whole // num_peers : (peer + 1) * whole // num_peers])
