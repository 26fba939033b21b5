"""The result of a run: one peer's averaged weights, bit for bit the same at every peer that is there at the end.

After the last averaging the weights differ a little, so one peer's count. Whoever of those that have come to the end has the smallest id
writes down its own at once, the next one if none is found RANK_S later, and so on; so the death of one costs no more than that. Everybody
else fetches them by pieces, from anybody who has some of them already (peer/node/run_result.py). Should two results have been written down,
all take the one whose name is smaller. It is judged like any state: whose own weights predict better keeps them.

Who is done stays until all within reach have the same result, or all its pieces, LINGER_S at most, or longer while somebody still fetches.
A peer that still trains when half of the others have come to the end takes their result, and is done too.

Keys cost nothing, so who says what counts: first those with whom our meetings have counted, then a few strangers of each invite or network,
until these have cost us TRIES answers that came to nothing. So many keys hold up an ending by seconds, and no longer. One whom we have
met has PATIENCE times as long for a result as meetings of as many bytes usually take, and what has come of it is kept for its next try.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder, mapped
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.machine.events import Event, ProcessSays, ResultTaken
from gossamer.peer.node import pieces as files
from gossamer.peer.node.donor import StateDonor
from gossamer.peer.node.download import Download
from gossamer.peer.node.fetching import FetchClient
from gossamer.peer.node.meetings import Meetings
from gossamer.peer.node.pieces import Pieces
from gossamer.peer.node.run_result import RunResult, fetch_hashes, whole_coming
from gossamer.peer.swarm.address_book import KnownPeer, loop_s
from gossamer.peer.swarm.heads import Heads
from gossamer.peer.swarm.standing import Standing
from gossamer.protocol.errors import GossamerError, PeerMisbehaved
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.messages.messages import ContentsKind
from gossamer.protocol.messages.terms import RunTerms

ASKED = 8  # peers at once
ANSWER_S = 3.0  # for them
PAUSE_S = 0.3  # between two rounds of asking
HEARD_S = 9.0  # for one that has a result and does not answer any more
RANK_S = 2.0  # before the next one in the order of ids writes its weights down
RANKS = 16  # at most: who comes after them all has waited long enough
PATIENCE = 4.0
LINGER_S = 10.0  # for others to fetch
DONORS = 4  # at once
TRIES = 3  # answers of strangers that share an invite or a network, or of one whom we have met, that came to nothing
STRANGERS_S, STRANGERS_BYTES_PER_S = 60.0, 1e6  # what only strangers have comes, or goes to them, as fast as this, or not at all

Found = dict[bytes, list[KnownPeer]]
"""Who has which result, by its name."""


class Settlement:
    """Agree on the result and have the trainer take it over. `file` is where it is kept while it comes."""

    def __init__(
        self,
        client: FetchClient,
        terms: RunTerms,
        heads: Heads,
        standing: Standing,
        meetings: Meetings,
        donor: StateDonor,
        link: NodeEnd,
        payloads: PayloadFolder,
        file: Path,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._client = client
        self._state_bytes = terms.state_bytes
        self._me = client.identity.peer_id
        self._book = heads.book
        self._heads = heads
        self._standing = standing
        self._meetings = meetings
        self._donor = donor
        self._link = link
        self._payloads = payloads
        self._file = file
        self._rng = rng
        self._emit = emit
        self._strangers_s = STRANGERS_S + terms.state_bytes / STRANGERS_BYTES_PER_S
        self._needed_s = STRANGERS_S + terms.state_bytes / SLOWEST_BYTES_PER_S  # the longest that one whom we have met may fetch
        self._state_meetings = len(terms.fragments) * terms.state_bytes / max(1, sum(sizes.slow_bytes for sizes in terms.fragments))
        self._refused: set[bytes] = set()  # results that are worse than our own weights
        self._in_vain = Counter[object]()  # answers that came to nothing, by who answers for them
        self._names = itertools.count()
        self._settling = asyncio.Lock()
        self._heard_s = -math.inf  # until when somebody's result is waited for who may be too busy giving it to answer; loop time

    async def run(self) -> None:
        """Settle on a result, and stay until all within reach have it or the time is up."""
        began_s = loop_s()
        while self._donor.result is None:
            async with self._settling:  # what is being taken already is not asked for twice: a donor hears a partner on one stream
                found = await self.find() if self._donor.result is None else {}
                is_our_turn = not found and loop_s() - max(began_s, self._heard_s) >= RANK_S * min(RANKS, self._rank())
                if self._donor.result is None and is_our_turn:
                    await self._write_down()
            if self._donor.result is None:
                if found:
                    await self.take(found)
                await asyncio.sleep(PAUSE_S)
        await self._linger()

    async def find(self) -> Found:
        """Ask peers which result they have; those that do not answer, or have none, are left out. We hear who has come to the end, too."""
        known = self._speakers()
        asked = self._rng.sample(known, min(ASKED, len(known)))
        names = await asyncio.gather(*(self._name_at(entry) for entry in asked))
        found: Found = {}
        for entry, name in zip(asked, names, strict=True):
            if name and name not in self._refused:
                found.setdefault(name, []).append(entry)
            elif name is None and not entry.meetings:
                self._in_vain.update(self._heads.answerable(entry))
        if found:
            self._heard_s = loop_s() + HEARD_S
        return found

    async def take_first(self) -> None:
        """Wait until somebody has a result that is good enough, and take it."""
        while self._donor.result is None:
            if found := await self.find():
                await self.take(found)
            await asyncio.sleep(PAUSE_S)

    async def take(self, found: Found) -> bool:
        """Fetch the result with the smallest name, of those we have met if they have any, and have it taken over; tell whether it was."""
        is_strangers = {name: not any(entry.meetings for entry in entries) for name, entries in found.items()}
        name = min(found, key=lambda name: (is_strangers[name], name))
        is_taken = False
        async with self._settling:
            result = self._donor.result
            if result is not None and name >= result.name:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._strangers_s if is_strangers[name] else self._known_s):
                    is_taken = await self._take(name, found)
        if not is_taken:
            for entry in found[name]:
                self._in_vain.update(self._heads.answerable(entry))
        return is_taken

    @property
    def _known_s(self) -> float:
        """How long a result may take that one has whom we have met."""
        return STRANGERS_S + PATIENCE * self._state_meetings * self._meetings.usual_s

    async def _take(self, name: bytes, found: Found) -> bool:
        began_s = loop_s()
        try:
            with contextlib.closing(Pieces.open(self._file, name, self._state_bytes)) as pieces:
                result = self._donor.coming = await self._named(name, found[name], pieces)
                if result is None:
                    return False
                order = sorted(pieces.missing(), key=lambda piece: (piece - self._first(pieces.num_pieces)) % pieces.num_pieces)
                download = Download(self._client, self._book, ContentsKind.RESULT, pieces, order, result.check, lambda _: None)
                await download.from_donors(self._holders(found[name]), DONORS)
                if not pieces.is_whole:
                    return False
                adopted = await self._adopt(pieces.path)
                data = mapped(pieces.path)
        except OSError:
            return False
        finally:
            self._donor.coming = None  # what has come stays on the disk, and is gone on with
        if adopted.reason:
            files.remove(self._file)
            self._refused.add(name)
            self._emit(ProcessSays("finishing", f"kept our own weights: {adopted.reason}"))
            return False
        self._settled(RunResult(result.hashes, data), tuple(map(str, download.num_by)), loop_s() - began_s)
        return True

    async def _named(self, name: bytes, donors: list[KnownPeer], pieces: Pieces) -> RunResult | None:
        """Have one of those that have settled on a result give its hashes; None where nobody does."""
        for donor in donors:
            try:
                async with self._client.source(donor.peer_id, donor.addresses) as source:
                    return RunResult(await fetch_hashes(source, name, self._state_bytes), pieces)
            except PeerMisbehaved:
                self._book.ban(donor.peer_id, loop_s())
            except GossamerError:
                continue
        return None

    def _first(self, num_pieces: int) -> int:
        """Return where to begin: each of those that have come to the end elsewhere, so that soon each has what the others want."""
        return num_pieces * self._rank() // (1 + sum(entry.finished for entry in self._book.live(loop_s())))

    def _holders(self, settled: list[KnownPeer]) -> list[KnownPeer]:
        """Return whom to ask for pieces: those that have all; of what one has that we have met, then those at the end, and the others."""
        if not any(entry.meetings for entry in settled):
            return settled  # nobody else may be after it
        near = [entry for entry in self._speakers() if entry not in settled]
        near.sort(key=lambda entry: not entry.finished)
        return [*sorted(settled, key=lambda entry: not entry.meetings), *near]

    def _speakers(self) -> list[KnownPeer]:
        """Return, in random order, whose word about results is worth a question: whom we have met, and a few strangers of each kind."""
        near = self._book.reachable(loop_s())
        cost, chosen = Counter(self._in_vain), list[KnownPeer]()
        for entry in self._rng.sample(near, len(near)):
            marks = self._heads.answerable(entry)
            if all(cost[mark] < TRIES for mark in marks):
                chosen.append(entry)
                if not entry.meetings:
                    cost.update(marks)
        return chosen

    # ------------------------------------------------------------------ our own

    def _rank(self) -> int:
        """Return how many of those that have come to the end come before us."""
        return sum(entry.peer_id < self._me for entry in self._speakers() if entry.finished)

    async def _write_down(self) -> None:
        name = f"clone-result-{next(self._names)}"
        try:
            async with self._meetings.set_aside():
                written = await self._link.request(messages.Settle(name))
                data = self._payloads.read(name)
                is_whole = isinstance(written, messages.Written) and not written.reason and len(data) == self._state_bytes
                self._standing.has_settled = is_whole
        except LinkLost:
            return
        finally:
            self._payloads.remove(name)
        if is_whole:
            self._settled(await asyncio.to_thread(RunResult.of, data), (), 0.0)

    async def _adopt(self, path: Path) -> messages.Adopted:
        async with self._meetings.set_aside():
            adopted = await self._judged(path)
            self._standing.has_settled = self._standing.has_settled or adopted.accepted
        return adopted

    async def _judged(self, path: Path) -> messages.Adopted:
        """Have the trainer judge what is here, and its successor where it dies over it: others may have gone."""
        while True:
            with contextlib.suppress(LinkLost):
                adopted = await self._link.request(messages.Adopt(str(path), 0, is_result=True))
                assert isinstance(adopted, messages.Adopted)
                return adopted
            await asyncio.sleep(PAUSE_S)

    def _settled(self, result: RunResult, donors: tuple[str, ...], seconds: float) -> None:
        files.remove(self._file)
        self._donor.result = result
        self._emit(ResultTaken(result.name.hex(), donors, self._state_bytes, seconds))

    # ------------------------------------------------------------------ the others

    async def _linger(self) -> None:
        """Stay until all within reach have our result; take another one whose name is smaller."""
        began_s = loop_s()
        while loop_s() < began_s + LINGER_S or self._is_needed(began_s):
            result = self._donor.result
            assert result is not None
            found = await self.find()
            if found and min(found) < result.name:
                await self.take(found)
            elif await self._all_have(result.name, began_s + LINGER_S):
                return
            await asyncio.sleep(PAUSE_S)

    def _is_needed(self, since_s: float) -> bool:
        """Tell whether somebody still fetches from us who has not been at it for too long; whom we have met has more time."""
        known = {entry.peer_id for entry in self._book.live(loop_s()) if entry.meetings}
        fetching = self._donor.fetching
        return bool(fetching) and loop_s() < since_s + (self._needed_s if fetching & known else self._strangers_s)

    async def _all_have(self, name: bytes, until_s: float) -> bool:
        """Tell whether each peer within reach answers with this result, needs nothing more of it, or is gone; not if that takes long."""
        near = self._speakers()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                for start in range(0, len(near), ASKED):
                    names = await asyncio.gather(*(self._name_at(entry, or_coming=True) for entry in near[start : start + ASKED]))
                    if any(theirs not in (name, None) for theirs in names):
                        return False
                return True
        return False

    async def _name_at(self, entry: KnownPeer, *, or_coming: bool = False) -> bytes | None:
        """Return the name of a peer's result, empty where it has none; None where it does not answer.

        `or_coming`: or of the one of which it has all pieces; a slow peer may judge them for long, and needs nobody for that.
        """
        name: bytes | None = None
        with contextlib.suppress(GossamerError, TimeoutError):
            try:
                async with asyncio.timeout(ANSWER_S), self._client.source(entry.peer_id, entry.addresses) as source:
                    header = await source.header(ContentsKind.RESULT)
                    if self._standing.finished and header.clock_steps >= self._standing.clock_steps:
                        self._book.saw(entry.peer_id, loop_s(), header.clock_steps, finished=True)
                    name = header.name
                    if or_coming and not name:
                        name = await whole_coming(source, self._state_bytes)
            except PeerMisbehaved:
                self._book.ban(entry.peer_id, loop_s())
        return name
