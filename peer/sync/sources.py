"""The other peers as sources of weights: whom to ask, in which order, and what becomes of a source that breaks the rules."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gossamer.peer.swarm.address_book import AddressBook, KnownPeer, loop_s
from gossamer.peer.swarm.sybil_groups import SybilGroup, SybilGroups
from gossamer.peer.sync.client import FetchClient, Source
from gossamer.protocol.errors import GossamerError, PeerMisbehaved, TransportError

T = TypeVar("T")


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

    @contextlib.asynccontextmanager
    async def open(self, peer: KnownPeer) -> AsyncIterator[Source]:
        """Open a stream to a source for the body, and ban the source when it misbehaves there. Raises TransportError, and as the body."""
        try:
            async with self.client.source(peer.peer_id, peer.addresses) as source:
                yield source
        except PeerMisbehaved:
            self.book.ban(peer.peer_id, loop_s())
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


def spread_over(groups: Sequence[SybilGroup]) -> list[KnownPeer]:
    """Return the members of all groups: one of each, then another of each, and so on."""
    longest = max(map(len, groups), default=0)
    return [group[turn] for turn in range(longest) for group in groups if turn < len(group)]
