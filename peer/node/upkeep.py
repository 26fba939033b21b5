"""Staying one swarm: again and again this peer calls a door of its run, peers whom it has lost sight of, and some whom it has not.

Both sides of such a call tell each other who is there, so what a cut has parted grows together again from any one pair, and a peer that has
lost everybody, or slept, finds back by its book. It goes on however many are known: half of a swarm does not see that it is one. Whom a
call does not reach is not forgotten. Nothing here needs the directory, which looks after itself (`protocol.libp2p`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from gossamer.peer.swarm.address_book import KnownPeer, loop_s
from gossamer.peer.swarm.hearsay import Hearsay
from gossamer.peer.sync.client import FetchClient
from gossamer.protocol.addresses import by_peer
from gossamer.protocol.errors import PeerMisbehaved, Refused, TransportError
from gossamer.protocol.identity import PeerId

EVERY_S = (20.0, 40.0)  # between two rounds
AGAIN_S = 5.0  # likewise, at first, and while somebody turns up who was lost, or nobody is there
QUICK_ROUNDS = 6  # in a row at most: who makes people up must not keep us busy
CALL_S = 10.0
LOST, SEEN, CONNECTED = 2, 1, 1  # called in a round, at random
CROWD = 32  # a larger swarm's peers each call their doors more seldom, so that all together call them about as often, however many they are


T = TypeVar("T")


class Upkeep:
    """The rounds of one peer. `doors` are multiaddrs that end in a peer's id; `connected` tells to whom connections are open."""

    def __init__(
        self,
        client: FetchClient,
        hearsay: Hearsay,
        doors: Sequence[str],
        connected: Callable[[], Awaitable[Collection[PeerId]]],
        rng: random.Random,
    ) -> None:
        self._client = client
        self._hearsay = hearsay
        self._book = hearsay.book
        self._connected = connected
        self._rng = rng
        self._doors = {door: ways for door, ways in by_peer(doors).items() if door != client.identity.peer_id}

    async def run(self) -> None:
        """Make rounds until cancelled."""
        for _ in range(QUICK_ROUNDS):  # who sees all at once, by its book, is not seen by all yet: it tells them
            await self._make_round()
            await asyncio.sleep(AGAIN_S)
        num_quick = 0
        while True:
            self._hearsay.news.clear()
            await self._make_round()
            await asyncio.sleep(AGAIN_S)
            if num_quick < QUICK_ROUNDS and self._is_in_doubt():
                num_quick += 1
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(*EVERY_S) - AGAIN_S):
                    await (self._hearsay.news.wait() if num_quick < QUICK_ROUNDS else asyncio.sleep(EVERY_S[1]))
            num_quick = 0

    def _is_in_doubt(self) -> bool:
        """Tell whether the next round should follow soon: somebody has turned up, nobody is there, or those heard tell different times."""
        return self._hearsay.news.is_set() or not self._hearsay.time.is_settled or not self._book.announced(loop_s())

    async def _make_round(self) -> None:
        """Call all of a round at once."""
        await asyncio.gather(*(self._call(peer, addresses) for peer, addresses in (await self._chosen()).items()))

    async def _chosen(self) -> dict[PeerId, tuple[str, ...]]:
        """Choose whom to call, each with its addresses."""
        seen: list[KnownPeer] = []
        lost: list[KnownPeer] = []
        for entry in self._book.known(loop_s()):
            (seen if entry.record is not None and self._hearsay.is_in_force(entry.record) else lost).append(entry)
        chosen = {entry.peer_id: entry.addresses for entry in (*self._some(lost, LOST), *self._some(seen, SEEN))}
        if self._doors and self._rng.random() * len(seen) < CROWD * self._hearsay.familiar:
            door = self._rng.choice(list(self._doors))
            chosen[door] = (*self._book.addresses(door), *self._doors[door])
        with contextlib.suppress(TransportError):  # the network below is being restarted
            others = sorted(set(await self._connected()) - chosen.keys())
            chosen |= {peer: self._book.addresses(peer) for peer in self._some(others, CONNECTED)}
        return {peer: addresses for peer, addresses in chosen.items() if not self._book.is_banned(peer, loop_s())}

    def _some(self, peers: list[T], most: int) -> list[T]:
        return self._rng.sample(peers, min(most, len(peers)))

    async def _call(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Tell a peer who is there, and hear it; the book learns how that went."""
        try:
            async with asyncio.timeout(CALL_S), self._client.source(peer, addresses) as source:
                told, time = self._hearsay.records_for(peer), self._hearsay.time
                introduction = await source.introduction(told, time, is_door=peer in self._doors)
        except (TransportError, TimeoutError):
            self._book.lost(peer, loop_s())
        except PeerMisbehaved:
            self._book.ban(peer, loop_s())
        except Refused:  # it is there, but has nothing to tell us yet
            self._book.answered(peer, loop_s())
        else:
            self._book.answered(peer, loop_s())
            self._hearsay.introduce(introduction.members, peer)
