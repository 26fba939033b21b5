"""Anti-entropy: this peer periodically calls a bootstrap node, peers that it has lost contact with, and some that it knows well.

Both sides of a call exchange member records, so the two halves of a partitioned swarm merge as soon as one pair connects. The calls never
stop, because half of a partitioned swarm cannot detect the partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.sync.client import FetchClient
from gossamer.protocol.errors import PeerMisbehaved, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.tasks import loop_s

EVERY_S = (20.0, 40.0)  # between two rounds
AGAIN_S = 5.0  # likewise, at first, and while lost peers come back, or nobody is known
QUICK_ROUNDS = 6  # in a row at most: a peer that invents members must not keep this one busy
CALL_S = 10.0
LOST, SEEN, CONNECTED = 2, 1, 1  # called in a round, at random
MANY_PEERS = 32  # peers of a larger swarm call bootstrap nodes less often each, so that these get about as many calls whatever its size


T = TypeVar("T")


@dataclass(slots=True)
class AntiEntropy:
    """The rounds of one peer. `connected` returns the peers with open connections."""

    client: FetchClient
    peer_exchange: PeerExchange
    bootstraps: dict[PeerId, tuple[str, ...]]
    connected: Callable[[], Awaitable[Collection[PeerId]]]
    rng: random.Random

    async def run(self) -> None:
        """Make rounds until cancelled."""
        for _ in range(QUICK_ROUNDS):  # a restarted peer knows the others at once by its book; they learn of it here
            await self._make_round()
            await asyncio.sleep(AGAIN_S)
        num_quick = 0
        while True:
            self.peer_exchange.news.clear()
            await self._make_round()
            await asyncio.sleep(AGAIN_S)
            if num_quick < QUICK_ROUNDS and self._is_in_doubt():
                num_quick += 1
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.uniform(*EVERY_S) - AGAIN_S):
                    await (self.peer_exchange.news.wait() if num_quick < QUICK_ROUNDS else asyncio.sleep(EVERY_S[1]))
            num_quick = 0

    def _is_in_doubt(self) -> bool:
        """Return whether the next round should follow soon: a peer came back, nobody is known, or the clocks of other peers differ."""
        return self.peer_exchange.news.is_set() or not self.peer_exchange.time.is_agreed or not self.peer_exchange.book.announced(loop_s())

    async def _make_round(self) -> None:
        """Call all peers of a round concurrently."""
        await asyncio.gather(*(self._call(peer, addresses) for peer, addresses in (await self._choose_peers()).items()))

    async def _choose_peers(self) -> dict[PeerId, tuple[str, ...]]:
        """Choose the peers of a round; return them with their addresses."""
        seen: list[KnownPeer] = []
        lost: list[KnownPeer] = []
        for entry in self.peer_exchange.book.known(loop_s()):
            (seen if self.peer_exchange.is_in_force(entry.record) else lost).append(entry)
        chosen = {entry.peer_id: entry.addresses for entry in (*self._sample(lost, LOST), *self._sample(seen, SEEN))}
        if self.bootstraps and self.rng.random() * len(seen) < MANY_PEERS * self.peer_exchange.familiar:
            peer = self.rng.choice(list(self.bootstraps))
            chosen[peer] = (*self.peer_exchange.book.get(peer).addresses, *self.bootstraps[peer])
        with contextlib.suppress(TransportError):  # the network below is being restarted
            others = sorted(set(await self.connected()) - chosen.keys())
            chosen |= {peer: self.peer_exchange.book.get(peer).addresses for peer in self._sample(others, CONNECTED)}
        return {peer: addresses for peer, addresses in chosen.items() if not self.peer_exchange.book.is_banned(peer, loop_s())}

    def _sample(self, peers: list[T], most: int) -> list[T]:
        return self.rng.sample(peers, min(most, len(peers)))

    async def _call(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Exchange records with a peer, and note in the address book how that went."""
        try:
            async with asyncio.timeout(CALL_S), self.client.source(peer, addresses) as source:
                records, time = self.peer_exchange.records_for(peer), self.peer_exchange.time
                group = self.peer_exchange.group_of(peer)
                peer_list = await source.peer_list(records, time, is_bootstrap=peer in self.bootstraps, group=group)
        except (TransportError, TimeoutError):
            self.peer_exchange.book.note_no_answer(peer, loop_s())
        except PeerMisbehaved as error:
            self.peer_exchange.book.ban(peer, loop_s(), str(error))
        except Refused:  # it is up, but cannot answer yet
            self.peer_exchange.book.note_answer(peer, loop_s())
        else:
            self.peer_exchange.book.note_answer(peer, loop_s())
            self.peer_exchange.list_peers(peer_list.members, peer)
