"""The transfer engine: one content in runs of pieces, from several sources at once, each as fast as it delivers.

About a second of what a source delivers is under way from it and no more, so a slow line carries other things too. One request is for a run
of neighbouring pieces, about an eighth of that second: each request costs a header and two signatures. Sources of a result may have only a
part of it so far, so they are asked which pieces. Sources that have all are asked first for what the others lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.client import Source
from gossamer.peer.sync.pieces import Pieces, bits_bytes, from_bits
from gossamer.peer.sync.sources import Sources
from gossamer.protocol.errors import GossamerError, PeerMisbehaved
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind
from gossamer.protocol.tasks import Changes, cancel, loop_s

PIECE_S = 20.0  # for a source to deliver the next piece; a slower one is worth less than any other
UNDER_WAY_S = 1.0  # of what a source delivers
UNDER_WAY_PIECES = (2, 512)  # at least and at most
RUNS_UNDER_WAY = 8
BULK_WORTH_BYTES = 1 << 20  # for less, opening a bulk stream costs more than it saves
MEASURED_S = 0.5  # for a rate, unless twice the pieces under way have come before
RETRY_S = 0.5  # before a source that broke off is asked for the rest
NEWS_S = 1.0  # before a source that has not all is asked again what has come to it
NO_NEWS_S = 3.0  # then another one is tried
HELD = range(0)  # among the runs that a source was asked for: which pieces it has


class Flow:
    """How much one source delivers, and so how many pieces may be under way from it. `now_s` is loop time."""

    def __init__(self, now_s: float) -> None:
        self.window = UNDER_WAY_PIECES[0]
        self._since_s = now_s
        self._num_pieces = 0

    def run(self, most: int) -> int:
        """Return how many pieces, at most `most`, one request is for."""
        return max(1, min(most, self.window // RUNS_UNDER_WAY))

    def note(self, num_pieces: int, now_s: float) -> None:
        """Count pieces; every so often, measure the rate."""
        self._num_pieces += num_pieces
        passed_s = now_s - self._since_s
        if passed_s >= MEASURED_S or self._num_pieces >= 2 * self.window:
            least, most = UNDER_WAY_PIECES
            come = UNDER_WAY_S * self._num_pieces / max(passed_s, 1e-9)
            self.window = round(max(least, min(most, 2 * self.window, come)))
            self._since_s, self._num_pieces = now_s, 0


class NothingNew(GossamerError):
    """A source has no piece that we lack, for now."""


@dataclass(slots=True)
class Holding:
    """Which pieces one source has, by its last answer."""

    has_all: bool
    pieces: dict[int, None] = field(default_factory=dict)  # that were asked of nobody when it answered
    listed_s: float = -NEWS_S  # loop time
    news_s: float = 0.0  # when it last had something for us


@dataclass(slots=True)
class Transfer:
    """One content on its way into `pieces`."""

    sources: Sources
    kind: ContentsKind
    pieces: Pieces
    order: Iterable[int]  # of the missing pieces
    check: Callable[[PeerId, Contents], None]  # raises for a header whose bytes are not wanted
    num_by: Counter[PeerId]  # pieces of each source, over all transfers that share it
    verify: Callable[[PeerId, range, bytes | memoryview], None] | None = None  # raises where bytes of a run are not as they should be
    on_pieces: Callable[[], None] = lambda: None
    _free: dict[int, None] = field(init=False)  # what nobody is asked for; pieces that fewest sources have come first
    _changes: Changes = field(default_factory=Changes)
    _moved_s: float = field(default_factory=loop_s)  # when a piece last came

    def __post_init__(self) -> None:
        self._free = dict.fromkeys(self.order)

    async def run(self, peers: Iterable[KnownPeer], num_at_once: int) -> list[GossamerError]:
        """Have these sources deliver, so many at a time, all that they can; return the errors of those that cannot. Raises OSError."""
        waiting, errors = deque(peers), list[GossamerError]()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(num_at_once, len(waiting))):
                    tasks.create_task(self._fetch_from_sources(waiting, errors))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return errors

    async def _fetch_from_sources(self, waiting: deque[KnownPeer], errors: list[GossamerError]) -> None:
        """Use one source after another; one that delivered something before it broke off is asked again later."""
        while waiting and not self.pieces.is_whole:
            peer = waiting.popleft()
            num_before = self.num_by[peer.peer_id]
            try:
                async with self.sources.open(peer) as source:
                    await self._use(peer.peer_id, source)
            except GossamerError as error:
                has_more = isinstance(error, NothingNew) and loop_s() - self._moved_s < PIECE_S
                has_given = self.num_by[peer.peer_id] > num_before
                if not isinstance(error, PeerMisbehaved) and (has_more or has_given):
                    waiting.append(peer)
                    await asyncio.sleep(RETRY_S)
                else:
                    errors.append(error)

    async def _use(self, peer: PeerId, source: Source) -> None:
        """Ask and take at the same time, until the content is whole. Raises what ends it: GossamerError, OSError."""
        is_large = self.pieces.num_bytes - self.pieces.done_bytes > BULK_WORTH_BYTES
        opening = [asyncio.create_task(source.stream.open_bulk())] if is_large else []  # beside the first requests, which must come soon
        asked, flow, holding = deque[range](), Flow(loop_s()), Holding(self.kind is not ContentsKind.RESULT, news_s=loop_s())
        asking = asyncio.create_task(self._ask(source, asked, flow, holding))
        try:
            while not self.pieces.is_whole:
                if asking.done():
                    asking.result()
                if asked and asked[0] == HELD:
                    await self._take_held(source, asked, holding)
                elif asked:
                    await self._take(peer, source, asked, flow)
                else:
                    await self._wait_for_change()
        finally:
            await cancel(asking, *opening)
            self._free |= dict.fromkeys(piece for run in asked for piece in run)
            self._changes.notify()

    async def _ask(self, source: Source, asked: deque[range], flow: Flow, holding: Holding) -> None:
        try:
            while not self.pieces.is_whole:
                news_s = math.inf if holding.has_all or HELD in asked else holding.listed_s + NEWS_S - loop_s()
                if news_s <= 0:
                    asked.append(HELD)
                    self._changes.notify()
                    await source.ask(ContentsKind.RESULT_PIECES, 0, bits_bytes(self.pieces.num_pieces))
                elif sum(map(len, asked)) + (most := flow.run(_most_pieces(source))) <= flow.window and (
                    run := self._reserve_run(holding, most)
                ):
                    asked.append(run)
                    self._changes.notify()
                    await source.ask(self.kind, self.pieces.offset(run[0]), sum(map(self.pieces.size, run)))
                else:
                    await self._wait_for_change(news_s)
        finally:
            self._changes.notify()

    def _reserve_run(self, holding: Holding, most: int) -> range:
        """Return neighbouring pieces to ask this source for, and reserve them; none where it has none."""
        may_give = self._free if holding.has_all else holding.pieces
        first = next((piece for piece in may_give if piece in self._free), None)
        if first is None:
            return range(0)
        end = first + 1
        while end - first < most and end in self._free and end in may_give:
            end += 1
        for piece in range(first, end):
            del self._free[piece]
        return range(first, end)

    async def _take(self, peer: PeerId, source: Source, asked: deque[range], flow: Flow) -> None:
        header, data = await source.take_run(lambda header: self.check(peer, header), PIECE_S)
        if self.verify is not None:
            self.verify(peer, asked[0], data)
        run = asked.popleft()
        self.pieces.put(run, data, header.global_step)
        self.num_by[peer] += len(run)
        self._moved_s = loop_s()
        flow.note(len(run), loop_s())
        self._changes.notify()
        self.on_pieces()

    async def _take_held(self, source: Source, asked: deque[range], holding: Holding) -> None:
        """Take in what a source has, and put it last in the order. Raises NothingNew when it has had nothing for a while."""
        _, bits = await source.take(within_s=PIECE_S)
        asked.popleft()
        held = from_bits(bits, self.pieces.num_pieces)
        holding.listed_s, holding.has_all = loop_s(), len(held) == self.pieces.num_pieces
        new = [piece for piece in self._free if piece in held and not holding.has_all]
        for piece in new:  # to the end: sources that have all give the rest first
            self._free[piece] = self._free.pop(piece)
        holding.pieces = dict.fromkeys(new)
        if holding.has_all or new:
            holding.news_s = holding.listed_s
        elif holding.listed_s - holding.news_s > NO_NEWS_S:
            raise NothingNew("it has no piece that is missing here")
        self._changes.notify()

    async def _wait_for_change(self, most_s: float = math.inf) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if most_s == math.inf else most_s):
                await self._changes.wait()


def _most_pieces(source: Source) -> int:
    return source.stream.answer_bytes // files.PIECE_BYTES
