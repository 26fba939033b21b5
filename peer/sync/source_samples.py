"""What a newcomer can know of its donors before it takes a whole state: whether they give the same weights.

It asks up to three donors, of as many heads as there are (peer/swarm/heads.py), for the same few places of their states, drawn at random.
Peers that meet are near each other, so honest samples are alike; weights of somebody's own making are not. Most heads say where the state
comes from; where they are one against one, it comes from one donor, and the loss on our own text judges it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gossamer.peer.swarm.address_book import KnownPeer
from gossamer.peer.swarm.heads import Head
from gossamer.peer.sync.client import FetchClient
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import ContentsKind

COMPARED = 3
SPANS = 4
SPAN_BYTES = 16 * 1024
SHARE = 64  # of the state, at most, is one of them
SAMPLE_S = 10.0
ALIKE = 0.3  # of the longer sample's length; peers that meet are at most a fifth of that apart (docs/log.md), unrelated weights 1.4


@dataclass(frozen=True, slots=True)
class SourcesCompared:
    """What was found: whom to fetch from, how many at once, and a sentence for the operator."""

    donors: list[KnownPeer]
    dissenting: frozenset[PeerId]  # who gives other weights than most
    num_at_once: int
    says: str


class SourceSamples:
    """Samples of donors' states, of so many bytes each whole."""

    def __init__(self, client: FetchClient, state_bytes: int, rng: random.Random) -> None:
        self._client = client
        num_bytes = max(2, min(SPAN_BYTES, state_bytes // SHARE // 2 * 2))
        last = (state_bytes - num_bytes) // 2
        self._spans = [(2 * rng.randint(0, last), num_bytes) for _ in range(SPANS)]  # on the borders of values of two bytes

    async def compare(self, heads: Sequence[Head], at_once: int) -> SourcesCompared | None:
        """Compare donors of these heads, in their order; None where fewer than two answer."""
        donors = spread_over(heads)
        if len(donors) < 2:
            return None
        samples = await asyncio.gather(*(self._sample(donor) for donor in donors[:COMPARED]))
        there = [(donor, sample) for donor, sample in zip(donors, samples, strict=False) if sample is not None]
        if len(there) < 2:
            return None
        camps = _camps([sample for _, sample in there])
        if len(camps) == 1:
            says = f"{len(there)} donors of {min(len(heads), len(there))} invites or networks give the same weights"
            return SourcesCompared(donors, frozenset(), at_once, says)
        camps.sort(key=len, reverse=True)
        chosen = [there[number][0] for number in camps[0]]
        others = [there[number][0] for camp in camps[1:] for number in camp]
        names = " and ".join(donor.peer_id.short() for donor in chosen)
        says = f"donors give different weights: {names} first, not {', '.join(donor.peer_id.short() for donor in others)}"
        is_tie = len(camps[1]) == len(camps[0])
        if is_tie:
            return SourcesCompared([*chosen, *others], frozenset(), 1, says)
        return SourcesCompared(chosen, frozenset(donor.peer_id for donor in others), at_once, says)

    async def _sample(self, donor: KnownPeer) -> np.ndarray | None:
        try:
            async with asyncio.timeout(SAMPLE_S), self._client.source(donor.peer_id, donor.addresses) as source:
                for offset, num_bytes in self._spans:
                    await source.ask(ContentsKind.STATE, offset, num_bytes)
                parts = [(await source.take())[1] for _ in self._spans]
        except (GossamerError, TimeoutError):
            return None
        halves = np.frombuffer(b"".join(parts), dtype="<u2").astype(np.uint32) << 16  # bf16 is the upper half of a float
        return halves.view(np.float32).astype(np.float64)


def spread_over(heads: Sequence[Head]) -> list[KnownPeer]:
    """Return the members of all heads, one of each, then another of each, and so on."""
    longest = max(map(len, heads), default=0)
    return [head[turn] for turn in range(longest) for head in heads if turn < len(head)]


def _camps(samples: Sequence[np.ndarray]) -> list[list[int]]:
    camps: list[list[int]] = []
    for number, sample in enumerate(samples):
        for camp in camps:
            if _are_alike(samples[camp[0]], sample):
                camp.append(number)
                break
        else:
            camps.append([number])
    return camps


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    with np.errstate(all="ignore"):
        longest = max(np.linalg.norm(one), np.linalg.norm(other))
        return bool(np.linalg.norm(one - other) <= ALIKE * longest)  # never where a value is not finite
