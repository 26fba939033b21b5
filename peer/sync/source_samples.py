"""Compare sources before a whole state is taken: do they give the same weights?

A newcomer asks up to three sources, of as many Sybil groups as there are (peer/swarm/heads.py), for the same few random places of their
states. Partners stay near each other, so honest samples are alike; fabricated weights are not. The majority becomes the source. In a tie
the state comes from one source at a time, and the loss on our own text judges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gossamer.peer.swarm.address_book import KnownPeer
from gossamer.peer.sync.client import Source
from gossamer.peer.sync.sources import Sources, spread_over
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import ContentsKind

COMPARED = 3
SPANS = 4
SPAN_BYTES = 16 * 1024
SHARE = 64  # of the state, at most, is one span
SAMPLE_S = 10.0
ALIKE = 0.3  # of the longer sample's length; partners are at most a fifth of it apart (docs/log.md), unrelated weights 1.4


@dataclass(frozen=True, slots=True)
class SourcesCompared:
    """Whom to fetch from, how many at once, and a sentence for the operator."""

    sources: list[KnownPeer]
    dissenting: frozenset[PeerId]  # who gives other weights than most
    num_at_once: int
    says: str


async def compare(sources: Sources, state_bytes: int, at_once: int) -> SourcesCompared | None:
    """Compare live peers that have a state of so many bytes; None where fewer than two answer."""
    groups = sources.live_groups()
    peers = spread_over(groups)
    if len(peers) < 2:
        return None
    num_bytes = max(2, min(SPAN_BYTES, state_bytes // SHARE // 2 * 2))
    last = (state_bytes - num_bytes) // 2
    spans = [(2 * sources.rng.randint(0, last), num_bytes) for _ in range(SPANS)]  # on the borders of values of two bytes

    async def sample(source: Source) -> np.ndarray:
        for offset, size in spans:
            await source.ask(ContentsKind.STATE, offset, size)
        halves = np.frombuffer(b"".join([(await source.take())[1] for _ in spans]), dtype="<u2").astype(np.uint32) << 16
        return halves.view(np.float32).astype(np.float64)  # bf16 is the upper half of a float

    answers = await sources.ask_all(peers[:COMPARED], sample, SAMPLE_S)
    there = [(peer, values) for peer, values in answers if not isinstance(values, GossamerError)]
    if len(there) < 2:
        return None
    camps = sorted(_camps([values for _, values in there]), key=len, reverse=True)
    if len(camps) == 1:
        says = f"{len(there)} sources of {min(len(groups), len(there))} invites or networks give the same weights"
        return SourcesCompared(peers, frozenset(), at_once, says)
    chosen = [there[number][0] for number in camps[0]]
    others = [there[number][0] for camp in camps[1:] for number in camp]
    names = " and ".join(peer.peer_id.short() for peer in chosen)
    says = f"sources give different weights: {names} first, not {', '.join(peer.peer_id.short() for peer in others)}"
    if len(camps[1]) == len(camps[0]):
        return SourcesCompared([*chosen, *others], frozenset(), 1, says)
    return SourcesCompared(chosen, frozenset(peer.peer_id for peer in others), at_once, says)


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
