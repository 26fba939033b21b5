"""An iterative Kademlia look-up: query the nearest known members, who name nearer ones, until the nearest of all have replied.

If two peers that a member named do not reply, its others are not queried: a malicious peer costs a few calls, not the look-up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.neighbours import Held, place_of
from gossamer.protocol.tasks import cancel

AT_ONCE = 3  # concurrent calls
SLOW_S = 1.0  # a call that takes longer does not count as concurrent
WALK_S = 6.0  # timeout of a look-up
DEAD_HINTS = 2  # peers that did not reply, after which the member that named them is not trusted

Ask = Callable[[Held], Coroutine[Any, Any, list[Held] | None]]


class Walk:
    """One look-up of `place`. `ask` queries a member and returns the members that it names, None if it does not reply."""

    def __init__(self, place: int, ask: Ask) -> None:
        self._place = place
        self._ask = ask
        self._known: dict[PeerId, Held] = {}
        self._named_by: dict[PeerId, set[PeerId | None]] = {}
        self._dead_hints: Counter[PeerId | None] = Counter()
        self._answered: set[PeerId] = set()
        self._failed: set[PeerId] = set()
        self._asking: dict[asyncio.Task[list[Held] | None], tuple[Held, float]] = {}  # with the member, and the loop time of the call

    async def run(self, first: Iterable[Held], num_nearest: int, most_calls: int) -> list[Held]:
        """Look up from `first`, for at most WALK_S and `most_calls` calls; return the nearest members that replied. Cancel-safe."""
        self._learn(first, None)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(WALK_S):
                    await self._walk(num_nearest, most_calls)
        finally:
            await cancel(*self._asking)
        return self._sorted(self._answered)[:num_nearest]

    async def _walk(self, num_nearest: int, most_calls: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            slow = {held.peer for held, since_s in self._asking.values() if loop.time() - since_s >= SLOW_S}
            goal = self._sorted(peer for peer in self._known if peer not in slow and self._is_credible(peer))[:num_nearest]
            if all(held.peer in self._answered for held in goal):
                return
            asked = {held.peer for held, _ in self._asking.values()}
            for held in goal:
                if held.peer not in self._answered | asked and len(self._asking) - len(slow) < AT_ONCE and most_calls > 0:
                    self._asking[asyncio.create_task(self._ask(held), name="directory call")] = held, loop.time()
                    most_calls -= 1
            if not self._asking:
                return
            done, _ = await asyncio.wait(self._asking, timeout=SLOW_S / 4, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._take_reply(self._asking.pop(task)[0].peer, task.result())

    def _take_reply(self, peer: PeerId, named: list[Held] | None) -> None:
        if named is None:
            self._failed.add(peer)
            self._dead_hints.update(self._named_by[peer])
        else:
            self._answered.add(peer)
            self._learn(named, peer)

    def _learn(self, named: Iterable[Held], source: PeerId | None) -> None:
        for held in named:
            self._known.setdefault(held.peer, held)
            self._named_by.setdefault(held.peer, set()).add(source)

    def _is_credible(self, peer: PeerId) -> bool:
        """Return whether a peer has replied, or is not queried yet and was named by a trusted member."""
        if peer in self._answered or peer in self._failed:
            return peer in self._answered
        return any(source is None or self._dead_hints[source] < DEAD_HINTS for source in self._named_by[peer])

    def _sorted(self, peers: Iterable[PeerId]) -> list[Held]:
        return [self._known[peer] for peer in sorted(peers, key=lambda peer: place_of(peer) ^ self._place)]
