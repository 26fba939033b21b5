"""The end of a run: the peers average their fast weights in pairs, then agree on one peer's weights (peer/sync/result_agreement.py).

Each fragment meets at gamma 1, alpha 0 (optim.noloco.FINISH) with any peer that has reached the end too. The rounds and the wait start
anew whenever a partner reaches the end, or comes back to it after a restart. A peer that still trains is waited for if it would arrive
within WAIT_S at our own pace. Where the first result is not agreed, all average again, for twice as many rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from gossamer.peer.node.meetings import Meetings
from gossamer.peer.node.partner_search import Searches
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.presence import RECORD_S
from gossamer.peer.sync.result_agreement import ResultAgreement
from gossamer.protocol.identity import PeerId
from gossamer.protocol.tasks import cancel, loop_s

ROUNDS = 2  # per fragment: with more, 4 and 8 peers come no nearer to their mean; with unlike texts they do, when they average again
WAIT_S = 10.0  # for peers that are still training, and for those that have just come
MOST_S = 40.0  # in all, whoever comes
LOOK_S = 0.3  # between two looks at who has come, or whether there is a result


@dataclass(slots=True)
class FinalAveraging:
    """The final averaging: `run` it when the trainer has reached the end of the schedule."""

    searches: Searches
    meetings: Meetings
    book: AddressBook
    agreement: ResultAgreement
    num_fragments: int
    total_steps: int
    _company: set[PeerId] = field(default_factory=set)  # peers that have reached the end
    _rounds: Counter[int] = field(default_factory=Counter)  # completed meetings, by fragment
    _num_rounds: int = ROUNDS
    _until_s: float = 0.0  # when we stop to wait; loop time
    _latest_s: float = 0.0  # when we stop even if another partner comes
    _began: tuple[int, float] | None = None  # our own global step when training began, and that loop time

    def note_global_step(self, global_step: int) -> None:
        """Note our own global step; the first one is the start from which our pace is measured."""
        if self._began is None:
            self._began = global_step, loop_s()

    def forget_pace(self) -> None:
        """Forget our pace: the peer has paused since."""
        self._began = None

    def note_meeting(self, fragment: int) -> None:
        """Note a completed meeting of the last averaging, begun by either side."""
        self._rounds[fragment] += 1

    async def run(self) -> None:
        """Average until every fragment has had its rounds, the time is up, or a result is agreed; then settle. Again, where none is."""
        await self.agreement.resume()
        while not await self._average_and_agree():
            self._rounds.clear()
            self._num_rounds *= 2

    async def _average_and_agree(self) -> bool:
        _, averaging = work = [asyncio.create_task(step) for step in (self.agreement.take_agreed(), self._average())]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in filter(asyncio.Task.done, work):
                task.result()  # raises our own bugs
            averaging.cancel()
            return await self.agreement.run()  # what is being taken already goes on
        finally:
            await cancel(*work)

    async def _average(self) -> None:
        self._until_s = loop_s() + WAIT_S
        self._latest_s = loop_s() + MOST_S
        async with asyncio.TaskGroup() as tasks:
            for fragment in range(self.num_fragments):
                tasks.create_task(self._finish(fragment))

    async def _finish(self, fragment: int) -> None:
        while True:
            somebody_trains = self._count_company() and loop_s() < self._until_s
            if self._rounds[fragment] < self._num_rounds and await self._search(fragment):
                continue
            if not somebody_trains and not self._count_company():
                return
            if loop_s() >= self._until_s:
                return
            await asyncio.sleep(LOOK_S)

    async def _search(self, fragment: int) -> bool:
        """Meet a peer; return False when the time is up, plus what the meetings usually take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._until_s + self._num_rounds * self.num_fragments * self.meetings.typical_s):
                return await self.searches.search(fragment)
        return False

    def _count_company(self) -> bool:
        """Begin the rounds and the time anew when a partner has come to the end; return whether anybody within reach still trains."""
        now_s = loop_s()
        known = self.book.reachable(now_s)
        company = {entry.peer_id for entry in known if entry.finished and entry.has_met}
        self._company -= {entry.peer_id for entry in known if not entry.finished}  # it was restarted, and comes again
        if not company <= self._company:
            self._company |= company
            self._rounds.clear()
            self._until_s = min(now_s + WAIT_S, self._latest_s)
        there = (entry for entry in known if entry.record is not None and now_s - entry.seen_s < RECORD_S)
        return any(not entry.finished and self._may_come(entry, now_s) for entry in there)

    def _may_come(self, entry: KnownPeer, now_s: float) -> bool:
        """Return whether a peer that trains at our pace would finish soon; True where too little is known."""
        if self._began is None or self._began[0] >= self.total_steps:
            return True  # we were at the end when we were started
        began_steps, began_s = self._began
        steps_per_s = (self.total_steps - began_steps) / max(1e-3, now_s - began_s)
        since_s = now_s - entry.global_step_at_s + self.meetings.typical_s  # a meeting's clock is that of its beginning
        return self.total_steps - entry.global_step <= steps_per_s * (since_s + WAIT_S)
