"""Result agreement: all peers at the end of a run take one peer's averaged weights, the same bit for bit.

1. The finished peers have an order that nobody can choose (`SybilGroups.drawn`). The first one writes its own weights down at once; the
   next one does so some seconds later if no result is found, and so on. A result counts from when it is its holder's turn.
2. All others fetch the result piece by piece, from any peer that has some of it. The trainer judges it: by its distance from our weights
   after the last averaging, and by its loss on our own text.
3. A result that more than half of the partners and we have is agreed: whoever has another one, or has refused it, takes it all the same.
4. If half of them neither have nor fetch ours for PATIENCE_S, it is not agreed. We give it up, and so do all who see that most have. The
   order is drawn anew, and the trainers allow four times as much loss above their own. The first time all average again.
5. A peer with a result stays until all within reach have the same one, or all its pieces: until nothing has changed for LINGER_S, or longer
   while a peer still fetches.

Only partners, peers that we have met, have a say. A peer without any asks a few strangers of each invite or network, until these have cost
us TRIES useless answers. So a Sybil group delays an ending by seconds at most.
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
from gossamer.protocol.messages.messages import ContentsKind, RunPhase
from gossamer.protocol.messages.terms import RunTerms

ASKED = 8  # peers at once
ANSWER_S = 3.0  # for them
PAUSE_S = 0.3  # between two rounds of asking
SERVING_S = 9.0  # to wait for a peer that has a result and does not answer any more
RANK_S = 2.0  # before the next peer in the order writes its weights down, and...
TURN_MEETINGS = 2  # ...as long as so many meetings take
PATIENCE_S = 8.0  # for one of several results to be agreed
MOST_SPLITS = 15  # results given up; the last ones are judged by form and distance, as any loss is allowed
RANKS = 16  # at most: peers of a higher rank have waited long enough
TIMEOUT_FACTOR = 4.0
LINGER_S = 10.0  # for others to fetch
MOST_LINGER_S = 60.0  # while they do not agree
AWAY_S = 20.0  # a partner that was there so lately may be back
SOURCES = 4  # at once
TRIES = 3  # useless answers of strangers that share an invite or a network
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
    _refused: set[bytes] = field(default_factory=set)  # results that our trainer, or too many partners, have refused
    _held: dict[PeerId, bytes] = field(default_factory=dict)  # the result that each peer had when it last answered
    _useless: Counter[object] = field(default_factory=Counter)  # answers, by the peer, invite or network that is accountable for them
    _names: itertools.count[int] = field(default_factory=itertools.count)
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _serving_until_s: float = -math.inf  # until when to wait for a peer with a result that may be too busy serving it to answer; loop time
    _began_s: float = math.inf  # when the order of turns began: at the end of our averaging; loop time
    _fetching: set[PeerId] = field(default_factory=set)  # who fetches or judges our result
    _changed_s: float = -math.inf  # when a partner last had another result than before
    _split_s: float | None = None  # since when half of the partners have not had ours
    _given_up: set[bytes] = field(default_factory=set)  # results that we gave up, with those of others
    _gave_up: set[PeerId] = field(default_factory=set)  # partners that have given up their result
    _num_splits: int = 0
    _was_agreed: bool = False  # our result: those that have left with it count for nobody any more

    async def run(self) -> bool:
        """Agree on a result, and stay until all within reach have it or the time is up. False: they must average again."""
        while not await self._agree():
            if self._num_splits == 1:
                return False
        return True

    async def _agree(self) -> bool:
        """As `run`; False where our result, or that of most partners, is given up."""
        self._began_s = loop_s()  # nobody's turn has come before our averaging has ended
        while self.own.result is None:
            async with self._taking:  # a source serves a peer on one stream, so nothing is asked for twice
                found = await self.find() if self.own.result is None else {}
                is_our_turn = not found and loop_s() >= max(self._began_s, self._serving_until_s) + self._turn_s * self._rank()
                if self.own.result is None and is_our_turn and self.lifecycle.phase is RunPhase.FINISH:
                    await self._write_down()
            if self.own.result is None:
                if found:
                    await self.take(found)
                elif self._is_given_up() and self._num_splits < MOST_SPLITS:
                    self._give_up()
                    return False
                await asyncio.sleep(PAUSE_S)
        return await self._linger()

    async def find(self) -> Found:
        """Ask peers which result they have, and return what we may take. This also shows who is at the end."""
        if self.lifecycle.phase is RunPhase.TRAIN:
            self._began_s = min(self._began_s, loop_s())
        known = self._speakers()
        asked = self.sources.rng.sample(known, min(ASKED, len(known)))
        for entry, name in await self.sources.ask_all(asked, self._name_at, ANSWER_S):
            if isinstance(name, GossamerError):
                self._useless.update(() if entry.has_met else self.sources.groups.accountable(entry))
                continue
            self.sources.book.note_answer(entry.peer_id, loop_s())
            had = self._held.get(entry.peer_id, b"")
            if entry.has_met and name != had:
                self._changed_s = loop_s()
                if not name and had not in self._given_up:
                    self._gave_up.add(entry.peer_id)
            self._held[entry.peer_id] = name
        found = Found()
        for entry in self.sources.book.live(loop_s()):
            if held := self._held.get(entry.peer_id):
                found.setdefault(held, []).append(entry)
        found = {name: entries for name, entries in found.items() if self._may_take(name, entries)}
        if found:
            self._serving_until_s = loop_s() + SERVING_S
        return found

    async def take_agreed(self) -> None:
        """Wait until there is a result that is agreed, and take it."""
        while self.own.result is None:
            async with self._taking:
                found = await self.find() if self.own.result is None else {}
            if any(map(self._is_agreed, found)):
                await self.take(found)
            await asyncio.sleep(PAUSE_S)

    async def take(self, found: Found) -> None:
        """Fetch an agreed result, else that of the first peer in the order, and have the trainer take it."""
        name = min(found, key=lambda name: (not self._is_agreed(name), min(map(self._place, found[name])), name))
        is_taken, is_strangers = False, not any(entry.has_met for entry in found[name])
        async with self._taking:
            if not self._may_take(name, found[name]):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stranger_transfer_s if is_strangers else self._met_transfer_s):
                    is_taken = await self._take(name, found)
        if not is_taken:
            for entry in found[name]:
                self._useless.update(self.sources.groups.accountable(entry))

    # ------------------------------------------------------------------ which one

    @property
    def _turn_s(self) -> float:
        """How long a turn lasts: on slow lines the averaging of the first in the order ends later than that of others."""
        return RANK_S + TURN_MEETINGS * self.meetings.typical_s

    @property
    def _patience_s(self) -> float:
        return PATIENCE_S + TURN_MEETINGS * self.meetings.typical_s

    def _voters(self) -> list[KnownPeer]:
        """Return the partners that have come to the end of the run."""
        return [entry for entry in self.sources.groups.partners(loop_s()) if entry.finished and not entry.failures]

    def _may_take(self, name: bytes, entries: list[KnownPeer]) -> bool:
        """Return whether a result with these holders may become ours now."""
        own = self.own.result
        if own is not None and (name == own.name or not self._is_agreed(name)):
            return False
        if own is not None or self._is_agreed(name):
            return True
        if not self.sources.groups.partners(loop_s()):
            return name not in self._refused
        turn = min((self._rank(entry) for entry in entries if entry.has_met), default=math.inf)
        return name not in self._refused and loop_s() >= self._began_s + self._turn_s * turn

    def _is_agreed(self, name: bytes) -> bool:
        """Return whether more than half of the partners at the end and we have this result."""
        return self._share(lambda their: their == name) > 0.5

    def _has_half(self, name: bytes) -> bool:
        """Return whether more than half of the partners at the end and we have this result, or are about to judge it."""
        said = self.sources.groups.share(
            self._voters(), lambda entry: entry.peer_id in self._fetching or self._held.get(entry.peer_id) == name, own=True
        )
        return said > 0.5

    def _share(self, says: Callable[[bytes], bool]) -> float:
        own = self.own.result.name if self.own.result else b""
        return self.sources.groups.share(self._voters(), lambda entry: says(self._held.get(entry.peer_id, b"")), says(own))

    def _is_split(self) -> bool:
        """Return whether half of the partners and we have not taken ours for so long that it will not be agreed."""
        own = self.own.result
        self._was_agreed |= own is not None and self._is_agreed(own.name)
        if own is None or self._was_agreed or self._num_splits >= MOST_SPLITS or self._has_half(own.name):
            self._split_s = None
            return False
        self._split_s = self._split_s or loop_s()
        return self._is_given_up() or loop_s() - self._split_s >= self._patience_s

    def _is_given_up(self) -> bool:
        """Return whether most partners and we would give up, if we did."""
        share = self.sources.groups.share(self._voters(), lambda entry: entry.peer_id in self._gave_up, own=True)
        return bool(self._gave_up) and share > 0.5

    def _give_up(self) -> None:
        """Forget our result and those of the others: none of them is taken by most."""
        self._num_splits += 1
        self.emit(ProcessReported("finishing", "the partners have different results: agreeing again"))
        self._given_up |= {name for name in (*self._held.values(), self.own.result.name if self.own.result else b"") if name}
        self._refused.clear()  # they are judged anew
        self._held.clear()
        self._fetching.clear()
        self._gave_up.clear()
        self.own.result, self.lifecycle.has_agreed = None, False
        self._began_s, self._split_s, self._was_agreed = math.inf, None, False

    def _asks(self, entry: KnownPeer) -> bool:
        """Tell whether a partner asks us: it is there, even if we could not reach it."""
        return entry.has_met and loop_s() - self.own.asked_s.get(entry.peer_id, -math.inf) < AWAY_S

    def _is_away(self, entry: KnownPeer) -> bool:
        """Tell whether a partner has just gone without leaving the run: it may be back in a moment."""
        return entry.has_met and entry.failures > 0 and loop_s() - entry.seen_s < AWAY_S

    def _place(self, entry: KnownPeer) -> tuple[bytes, bytes]:
        return self.sources.groups.drawn(entry.peer_id, entry.record.credential if entry.record else None, self._num_splits)

    def _rank(self, of: KnownPeer | None = None) -> int:
        """Return how many peers at the end come before this one, or before us."""
        client = self.sources.client
        own = self.sources.groups.drawn(client.identity.peer_id, client.credential.current, self._num_splits)
        place = own if of is None else self._place(of)
        return min(RANKS, sum(one < place for one in (own, *map(self._place, self._voters()))))

    # ------------------------------------------------------------------ taking it

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
                transfer = Transfer(self.sources, ContentsKind.RESULT, pieces, self._order(pieces), result.check, num_by, result.verify)
                await transfer.run(self._holders(found[name]), SOURCES)
                if not pieces.is_whole:
                    return False
                is_agreed = self._is_agreed(name)
                adopted = await self._adopt(pieces.path, is_agreed)
                data = mapped(pieces.path)
        except OSError:
            return False
        finally:
            self.own.coming = None  # the pieces stay on the disk for the next try
        if adopted.reason:  # its pieces stay too: most may take it
            self._refused.add(name)
            self._serving_until_s = -math.inf
            self.emit(ProcessReported("finishing", f"kept our own weights: {adopted.reason}"))
            return False
        self._refused |= {self.own.result.name} if self.own.result else set()
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
        first = pieces.num_pieces * self._rank() // (1 + len(self._voters()))
        return sorted(pieces.missing(), key=lambda piece: (piece - first) % pieces.num_pieces)

    def _holders(self, have_all: list[KnownPeer]) -> list[KnownPeer]:
        """Return the peers to ask for pieces: those that have all; if we have met one of them, then peers at the end, then all others."""
        if not any(entry.has_met for entry in have_all):
            return have_all  # no one else may want it
        near = [entry for entry in self._speakers() if entry not in have_all]
        near.sort(key=lambda entry: not entry.finished)
        return [*sorted(have_all, key=lambda entry: not entry.has_met), *near]

    def _speakers(self) -> list[KnownPeer]:
        """Return, in random order, the peers worth asking: those that we have met, and a few strangers of each invite or network."""
        near = [entry for entry in self.sources.book.live(loop_s()) if not entry.failures or self._asks(entry)]
        cost, chosen = Counter(self._useless), list[KnownPeer]()
        for entry in sorted(self.sources.rng.sample(near, len(near)), key=lambda entry: not entry.has_met):
            marks = self.sources.groups.accountable(entry)
            if entry.has_met or all(cost[mark] < TRIES for mark in marks):
                chosen.append(entry)
                cost.update(() if entry.has_met else marks)
        return chosen

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

    async def _adopt(self, path: Path, is_agreed: bool) -> messages.Adopted:
        """Have the trainer judge a whole result; or its successor, where the trainer dies: the sources may have left by then."""
        async with self.meetings.set_aside():
            while True:
                with contextlib.suppress(LinkLost):
                    request = messages.Adopt(str(path), 0, is_result=True, is_agreed=is_agreed, num_splits=self._num_splits)
                    adopted = await self.link.request(request)
                    assert isinstance(adopted, messages.Adopted)
                    self.lifecycle.has_agreed |= adopted.accepted
                    return adopted
                await asyncio.sleep(PAUSE_S)

    def _set_result(self, result: RunResult, sources: tuple[str, ...], seconds: float) -> None:
        files.remove(self.file)
        self.own.result = result
        self.emit(ResultTaken(result.name.hex(), sources, self.terms.state_bytes, seconds))

    async def _linger(self) -> bool:
        """Stay until all within reach have our result, or take the one that is agreed. False: there is none."""
        began_s = self._changed_s = loop_s()
        while loop_s() < self._until(began_s) or self._is_needed(began_s):
            result = self.own.result
            assert result is not None
            if found := await self.find():
                await self.take(found)
            elif self._is_split():
                self._give_up()
                return False
            elif self._split_s is None and await self._all_have(result.name, self._until(began_s)):
                return True
            await asyncio.sleep(PAUSE_S)
        return True

    def _until(self, began_s: float) -> float:
        """Return until when to stay: longer while partners still change what they have."""
        split_s = -math.inf if self._split_s is None else self._split_s + 2.0 * self._patience_s
        return min(max(self._changed_s + LINGER_S, split_s), began_s + MOST_LINGER_S)

    def _is_needed(self, since_s: float) -> bool:
        """Return whether a peer still fetches from us within its time; a peer that we have met has more time than a stranger."""
        known = {entry.peer_id for entry in self.sources.book.live(loop_s()) if entry.has_met}
        fetching = self.own.fetching
        rate = SLOWEST_BYTES_PER_S if fetching & known else STRANGERS_BYTES_PER_S
        return bool(fetching) and loop_s() < since_s + STRANGERS_S + self.terms.state_bytes / rate

    async def _all_have(self, name: bytes, until_s: float) -> bool:
        """Return whether each peer within reach has this result, or all its pieces, or has left; False when asking takes too long."""
        near, theirs = self._speakers(), dict[PeerId, bytes]()
        if any(map(self._is_away, self.sources.book.live(loop_s()))):
            return False

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

    async def _name_at(self, source: Source) -> bytes:
        """Return as `_result_name`; note whether a source that has no result fetches ours."""
        name, own = await self._result_name(source), self.own.result
        self._fetching.discard(source.peer_id)
        if own is not None and not name and (await source.header(ContentsKind.RESULT_PIECES)).name == own.name:
            self._fetching.add(source.peer_id)
        return name

    async def _result_name(self, source: Source) -> bytes:
        """Return the name of a source's result, empty where it has none; note whether it is at the end. Raises as `Source.take`."""
        header = await source.header(ContentsKind.RESULT)
        if self.lifecycle.finished and header.global_step >= self.lifecycle.global_step:
            self.sources.book.note_call(source.peer_id, loop_s(), header.global_step, finished=True)
        return header.name
