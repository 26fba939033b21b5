"""The end of a run: the peers average their fast weights in pairs until they agree, so that any of them holds the result.

Each fragment takes a few meetings at gamma 1, alpha 0 (optim.noloco.FINISH), with whoever has reached the end too. Each one halves
the pair's difference to nothing, so the spread over the swarm falls by about half per meeting; what is left after the deadline is left.
"""

from __future__ import annotations

import asyncio

from peer import requests as ask
from peer.meetings import Meetings
from peer.requests import Stage

ROUNDS = 4
WAIT_S = 45.0  # for partners that are still training, and for all rounds together
LINGER_S = 1.5  # for partners that are one meeting behind


class Finishing:
    """Drive the last averaging. `wanted` is set when the trainer has reached the end of the schedule."""

    def __init__(self, meetings: Meetings, num_fragments: int) -> None:
        self.wanted = asyncio.Event()
        self._meetings = meetings
        self._left = dict.fromkeys(range(num_fragments), ROUNDS)

    def completed(self, fragment: int) -> None:
        """Note a completed meeting of the last averaging, whoever began it."""
        self._left[fragment] -= 1

    async def run(self) -> None:
        """Meet until every fragment has had its rounds, or nobody is left, or the time is up."""
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*(self._finish(fragment) for fragment in self._left))
                await asyncio.sleep(LINGER_S)
        except TimeoutError:
            return

    async def _finish(self, fragment: int) -> None:
        while self._left[fragment] > 0 and await self._meetings.search(ask.Due(fragment, Stage.FINISH)):
            pass
