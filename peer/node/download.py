"""Fetching a content piece by piece, from several donors at once, each as fast as it delivers.

Any piece may come from any donor: what is missing is shared out as they ask for more work. A donor has about a second of what it
delivers under way and no more, so that a slow line carries other things too, and who falls silent or breaks off leaves little undone.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable

from peer.node.fetching import FetchClient, Source
from peer.node.pieces import Pieces
from peer.swarm.address_book import AddressBook, KnownPeer, loop_s
from protocol.errors import GossamerError, PeerMisbehaved
from protocol.identity import PeerId
from protocol.messages.messages import Contents, ContentsKind

PIECE_S = 20.0  # for a donor to deliver the next piece; slower than that, it is worth less than any other
UNDER_WAY_S = 1.0  # of what a donor delivers
UNDER_WAY_PIECES = (2, 256)  # at least and at most
MEASURED_S = 0.5  # for a rate
RETRY_S = 0.5  # before a donor that broke off is asked for the rest


class Flow:
    """How much one donor delivers, and so how many pieces may be under way from it. `now_s` is the loop's time."""

    def __init__(self, now_s: float) -> None:
        self.window = UNDER_WAY_PIECES[0]
        self._since_s = now_s
        self._num_pieces = 0

    def came(self, now_s: float) -> None:
        """Take note of a piece; every so often of the rate."""
        self._num_pieces += 1
        passed_s = now_s - self._since_s
        if passed_s >= MEASURED_S:
            least, most = UNDER_WAY_PIECES
            self.window = max(least, min(most, 2 * self.window, round(UNDER_WAY_S * self._num_pieces / passed_s)))
            self._since_s, self._num_pieces = now_s, 0


class Download:
    """One content on its way. `check` raises for a header whose bytes are not wanted."""

    def __init__(
        self,
        client: FetchClient,
        book: AddressBook,
        kind: ContentsKind,
        pieces: Pieces,
        check: Callable[[PeerId, Contents], None],
        on_piece: Callable[[PeerId], None],
    ) -> None:
        self._client = client
        self._book = book
        self._kind = kind
        self._check = check
        self._on_piece = on_piece
        self.pieces = pieces
        self._num_by: Counter[PeerId] = Counter()  # pieces that each has delivered
        self._free = list(pieces.missing())  # a heap: what nobody is asked for
        self._changed = asyncio.Event()

    async def from_donors(self, donors: Iterable[KnownPeer], num_at_once: int) -> list[GossamerError]:
        """Have these donors deliver, so many at a time, and return what those that cannot have said.

        Afterwards the content is whole, or none of them can deliver more. Raises OSError for the disk's sake.
        """
        waiting, errors = deque(donors), list[GossamerError]()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(num_at_once, len(waiting))):
                    tasks.create_task(self._work(waiting, errors))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return errors

    async def _work(self, waiting: deque[KnownPeer], errors: list[GossamerError]) -> None:
        """Use one donor after another; one that delivered something before it broke off is asked again later."""
        while waiting and not self.pieces.is_whole:
            donor = waiting.popleft()
            num_before = self._num_by[donor.peer_id]
            try:
                async with self._client.source(donor.peer_id, donor.addresses) as source:
                    await self._use(donor.peer_id, source)
            except PeerMisbehaved as error:
                self._book.ban(donor.peer_id, loop_s())
                errors.append(error)
            except GossamerError as error:
                if self._num_by[donor.peer_id] > num_before:
                    waiting.append(donor)
                    await asyncio.sleep(RETRY_S)
                else:
                    errors.append(error)

    async def _use(self, donor: PeerId, source: Source) -> None:
        """Ask and take at the same time, until the content is whole. Raises what ends it: GossamerError, OSError."""
        asked, flow = deque[int](), Flow(loop_s())
        asking = asyncio.create_task(self._ask(source, asked, flow))
        try:
            while not self.pieces.is_whole:
                if asking.done():
                    asking.result()
                if asked:
                    await self._take(donor, source, asked, flow)
                else:
                    await self._change()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for piece in asked:
                heapq.heappush(self._free, piece)
            self._has_changed()

    async def _ask(self, source: Source, asked: deque[int], flow: Flow) -> None:
        try:
            while not self.pieces.is_whole:
                if self._free and len(asked) < flow.window:
                    piece = heapq.heappop(self._free)
                    asked.append(piece)
                    self._has_changed()
                    await source.ask(self._kind, self.pieces.offset(piece), self.pieces.size(piece))
                else:
                    await self._change()
        finally:
            self._has_changed()

    async def _take(self, donor: PeerId, source: Source, asked: deque[int], flow: Flow) -> None:
        header, data = await source.take(lambda header: self._check(donor, header), PIECE_S)
        self.pieces.put(asked.popleft(), data, header.clock_steps)
        self._num_by[donor] += 1
        flow.came(loop_s())
        self._has_changed()
        self._on_piece(donor)

    async def _change(self) -> None:
        await self._changed.wait()

    def _has_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
