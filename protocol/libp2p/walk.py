"""A walk through the directory towards a place: ask the nearest known, who name nearer ones, until the nearest of all have answered.

Whoever names peers is answerable for them: when two of them did not answer, the others that it named are not asked on its word. So one
liar costs a few calls, not the walk. A call that hangs costs a second, not the walk either.
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

AT_ONCE = 3
SLOW_S = 1.0  # a call that takes longer does not keep the next one waiting
WALK_S = 6.0
DEAD_HINTS = 2

Ask = Callable[[Held], Coroutine[Any, Any, list[Held] | None]]


class Walk:
    """One walk towards `place`. `ask` returns the members that a peer names, None when it does not answer."""

    def __init__(self, place: int, ask: Ask) -> None:
        self._place = place
        self._ask = ask
        self._known: dict[PeerId, Held] = {}
        self._named_by: dict[PeerId, set[PeerId | None]] = {}
        self._dead_hints: Counter[PeerId | None] = Counter()
        self._answered: set[PeerId] = set()
        self._failed: set[PeerId] = set()
        self._asking: dict[asyncio.Task[list[Held] | None], tuple[Held, float]] = {}  # and since when (loop time)

    async def run(self, first: Iterable[Held], num_nearest: int, most_calls: int) -> list[Held]:
        """Begin with `first`; return up to `num_nearest` members that have answered, the nearest first. Ends within WALK_S; cancel-safe."""
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
            goal = self._sorted(peer for peer in self._known if peer not in slow and self._is_believed(peer))[:num_nearest]
            if all(held.peer in self._answered for held in goal):
                return
            under_way = {held.peer for held, _ in self._asking.values()}
            for held in goal:
                if held.peer not in self._answered | under_way and len(self._asking) - len(slow) < AT_ONCE and most_calls > 0:
                    self._asking[asyncio.create_task(self._ask(held), name="directory call")] = held, loop.time()
                    most_calls -= 1
            if not self._asking:
                return
            done, _ = await asyncio.wait(self._asking, timeout=SLOW_S / 4, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._hear(self._asking.pop(task)[0].peer, task.result())

    def _hear(self, peer: PeerId, named: list[Held] | None) -> None:
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

    def _is_believed(self, peer: PeerId) -> bool:
        """Whether a peer is worth a call: it has answered, or somebody has named it whose word has been good."""
        if peer in self._answered or peer in self._failed:
            return peer in self._answered
        return any(source is None or self._dead_hints[source] < DEAD_HINTS for source in self._named_by[peer])

    def _sorted(self, peers: Iterable[PeerId]) -> list[Held]:
        return [self._known[peer] for peer in sorted(peers, key=lambda peer: place_of(peer) ^ self._place)]
