"""The end of a run: the peers average their fast weights in pairs until they agree, so that any of them holds the result.

Each fragment meets at gamma 1, alpha 0 (optim.noloco.FINISH) with whoever has reached the end too. A meeting takes the pair's difference
away, so a round of meetings leaves about half of the variance. Rounds count anew whenever somebody else has reached the end: those who
came first would otherwise agree among themselves and be gone before the others come. What is left when the time is up is left.
"""

from __future__ import annotations

import asyncio
import contextlib

from peer.node.partner_search import Searches
from peer.swarm.address_book import AddressBook, loop_s
from peer.swarm.presence import RECORD_S
from protocol.identity import PeerId

ROUNDS = 8  # per fragment: about a sixteenth of the spread
WAIT_S = 60.0  # for partners that are still training, and for all rounds together
LINGER_S = 3.0  # without a call from partners that are some meetings behind
PAUSE_S = 1.0  # between two looks at whether the others have come


class FinalAveraging:
    """Drive the last averaging: `run` it when the trainer has reached the end of the schedule."""

    def __init__(self, searches: Searches, book: AddressBook, num_fragments: int) -> None:
        self._searches = searches
        self._book = book
        self._company: set[PeerId] = set()  # who has reached the end
        self._left = dict.fromkeys(range(num_fragments), ROUNDS)
        self._met = asyncio.Event()

    def completed(self, fragment: int) -> None:
        """Note a completed meeting of the last averaging, whoever began it."""
        self._left[fragment] -= 1
        self._met.set()

    async def run(self) -> None:
        """Meet until every fragment has had its rounds and nobody is waited for, or the time is up; then answer who still calls.

        Without that, who is done first misses what the others still learn of each other, and keeps weights of its own.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
                for fragment in self._left:
                    tasks.create_task(self._finish(fragment))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._linger()

    async def _linger(self) -> None:
        """Wait until nobody has met us for a while."""
        while self._company:
            self._met.clear()
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._met.wait()
            except TimeoutError:
                return

    async def _finish(self, fragment: int) -> None:
        while True:
            somebody_trains = self._count_company()
            if self._left[fragment] > 0 and await self._searches.search(fragment):
                continue
            if not somebody_trains and not self._count_company():
                return
            await asyncio.sleep(PAUSE_S)

    def _count_company(self) -> bool:
        """Begin the rounds anew when somebody has come to the end; tell whether anybody within reach still trains."""
        now_s = loop_s()
        known = [entry for entry in self._book.live(now_s) if not entry.failures]
        company = {entry.peer_id for entry in known if entry.finished}
        if not company <= self._company:
            self._company |= company
            self._left = dict.fromkeys(self._left, ROUNDS)
        return any(entry.record is not None and not entry.finished and now_s - entry.seen_s < RECORD_S for entry in known)
