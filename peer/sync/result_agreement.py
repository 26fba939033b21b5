"""Result agreement: all peers at the end of a run take one peer's averaged weights, the same bit for bit.

1. The finished peers have an order (`SybilGroups.writing_place`). The first one writes its own weights down at once; the next one does so
   some seconds later if no result is found, and so on. A result counts from when it is its holder's turn.
2. All others fetch the result piece by piece, from any peer that has some of it. The trainer judges it: by its distance from our weights
   after the last averaging, and by its loss on our own text.
3. A result that two thirds of the partners and we vote for is agreed (peer/sync/result_votes.py): whoever has another one, or has refused
   it, takes it all the same. A peer with all pieces of it reports that it has seen it agreed, and notes it on the disk, so that no restart
   takes its vote back. Once two thirds have reported that, the result is settled: it is never given up.
4. If ours cannot be agreed, or settled, for PATIENCE_S, as others neither vote for it nor fetch it, we give it up, and so do all who see
   that most have. The order is drawn anew, and trainers allow twice as much loss above their own. The first time all average again.
5. A peer leaves when all partners within reach have seen its result agreed, and know that it has: nobody is left that could choose another.
   Once it is settled, it waits for the rest for LINGER_S after the last change, and longer while one fetches; before, for MOST_OPEN_S.

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
from gossamer.peer.machine.home import write_whole
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.client import Source
from gossamer.peer.sync.pieces import HASH_BYTES, Pieces, RunResult, complete_result_name, fetch_hashes
from gossamer.peer.sync.result_votes import AWAY_S, ResultVotes, Vote
from gossamer.peer.sync.sources import OwnMeetings, Sources
from gossamer.peer.sync.state_source import StateSource
from gossamer.peer.sync.transfer import Transfer
from gossamer.protocol.errors import GossamerError, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.messages.messages import ContentsKind, RunPhase
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.tasks import cancel, loop_s

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
LINGER_S = 10.0  # for others to fetch: longer than PATIENCE_S, so that nobody leaves with a result that is about to be given up
MOST_LINGER_S = 60.0  # for the last third to agree
MOST_OPEN_S = 180.0  # while no result is settled, and nobody judges ours: MOST_SPLITS times PATIENCE_S, and more
MOST_JUDGING_S = 600.0  # for one partner to judge our results, beside the time in which a slow line brings them
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
    _votes: ResultVotes = field(init=False)
    _refused: set[bytes] = field(default_factory=set)  # results that our trainer, or too many partners, have refused
    _whole: bytes = b""  # name of the result of which `file` holds all pieces
    _failed: dict[bytes, tuple[int, float]] = field(default_factory=dict)  # tries that brought nothing, and the first one's time
    _useless: Counter[object] = field(default_factory=Counter)  # answers, by the peer, invite or network that is accountable for them
    _names: itertools.count[int] = field(default_factory=itertools.count)
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _serving_until_s: float = -math.inf  # until when to wait for a peer with a result that may be too busy serving it to answer; loop time
    _began_s: float = math.inf  # when the order of turns began: at the end of our averaging; loop time
    _split_s: float | None = None  # since when ours cannot be agreed
    _open_s: float = -math.inf  # until when a partner last fetched or judged ours
    _settled_s: float | None = None  # since when two thirds have seen ours agreed
    _is_final: bool = False  # two thirds had once; or others may have relied on it before we were restarted
    _num_splits: int = 0

    def __post_init__(self) -> None:
        fetch_s = MOST_JUDGING_S + self.terms.state_bytes / SLOWEST_BYTES_PER_S
        self._votes = ResultVotes(self.sources.groups, self.own, self._is_at_hand, fetch_s)

    async def resume(self) -> None:
        """Take the result that this peer had seen agreed before its restart, if it had."""
        async with self._taking:
            if self.own.result is None:
                await self._resume()

    async def _resume(self) -> None:
        name = self._noted.read_bytes() if self._noted.exists() else b""
        if len(name) != HASH_BYTES:
            return
        with contextlib.suppress(OSError):
            with contextlib.closing(Pieces.open(self.file, name, self.terms.state_bytes)) as pieces:
                self._whole = name if pieces.is_whole else b""
            if self._whole and (await self._adopt(self.file, is_agreed=True)).accepted:
                self._set_result(await asyncio.to_thread(RunResult.of, mapped(self.file)), (), 0.0)
        if self.own.result is None:  # it wrote this result itself, and its trainer has saved it
            await self._write_down()
        if self.own.result is not None and self.own.result.name == name:
            self.own.agreed, self._is_final = name, True
        else:
            self.own.result, self.lifecycle.has_agreed = None, False
            self._noted.unlink(missing_ok=True)

    async def run(self) -> bool:
        """Agree on a result, and stay until all within reach have it or the time is up. False: they must average again."""
        while not await self._agree():
            if self._num_splits == 1:
                return False
        files.remove(self.file)
        self._noted.unlink(missing_ok=True)
        return True

    @property
    def _noted(self) -> Path:
        """Return the file with the name of the result that we have seen agreed."""
        return self.file.with_name(f"{self.file.name}-agreed")

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
                elif self._votes.most_withdraw() and self._num_splits < MOST_SPLITS:
                    self._give_up()
                    return False
                await asyncio.sleep(PAUSE_S)
        return await self._linger()

    async def find(self) -> Found:
        """Ask peers which result they have, and return what we may take. This also shows who is at the end."""
        if self.lifecycle.phase is RunPhase.TRAIN:
            self._began_s = min(self._began_s, loop_s())
        known = self._speakers()
        await self._ask_votes(self.sources.rng.sample(known, min(ASKED, len(known))))
        found = Found()
        for entry in self.sources.book.live(loop_s()):
            if held := self._votes.of(entry).name:
                found.setdefault(held, []).append(entry)
        if self._whole and self._whole not in found and (left := self._votes.left_with(self._whole)):
            found[self._whole] = left
        found = {name: entries for name, entries in found.items() if self._may_take(name, entries)}
        if found:
            self._serving_until_s = loop_s() + SERVING_S
        return found

    async def _ask_votes(self, asked: list[KnownPeer]) -> None:
        """Ask peers for their votes, and see whether one of the results is agreed by them."""
        for entry, vote in await self.sources.ask_all(asked, self._vote_of, ANSWER_S):
            if isinstance(vote, GossamerError):
                if not entry.has_met:
                    self._useless.update(self.sources.groups.accountable(entry))
                elif not isinstance(vote, Refused) and not self._asks(entry):
                    self.sources.book.note_no_answer(entry.peer_id, loop_s())
                continue
            self.sources.book.note_answer(entry.peer_id, loop_s())
            self._votes.note(entry, vote)
        if self.own.result is not None and self._votes.is_agreed(self.own.result.name):
            self._note_agreed(self.own.result.name)
        self._is_final |= self._votes.is_settled(self.own.agreed)

    async def take_agreed(self) -> None:
        """Wait until there is a result that is agreed, and take it."""
        while self.own.result is None:
            async with self._taking:
                found = await self.find() if self.own.result is None else {}
            if any(map(self._votes.is_agreed, found)):
                await self.take(found)
            await asyncio.sleep(PAUSE_S)

    async def take(self, found: Found) -> None:
        """Fetch an agreed result, else that of the first peer in the order, and have the trainer take it."""
        name = min(found, key=lambda name: (not self._votes.is_agreed(name), min(map(self._place, found[name])), name))
        is_taken, is_strangers = False, not any(entry.has_met for entry in found[name])
        async with self._taking:
            if not self._may_take(name, found[name]):
                return
            is_taken = await self._take(name, found, self._stranger_transfer_s if is_strangers else self._met_transfer_s)
        if not is_taken:
            self._note_failure(name)
            for entry in found[name]:
                self._useless.update(self.sources.groups.accountable(entry))

    def _note_failure(self, name: bytes) -> None:
        """Refuse a result that is announced and, time after time, not given: it would keep the turn of all others for ever."""
        tries, first_s = self._failed.get(name, (0, loop_s()))
        self._failed[name] = tries + 1, first_s
        if tries + 1 >= TRIES and loop_s() - first_s >= SERVING_S:
            self._refused.add(name)

    # ------------------------------------------------------------------ which one

    @property
    def _turn_s(self) -> float:
        """How long a turn lasts: on slow lines the averaging of the first in the order ends later than that of others."""
        return RANK_S + TURN_MEETINGS * self.meetings.typical_s

    @property
    def _patience_s(self) -> float:
        return PATIENCE_S + TURN_MEETINGS * self.meetings.typical_s

    def _may_take(self, name: bytes, entries: list[KnownPeer]) -> bool:
        """Return whether a result with these holders may become ours now."""
        own, is_agreed = self.own.result, self._votes.is_agreed(name)
        if own is not None and (name == own.name or not is_agreed):
            return False
        if own is not None or is_agreed:
            return True
        if not self.sources.groups.partners(loop_s()):
            return name not in self._refused
        turn = min((self._rank(entry) for entry in entries if entry.has_met), default=math.inf)
        return name not in self._refused and loop_s() >= self._began_s + self._turn_s * turn

    def _is_at_hand(self, name: bytes) -> bool:
        """Return whether a result is here or at a peer within reach."""
        return name in (self._whole, self.own.result.name if self.own.result else b"") or bool(self._votes.holders(name))

    def _note_agreed(self, name: bytes) -> None:
        """Report from now on that this result, of which all pieces are here, is agreed; a restart does not forget it."""
        if self.own.agreed != name:
            self.own.agreed, self.own.agreed_s, self._is_final = name, loop_s(), False
            with contextlib.suppress(OSError):  # a full disk: then only a restart forgets it
                write_whole(self._noted, name)

    def _is_split(self) -> bool:
        """Return whether so few have taken ours for so long that it will not be agreed, or not be settled."""
        own = self.own.result
        if own is None or self._is_final or self._num_splits >= MOST_SPLITS or self._votes.is_possible(own.name):
            self._split_s = None
            return False
        self._split_s = self._split_s or loop_s()
        return self._votes.most_withdraw() or loop_s() - self._split_s >= self._patience_s

    def _give_up(self) -> None:
        """Forget our result and those of the others: none of them is taken by most."""
        self._num_splits += 1
        self.emit(ProcessReported("finishing", "the partners have different results: agreeing again"))
        self._votes.withdraw()
        self._refused.clear()  # they are judged anew
        self._failed.clear()
        self.own.result, self.own.agreed, self.lifecycle.has_agreed = None, b"", False
        self._noted.unlink(missing_ok=True)
        self._began_s, self._split_s = math.inf, None

    def _asks(self, entry: KnownPeer) -> bool:
        """Tell whether a partner asks us: it is there, even if we could not reach it."""
        return entry.has_met and loop_s() - self.own.asked_s.get(entry.peer_id, -math.inf) < AWAY_S

    def _place(self, entry: KnownPeer) -> tuple[bool, bytes, bytes]:
        return self.sources.groups.writing_place(entry.peer_id, entry.credential, self._num_splits)

    def _rank(self, of: KnownPeer | None = None) -> int:
        """Return how many peers at the end come before this one, or before us."""
        client = self.sources.client
        own = self.sources.groups.writing_place(client.identity.peer_id, client.credential.current, self._num_splits)
        place = own if of is None else self._place(of)
        return min(RANKS, sum(one < place for one in (own, *map(self._place, self._votes.at_end()))))

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

    async def _take(self, name: bytes, found: Found, within_s: float) -> bool:
        """Fetch a result, within this time, and have the trainer judge it; return whether it took it."""
        began_s, num_by = loop_s(), Counter[PeerId]()
        try:
            with contextlib.closing(Pieces.open(self.file, name, self.terms.state_bytes)) as pieces:
                self._whole = b""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await self._fetch(name, found, pieces, num_by)
                if not pieces.is_whole or self.own.coming is None:
                    return False
                result = RunResult(self.own.coming.hashes, mapped(pieces.path))
                self._whole = name
                reason = await self._judge(name, pieces.path)
        except OSError:
            return False
        finally:
            self.own.coming = None  # the pieces stay on the disk for the next try
        if reason:  # its pieces stay too: most may take it
            self._refused.add(name)
            self._serving_until_s = -math.inf
            self.emit(ProcessReported("finishing", f"kept our own weights: {reason}"))
            return False
        self._refused |= {self.own.result.name} if self.own.result else set()
        self._set_result(result, tuple(map(str, num_by)), loop_s() - began_s)
        return True

    async def _fetch(self, name: bytes, found: Found, pieces: Pieces, num_by: Counter[PeerId]) -> None:
        """Fetch what is missing of a result; `own.coming` is it from then on."""
        if pieces.is_whole:
            whole = await asyncio.to_thread(RunResult.of, mapped(pieces.path))
            if whole.name == name:
                self.own.coming = whole
                return
        if (result := await self._fetch_hashes(name, found[name], pieces)) is not None:
            pieces.forget(await asyncio.to_thread(result.spoiled))  # before any piece is given on
            self.own.coming = result
            transfer = Transfer(self.sources, ContentsKind.RESULT, pieces, self._order(pieces), result.check, num_by, result.verify)
            await transfer.run(self._holders(found[name]), SOURCES)

    async def _judge(self, name: bytes, path: Path) -> str:
        """Have the trainer judge a whole result; meanwhile see whether it is agreed: then it is taken. Return why it is not."""
        if self._votes.is_agreed(name):
            self._note_agreed(name)
        judging = asyncio.create_task(self._adopt(path, is_agreed=self.own.agreed == name))
        try:
            while not (await asyncio.wait([judging], timeout=PAUSE_S))[0]:
                await self.find()
                if self._votes.is_agreed(name):
                    self._note_agreed(name)
            adopted = judging.result()
        finally:
            await cancel(judging)
        if adopted.reason and adopted.is_sound and self.own.agreed == name:
            adopted = await self._adopt(path, is_agreed=True)
        if adopted.reason and self.own.agreed == name:
            self.own.agreed = b""
            self._noted.unlink(missing_ok=True)
        return adopted.reason

    async def _fetch_hashes(self, name: bytes, peers: list[KnownPeer], pieces: Pieces) -> RunResult | None:
        """Ask the peers that have a result for its hashes, one after the other; None where none of them answers."""
        for peer in peers:
            with contextlib.suppress(GossamerError):
                async with self.sources.open(peer) as source:
                    return RunResult(await fetch_hashes(source, name, self.terms.state_bytes), pieces)
        return None

    def _order(self, pieces: Pieces) -> list[int]:
        """Return the missing pieces; each peer at the end begins elsewhere, so that soon each has what the others want."""
        first = pieces.num_pieces * self._rank() // (1 + len(self._votes.at_end()))
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
        self.own.result = result
        self.emit(ResultTaken(result.name.hex(), sources, self.terms.state_bytes, seconds))

    async def _linger(self) -> bool:
        """Stay until all within reach have seen our result agreed, or take the one that is. False: there is none."""
        began_s = self._votes.changed_s = loop_s()
        while loop_s() < self._until(began_s) or self._is_needed(began_s):
            result = self.own.result
            assert result is not None
            if found := await self.find():
                await self.take(found)
            elif self._is_split():
                self._give_up()
                return False
            elif self.own.agreed == result.name and self._votes.is_known() and await self._all_have(result.name, self._until(began_s)):
                return True
            await asyncio.sleep(PAUSE_S)
        return True

    def _until(self, began_s: float) -> float:
        """Return until when to stay: longer while it is not settled which result is agreed, and while partners still change theirs."""
        if not self._votes.is_settled(self.own.agreed):
            self._settled_s = None
            self._open_s = loop_s() if self._votes.is_judged() else max(began_s, self._open_s)
            return self._open_s + MOST_OPEN_S
        self._settled_s, linger_s = self._settled_s or loop_s(), LINGER_S - PATIENCE_S + self._patience_s
        return min(max(self._votes.changed_s, self._settled_s) + linger_s, self._settled_s + MOST_LINGER_S)

    def _is_needed(self, since_s: float) -> bool:
        """Return whether a peer still fetches from us within its time; a peer that we have met has more time than a stranger."""
        known = {entry.peer_id for entry in self.sources.book.live(loop_s()) if entry.has_met}
        fetching = self.own.fetching
        rate = SLOWEST_BYTES_PER_S if fetching & known else STRANGERS_BYTES_PER_S
        return bool(fetching) and loop_s() < since_s + STRANGERS_S + self.terms.state_bytes / rate

    async def _all_have(self, name: bytes, until_s: float) -> bool:
        """Return whether each partner has seen this result agreed, or is gone for long, and each stranger within reach has all its pieces.

        False when asking takes too long.
        """

        def lacks_it(entry: KnownPeer) -> bool:
            return entry.has_met and self._votes.of(entry).agreed != name

        async def has_pieces(source: Source) -> bool:
            return await complete_result_name(source, self.terms.state_bytes) == name

        near, away = self._speakers(), list(filter(self._votes.is_away, self.sources.book.live(loop_s())))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                for asked in (near[start : start + ASKED] for start in range(0, len(near), ASKED)):
                    await self._ask_votes(asked)
                    strangers = [entry for entry in asked if not entry.has_met and self._votes.of(entry).name != name]
                    answers = await self.sources.ask_all(strangers, has_pieces, ANSWER_S)
                    if any(map(lacks_it, (*away, *asked))) or any(answer is False for _, answer in answers):
                        return False
                return True
        return False

    async def _vote_of(self, source: Source) -> Vote:
        """Return the vote of a source; note whether it is at the end. Raises as `Source.take`."""
        for kind in (ContentsKind.RESULT, ContentsKind.RESULT_AGREED):
            await source.ask(kind, 0, 0)
        header, _ = await source.take()
        if self.lifecycle.finished and header.global_step >= self.lifecycle.global_step:
            self.sources.book.note_call(source.peer_id, loop_s(), header.global_step, finished=True)
        agreed = (await source.take())[0].name
        own, is_fetching = self.own.result, False
        if own is not None and not header.name:
            is_fetching = (await source.header(ContentsKind.RESULT_PIECES)).name == own.name
        return Vote(header.name, agreed, is_fetching)
