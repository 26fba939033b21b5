"""Result agreement: all peers at the end of a run take one peer's averaged weights, the same bit for bit.

1. Of the peers at the end, the one with the smallest id writes its own weights down at once; the next one does so RANK_S later if no result
   is found, and so on.
2. All others fetch the result piece by piece, from any peer that has some of it. Should two results have been written, all take the one
   with the smaller name. The trainer judges it like any state, and keeps its own weights if they predict better.
3. A peer with a result stays until all within reach have the same one, or all its pieces: for LINGER_S at most, or longer while a peer
   still fetches.

Identities are free, so answers are weighted by their source: first the peers that we have met, then a few strangers of each invite or
network, until these have cost us TRIES useless answers. So a Sybil group delays an ending by seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.link.payload_folder import PayloadFolder, mapped
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.machine.events import Event, ProcessReported, ResultTaken
from gossamer.peer.swarm.address_book import KnownPeer, loop_s
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.client import Source
from gossamer.peer.sync.pieces import Pieces, RunResult, complete_result_name, fetch_hashes
from gossamer.peer.sync.sources import OwnMeetings, Sources
from gossamer.peer.sync.state_source import StateSource
from gossamer.peer.sync.transfer import Transfer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.messages.messages import ContentsKind
from gossamer.protocol.messages.terms import RunTerms

ASKED = 8  # peers at once
ANSWER_S = 3.0  # for them
PAUSE_S = 0.3  # between two rounds of asking
SERVING_S = 9.0  # to wait for a peer that has a result and does not answer any more
RANK_S = 2.0  # before the next peer in the order of ids writes its weights down
RANKS = 16  # at most: peers of a higher rank have waited long enough
TIMEOUT_FACTOR = 4.0
LINGER_S = 10.0  # for others to fetch
SOURCES = 4  # at once
TRIES = 3  # useless answers of strangers that share an invite or a network, or of one peer that we have met
STRANGERS_S, STRANGERS_BYTES_PER_S = 60.0, 1e6  # a transfer between strangers takes no longer than this, and is no slower

Found = dict[bytes, list[KnownPeer]]
"""The peers that have each result, by its name."""


@dataclass(slots=True)
class ResultAgreement:
    """Agree on the result and have the trainer take it. `file` holds it while it comes."""

    sources: Sources
    terms: RunTerms
    lifecycle: Lifecycle
    meetings: OwnMeetings
    own: StateSource
    link: NodeEnd
    payloads: PayloadFolder
    file: Path
    emit: Callable[[Event], None]
    _refused: set[bytes] = field(default_factory=set)  # results that are worse than our own weights
    _useless: Counter[object] = field(default_factory=Counter)  # answers, by the peer, invite or network that is accountable for them
    _names: itertools.count[int] = field(default_factory=itertools.count)
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _serving_until_s: float = -math.inf  # until when to wait for a peer with a result that may be too busy serving it to answer; loop time

    async def run(self) -> None:
        """Agree on a result, and stay until all within reach have it or the time is up."""
        began_s = loop_s()
        while self.own.result is None:
            async with self._taking:  # a source serves a peer on one stream, so nothing is asked for twice
                found = await self.find() if self.own.result is None else {}
                is_our_turn = not found and loop_s() - max(began_s, self._serving_until_s) >= RANK_S * min(RANKS, self._rank())
                if self.own.result is None and is_our_turn:
                    await self._write_down()
            if self.own.result is None:
                if found:
                    await self.take(found)
                await asyncio.sleep(PAUSE_S)
        await self._linger()

    async def find(self) -> Found:
        """Ask peers which result they have; leave out those that do not answer, or have none. This also shows who is at the end."""
        known = self._speakers()
        asked, found = self.sources.rng.sample(known, min(ASKED, len(known))), Found()
        for entry, name in await self.sources.ask_all(asked, self._result_name, ANSWER_S):
            if isinstance(name, GossamerError):
                self._useless.update(() if entry.meetings else self.sources.groups.accountable(entry))
            elif name and name not in self._refused:
                found.setdefault(name, []).append(entry)
        if found:
            self._serving_until_s = loop_s() + SERVING_S
        return found

    async def take_first(self) -> None:
        """Wait until a peer has a result that is good enough, and take it."""
        while self.own.result is None:
            if found := await self.find():
                await self.take(found)
            await asyncio.sleep(PAUSE_S)

    async def take(self, found: Found) -> None:
        """Fetch the result with the smallest name, of peers that we have met if they have any, and have the trainer take it."""
        is_strangers = {name: not any(entry.meetings for entry in entries) for name, entries in found.items()}
        name = min(found, key=lambda name: (is_strangers[name], name))
        is_taken = False
        async with self._taking:
            result = self.own.result
            if result is not None and name >= result.name:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stranger_transfer_s if is_strangers[name] else self._met_transfer_s):
                    is_taken = await self._take(name, found)
        if not is_taken:
            for entry in found[name]:
                self._useless.update(self.sources.groups.accountable(entry))

    @property
    def _met_transfer_s(self) -> float:
        """How long the transfer from a peer that we have met may take."""
        slow_bytes = sum(sizes.slow_bytes for sizes in self.terms.fragments)
        num_meetings = len(self.terms.fragments) * self.terms.state_bytes / max(1, slow_bytes)  # that carry as much as a state
        return STRANGERS_S + TIMEOUT_FACTOR * num_meetings * self.meetings.typical_s

    @property
    def _stranger_transfer_s(self) -> float:
        """How long the transfer from a stranger may take."""
        return STRANGERS_S + self.terms.state_bytes / STRANGERS_BYTES_PER_S

    async def _take(self, name: bytes, found: Found) -> bool:
        """Fetch a result and have the trainer judge it; return whether it took it."""
        began_s, num_by = loop_s(), Counter[PeerId]()
        try:
            with contextlib.closing(Pieces.open(self.file, name, self.terms.state_bytes)) as pieces:
                result = self.own.coming = await self._fetch_hashes(name, found[name], pieces)
                if result is None:
                    return False
                transfer = Transfer(self.sources, ContentsKind.RESULT, pieces, self._order(pieces), result.check, num_by)
                await transfer.run(self._holders(found[name]), SOURCES)
                if not pieces.is_whole:
                    return False
                adopted = await self._adopt(pieces.path)
                data = mapped(pieces.path)
        except OSError:
            return False
        finally:
            self.own.coming = None  # the pieces stay on the disk for the next try
        if adopted.reason:
            files.remove(self.file)
            self._refused.add(name)
            self.emit(ProcessReported("finishing", f"kept our own weights: {adopted.reason}"))
            return False
        self._set_result(RunResult(result.hashes, data), tuple(map(str, num_by)), loop_s() - began_s)
        return True

    async def _fetch_hashes(self, name: bytes, peers: list[KnownPeer], pieces: Pieces) -> RunResult | None:
        """Ask the peers that have a result for its hashes, one after the other; None where none of them answers."""
        for peer in peers:
            with contextlib.suppress(GossamerError):
                async with self.sources.open(peer) as source:
                    return RunResult(await fetch_hashes(source, name, self.terms.state_bytes), pieces)
        return None

    def _order(self, pieces: Pieces) -> list[int]:
        """Return the missing pieces; each peer at the end begins elsewhere, so that soon each has what the others want."""
        first = pieces.num_pieces * self._rank() // (1 + sum(entry.finished for entry in self.sources.book.live(loop_s())))
        return sorted(pieces.missing(), key=lambda piece: (piece - first) % pieces.num_pieces)

    def _holders(self, have_all: list[KnownPeer]) -> list[KnownPeer]:
        """Return the peers to ask for pieces: those that have all; if we have met one of them, then peers at the end, then all others."""
        if not any(entry.meetings for entry in have_all):
            return have_all  # no one else may want it
        near = [entry for entry in self._speakers() if entry not in have_all]
        near.sort(key=lambda entry: not entry.finished)
        return [*sorted(have_all, key=lambda entry: not entry.meetings), *near]

    def _speakers(self) -> list[KnownPeer]:
        """Return, in random order, the peers worth asking: those that we have met, and a few strangers of each invite or network."""
        near = self.sources.book.reachable(loop_s())
        cost, chosen = Counter(self._useless), list[KnownPeer]()
        for entry in self.sources.rng.sample(near, len(near)):
            marks = self.sources.groups.accountable(entry)
            if all(cost[mark] < TRIES for mark in marks):
                chosen.append(entry)
                if not entry.meetings:
                    cost.update(marks)
        return chosen

    def _rank(self) -> int:
        """Return how many of the peers at the end have a smaller id than ours."""
        return sum(entry.peer_id < self.sources.client.identity.peer_id for entry in self._speakers() if entry.finished)

    async def _write_down(self) -> None:
        """Make our own weights the result."""
        name = f"copy-result-{next(self._names)}"
        try:
            async with self.meetings.set_aside():
                written = await self.link.request(messages.WriteResult(name))
                data = self.payloads.read(name)
                is_whole = isinstance(written, messages.Written) and not written.reason and len(data) == self.terms.state_bytes
                self.lifecycle.has_agreed = is_whole
        except LinkLost:
            return
        finally:
            self.payloads.remove(name)
        if is_whole:
            self._set_result(await asyncio.to_thread(RunResult.of, data), (), 0.0)

    async def _adopt(self, path: Path) -> messages.Adopted:
        """Have the trainer judge a whole result; or its successor, where the trainer dies: the sources may have left by then."""
        async with self.meetings.set_aside():
            while True:
                with contextlib.suppress(LinkLost):
                    adopted = await self.link.request(messages.Adopt(str(path), 0, is_result=True))
                    assert isinstance(adopted, messages.Adopted)
                    self.lifecycle.has_agreed |= adopted.accepted
                    return adopted
                await asyncio.sleep(PAUSE_S)

    def _set_result(self, result: RunResult, sources: tuple[str, ...], seconds: float) -> None:
        files.remove(self.file)
        self.own.result = result
        self.emit(ResultTaken(result.name.hex(), sources, self.terms.state_bytes, seconds))

    async def _linger(self) -> None:
        """Stay until all within reach have our result; take another one if its name is smaller."""
        began_s = loop_s()
        while loop_s() < began_s + LINGER_S or self._is_needed(began_s):
            result = self.own.result
            assert result is not None
            found = await self.find()
            if found and min(found) < result.name:
                await self.take(found)
            elif await self._all_have(result.name, began_s + LINGER_S):
                return
            await asyncio.sleep(PAUSE_S)

    def _is_needed(self, since_s: float) -> bool:
        """Return whether a peer still fetches from us within its time; a peer that we have met has more time than a stranger."""
        known = {entry.peer_id for entry in self.sources.book.live(loop_s()) if entry.meetings}
        fetching = self.own.fetching
        rate = SLOWEST_BYTES_PER_S if fetching & known else STRANGERS_BYTES_PER_S
        return bool(fetching) and loop_s() < since_s + STRANGERS_S + self.terms.state_bytes / rate

    async def _all_have(self, name: bytes, until_s: float) -> bool:
        """Return whether each peer within reach has this result, or all its pieces, or is gone; False when asking takes too long."""
        near, theirs = self._speakers(), dict[PeerId, bytes]()

        async def ask_name(source: Source) -> None:
            theirs[source.peer_id] = await self._result_name(source)
            if not theirs[source.peer_id]:
                theirs[source.peer_id] = await complete_result_name(source, self.terms.state_bytes)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                for start in range(0, len(near), ASKED):
                    await self.sources.ask_all(near[start : start + ASKED], ask_name, ANSWER_S)
                    if any(their != name for their in theirs.values()):
                        return False
                return True
        return False

    async def _result_name(self, source: Source) -> bytes:
        """Return the name of a source's result, empty where it has none; note whether it is at the end. Raises as `Source.take`."""
        header = await source.header(ContentsKind.RESULT)
        if self.lifecycle.finished and header.global_step >= self.lifecycle.global_step:
            self.sources.book.note_call(source.peer_id, loop_s(), header.global_step, finished=True)
        return header.name
