"""The other peers as sources of weights: which to ask, in which order, and which of them agree.

Partners stay near each other, so honest samples of their states are alike. Before a whole state is taken, up to three sources of as many
Sybil groups as there are give the same few random places of theirs. The majority becomes the source; in a tie, one source at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.sybil_groups import SybilGroup, SybilGroups
from gossamer.peer.sync.client import FetchClient, Source
from gossamer.protocol.errors import GossamerError, PeerMisbehaved, SwarmUnreachable, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind
from gossamer.protocol.tasks import loop_s

T = TypeVar("T")

COMPARED = 3
SPANS = 4
SPAN_BYTES = 16 * 1024
SHARE = 64  # of the state, at most, is one span
SAMPLE_S = 10.0
ASKED = 8  # for their global steps, at once
CLOCK_S = 5.0  # for them to answer
NAMED = 4  # peers that do not train now, at most, in an error
AGAIN_S = 1.0  # until those are asked again that did not
ALIKE = 0.3  # of the longer sample's length; partners are at most a fifth of it apart (docs/log.md), unrelated weights 1.4


class OwnMeetings(Protocol):
    """This peer's meetings, which stop while its weights are replaced; peer/node/meetings.py has them."""

    typical_s: float
    """Typical duration of completed meetings."""

    def set_aside(self) -> contextlib.AbstractAsyncContextManager[None]:
        """End all meetings, and begin none while the body runs."""


@dataclass(slots=True)
class Sources:
    """Ask other peers. Owns the client, and the randomness that decides who is asked. Belongs to one event loop."""

    client: FetchClient
    groups: SybilGroups
    rng: random.Random

    @property
    def book(self) -> AddressBook:
        """Return the address book."""
        return self.groups.book

    def live_groups(self) -> list[SybilGroup]:
        """Return the live peers in random order, by Sybil group."""
        live = self.book.live(loop_s())
        self.rng.shuffle(live)
        return self.groups.group(live)

    def silence(self, seconds: float) -> SwarmUnreachable:
        """Return the error for a run in which nobody answers; where peers in sight do not train now, the network is not to blame."""
        if resting := [peer.peer_id.short() for peer in self.book.seen_lately(loop_s()) if peer.paused]:
            return SwarmUnreachable(
                f"no peer of the run gave weights for {seconds:.0f} s: those in sight are paused, or bootstrap nodes "
                f"({', '.join(resting[:NAMED])})",
                hint="ask for one of them to be resumed, then join again; --keep-trying waits until one trains",
            )
        return SwarmUnreachable(
            f"no peer of the run answered for {seconds:.0f} s",
            hint="check that the host is running and that its address in the invite can be reached from here, then join again; "
            "peers that have banned this one do not answer it either",
        )

    @contextlib.asynccontextmanager
    async def open(self, peer: KnownPeer) -> AsyncIterator[Source]:
        """Open a stream to a source for the body, and ban the source when it misbehaves there. Raises TransportError, and as the body."""
        try:
            async with self.client.source(peer.peer_id, peer.addresses) as source:
                self.book.connected(peer.peer_id, source.stream.observed)
                yield source
        except PeerMisbehaved as error:
            self.book.ban(peer.peer_id, loop_s(), str(error))
            raise

    async def ask(self, peer: KnownPeer, question: Callable[[Source], Awaitable[T]], within_s: float) -> T | GossamerError:
        """Return what a source answers within this time, else the error."""
        try:
            async with asyncio.timeout(within_s), self.open(peer) as source:
                return await question(source)
        except TimeoutError:
            return TransportError(f"{peer.peer_id.short()} does not answer")
        except GossamerError as error:
            return error

    async def ask_all(
        self, peers: Collection[KnownPeer], question: Callable[[Source], Awaitable[T]], within_s: float
    ) -> list[tuple[KnownPeer, T | GossamerError]]:
        """Ask these at once; return each with its answer or error."""
        answers = await asyncio.gather(*(self.ask(peer, question, within_s) for peer in peers))
        return list(zip(peers, answers, strict=True))

    async def steps_of_partners(self, within_s: float) -> list[int]:
        """Return the global steps of some peers that we have met, asked again and again until all have answered: some may just start."""
        book, until_s = self.book, loop_s() + within_s
        met = [peer for peer in book.seen_lately(loop_s()) if peer.has_met and peer.stage in (0, book.stage)]
        asked, steps = self.rng.sample(met, min(ASKED, len(met))), dict[PeerId, int]()
        while True:
            answers = await self.ask_for_headers([peer for peer in asked if peer.peer_id not in steps], CLOCK_S)
            steps |= {peer.peer_id: answer.global_step for peer, answer in answers if isinstance(answer, Contents)}
            if len(steps) == len(asked) or loop_s() >= until_s:
                return list(steps.values())
            await asyncio.sleep(AGAIN_S)

    async def ask_for_headers(self, peers: Collection[KnownPeer], within_s: float) -> list[tuple[KnownPeer, Contents | GossamerError]]:
        """Ask these at once for the header of their state; return each with it, or with the error."""
        return await self.ask_all(peers, lambda source: source.header(ContentsKind.STATE), within_s)


def spread_over(groups: Sequence[SybilGroup]) -> list[KnownPeer]:
    """Return the members of all groups: one of each, then another of each, and so on."""
    longest = max(map(len, groups), default=0)
    return [group[turn] for turn in range(longest) for group in groups if turn < len(group)]


@dataclass(frozen=True, slots=True)
class SourcesCompared:
    """Which peers to fetch from, how many at once, and a sentence for the operator."""

    sources: list[KnownPeer]
    dissenting: frozenset[PeerId]  # who gives other weights than most
    num_at_once: int
    sentence: str


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
        taken = b"".join([(await source.take(lambda header: header.need_size(state_bytes)))[1] for _ in spans])
        halves = np.frombuffer(taken, dtype="<u2").astype(np.uint32) << 16
        return halves.view(np.float32).astype(np.float64)  # bf16 is the upper half of a float

    answers = await sources.ask_all(peers[:COMPARED], sample, SAMPLE_S)
    there = [(peer, values) for peer, values in answers if not isinstance(values, GossamerError)]
    if len(there) < 2:
        return None
    camps = sorted(_agreeing_groups([values for _, values in there]), key=len, reverse=True)
    if len(camps) == 1:
        sentence = f"{len(there)} sources of {min(len(groups), len(there))} invites or networks give the same weights"
        return SourcesCompared(peers, frozenset(), at_once, sentence)
    chosen = [there[number][0] for number in camps[0]]
    others = [there[number][0] for camp in camps[1:] for number in camp]
    names = " and ".join(peer.peer_id.short() for peer in chosen)
    sentence = f"sources give different weights: {names} first, not {', '.join(peer.peer_id.short() for peer in others)}"
    if len(camps[1]) == len(camps[0]):
        return SourcesCompared([*chosen, *others], frozenset(), 1, sentence)
    return SourcesCompared(chosen, frozenset(peer.peer_id for peer in others), at_once, sentence)


def _agreeing_groups(samples: Sequence[np.ndarray]) -> list[list[int]]:
    camps: list[list[int]] = []
    for number, sample in enumerate(samples):
        camp = next((camp for camp in camps if _agree(samples[camp[0]], sample)), None)
        if camp is None:
            camps.append(camp := [])
        camp.append(number)
    return camps


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    with np.errstate(all="ignore"):
        longest = max(np.linalg.norm(one), np.linalg.norm(other))
        return bool(np.linalg.norm(one - other) <= ALIKE * longest)  # never where a value is not finite
