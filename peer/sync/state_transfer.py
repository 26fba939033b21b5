"""Transfer a whole state: in pieces, from several sources at once, until the trainer has adopted it.

A mixture of near replicas is as good to begin with as one of them. Pieces stay on the disk until the state is adopted or refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.machine.events import Event, ProcessReported, ProgressMade, StateTransferred, StepsLost, Warned
from gossamer.peer.machine.units import bytes_text
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.client import as_final
from gossamer.peer.sync.decision import NoUse, Wanted
from gossamer.peer.sync.pieces import Pieces
from gossamer.peer.sync.sources import ASKED, CLOCK_S, OwnMeetings, Sources, compare, spread_over
from gossamer.peer.sync.transfer import Transfer
from gossamer.protocol.errors import BadMessage, BadSettings, GossamerError, Refused, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.tasks import loop_s

TIMEOUT_S = 60.0  # without any source that answers at all
PAUSE_S = 1.0  # between two rounds
WORSE_PAUSES_S = (5.0, 15.0, 45.0)  # between two while all sources give weights with a higher loss than ours; a run soon learns
WORSE_TOPIC = "first weights"  # of warnings
ROUNDS_TO_BELIEVE = 3  # in which every source that answers rejects us: a single one must not send us away
SOURCES = 4  # at once
REPORT_S = 0.5  # between two reports of progress
OLD_SHARE = 4  # of the allowed gap: a state whose oldest piece is a fourth of it behind is too old to meet about
LONG_S = 3600.0  # a transfer that takes longer is announced as slow


@dataclass(slots=True)
class StateTransfer:
    """Fetch a state, and have the trainer adopt it. `file` holds it meanwhile."""

    sources: Sources
    terms: RunTerms
    lifecycle: Lifecycle
    meetings: OwnMeetings
    link: NodeEnd
    file: Path
    emit: Callable[[Event], None]
    served_s: float = -math.inf  # when a source last gave a piece; loop time
    _num_sources: int = SOURCES
    _dissenting: frozenset[PeerId] = field(default_factory=frozenset)  # sources that give other weights than most
    _refused: set[PeerId] = field(default_factory=set)  # sources that alone gave weights that were refused
    _num_worse: int = 0  # states that were refused when all sources had given such a one
    _has_warned: bool = False  # that this peer began with its own weights
    _reported_s: float = -REPORT_S
    _progress: TransferProgress | None = None

    async def learn_global_steps(self) -> None:
        """Ask peers for their global steps until one that has begun answers.

        Raises SwarmUnreachable when none has answered for TIMEOUT_S, RunRefusesUs or WrongVersion when all that answer reject us.
        """
        await self._ask_until_done(self.ask_global_steps)

    async def take_over(self, wanted: Callable[[], Wanted]) -> None:
        """Fetch a state and have the trainer adopt it; ask everybody again and again until that is done. Raises as `learn_global_steps`."""
        await self._ask_until_done(lambda: self.ask_everybody(wanted))

    async def adopt_copy(self, copy: Path, wanted: Callable[[], Wanted]) -> GossamerError | None:
        """Have the trainer adopt a state that lies on the disk, however old it is; return why it did not. The copy stays if it did.

        Raises LinkLost, where the copy stays too.
        """
        try:
            with contextlib.closing(Pieces.open(copy, self.terms.run_id, self.terms.state_bytes, kept_s=math.inf)) as pieces:
                if not pieces.is_whole:
                    return NoUse("the copy is not whole")
                self._progress = TransferProgress(loop_s(), pieces.done_bytes)
                return await self._adopt(pieces, wanted, is_kept=True)
        except OSError as error:
            return NoUse(f"the copy cannot be read: {error.strerror}")

    async def ask_everybody(self, wanted: Callable[[], Wanted]) -> list[GossamerError] | None:
        """Fetch what all live peers can give; return None once it is adopted, else their errors.

        Raises BadSettings where the disk has no room and the trainer has no weights yet.
        """
        sources = await self._choose_sources()
        if not sources:
            return []
        try:
            with contextlib.closing(self._open()) as pieces:
                errors = await self._fetch(pieces, sources, wanted)
                if pieces.is_whole:
                    refusal = await self._adopt(pieces, wanted)
                    if refusal is None:
                        return None
                    errors.append(refusal)
        except LinkLost:
            errors = [NoUse("our own trainer is being restarted")]
        except OSError as full:
            errors = [NoUse(f"no room for the weights here: {full.strerror}")]
        except BadSettings as full:
            if not self.lifecycle.has_begun:
                raise  # the operator must act; a trainer that trains goes on with its own weights
            errors = [full]
        return self._report_errors("no weights yet", errors)

    async def ask_global_steps(self) -> list[GossamerError] | None:
        """Ask some live peers for their global steps. Return None when one that has begun answered, else the errors of those that did."""
        answers = await self.sources.ask_for_headers(self._sources_in_order()[:ASKED], CLOCK_S)
        for peer, answer in answers:
            if isinstance(answer, Contents):
                self.sources.book.note_global_step(peer.peer_id, answer.global_step)
        errors = [answer for _, answer in answers if isinstance(answer, GossamerError)]
        if len(errors) < len(answers):
            return None
        return self._report_errors("waiting until a peer begins", [error for error in errors if not isinstance(error, TransportError)])

    async def _ask_until_done(self, ask_all: Callable[[], Awaitable[list[GossamerError] | None]]) -> None:
        answered_s, num_unwanted = loop_s(), 0
        while loop_s() - answered_s < TIMEOUT_S:
            began_s = loop_s()
            answers = await ask_all()
            if answers is None:
                return
            final = _final_error_of_all(answers)
            num_unwanted = num_unwanted + 1 if final else 0
            if final is not None and num_unwanted >= ROUNDS_TO_BELIEVE:
                raise final
            if answers:
                answered_s = loop_s()
            await asyncio.sleep(max(0.0, self._pause_s() - (loop_s() - began_s)))
        raise self.sources.silence(TIMEOUT_S)

    def _pause_s(self) -> float:
        return WORSE_PAUSES_S[min(self._num_worse, len(WORSE_PAUSES_S)) - 1] if self._num_worse else PAUSE_S

    def _report_errors(self, what: str, errors: list[GossamerError]) -> list[GossamerError]:
        """Report errors to the operator, and return those of peers that answered."""
        for error in errors:
            self.emit(ProcessReported("joining", f"{what}: {error}"))
        return [error for error in errors if not isinstance(error, TransportError)]

    def _sources_in_order(self) -> list[KnownPeer]:
        """Return the live peers in random order, group by group; those whose weights were refused come last."""
        return sorted(spread_over(self.sources.live_groups()), key=lambda peer: peer.peer_id in self._refused)

    async def _choose_sources(self) -> list[KnownPeer]:
        """Return the peers to fetch from. A peer without weights of its own compares sources first; others compare with their own."""
        if self.lifecycle.has_begun or self._num_sources == 1 or self._progress is not None:
            order = self._sources_in_order()
            return [peer for peer in order if peer.peer_id not in self._dissenting] or order
        found = await compare(self.sources, self.terms.state_bytes, SOURCES)
        if found is None:
            return self._sources_in_order()
        self._dissenting, self._num_sources = found.dissenting, found.num_at_once
        self.emit(ProcessReported("joining", found.sentence))
        return found.sources

    def _open(self) -> Pieces:
        """Go on with what is on the disk, or begin. Raises OSError, and BadSettings when there is not enough room."""
        num_bytes = self.terms.state_bytes
        pieces = Pieces.open(self.file, self.terms.run_id, num_bytes)
        left, free = num_bytes - pieces.done_bytes, shutil.disk_usage(self.file.parent).free
        if left > free:
            pieces.close()
            files.remove(self.file)
            raise BadSettings(
                f"joining takes {bytes_text(num_bytes)} in {self.file.parent}, {bytes_text(free)} are free",
                hint="make room, or choose another folder with --home",
            )
        return pieces

    async def _fetch(self, pieces: Pieces, sources: list[KnownPeer], wanted: Callable[[], Wanted]) -> list[GossamerError]:
        progress = self._progress = self._progress or TransferProgress(loop_s(), pieces.done_bytes)

        def check(source: PeerId, header: Contents) -> None:
            self.sources.book.note_global_step(source, header.global_step)  # records are some seconds old
            wanted().check(header)  # as of now: global steps go on during a long transfer

        def note_piece() -> None:
            self.served_s = loop_s()
            self._report(progress, pieces)

        self._report(progress, pieces)
        missing = pieces.missing()
        transfer = Transfer(self.sources, ContentsKind.STATE, pieces, missing, check, progress.num_by, on_pieces=note_piece)
        return await transfer.run(sources, self._num_sources)

    async def _adopt(self, pieces: Pieces, wanted: Callable[[], Wanted], *, is_kept: bool = False) -> GossamerError | None:
        """Have the trainer adopt the state; return why it did not. Keep it only if it is adopted and `is_kept`. Raises LinkLost."""
        await self.ask_global_steps()
        target = wanted()  # once: the bound on the global step holds for where the others are now, not after the meetings
        oldest, now = min(pieces.global_steps.values()), target.typical_steps
        is_old = now - oldest > self.terms.max_clock_gap_steps // OLD_SHARE
        global_step = now if is_old else min(oldest, now or oldest)  # an old state is synced before any meeting; no source sets our step
        async with self.meetings.set_aside():
            may_begin = self._num_worse >= len(WORSE_PAUSES_S)
            request = messages.Adopt(str(pieces.path), global_step, takes_clock=target.takes_clock, may_begin=may_begin)
            adopted = await self.link.request(request)
        progress, self._progress = self._progress, None
        assert isinstance(adopted, messages.Adopted) and progress is not None
        if not (adopted.accepted and is_kept):
            files.remove(pieces.path)
        if not adopted.accepted:
            return self._blame(progress, adopted)
        self._num_sources, self._num_worse = SOURCES, 0
        self.lifecycle.stale = set(range(len(self.terms.fragments))) if is_old and not adopted.reason else set()
        if adopted.reason:
            self.emit(ProcessReported("joining", f"kept our own weights: {adopted.reason}"))
            if may_begin:
                self._has_warned = True
                self.emit(Warned(WORSE_TOPIC, f"this peer began with its own weights, not with the run's: {adopted.reason}"))
            return None
        if self._has_warned:
            self._has_warned = False
            self.emit(Warned(WORSE_TOPIC, ""))
        if is_kept and now > oldest:
            self.emit(StepsLost(oldest, now))
        sources = tuple(str(source) for source, _ in progress.num_by.most_common())
        fetched_bytes = pieces.num_bytes - progress.began_bytes
        self.emit(StateTransferred(sources, global_step, pieces.num_bytes, fetched_bytes, loop_s() - progress.began_s))
        return None

    def _blame(self, progress: TransferProgress, adopted: messages.Adopted) -> GossamerError:
        """Take one source at a time from here on: a bad piece names its source only where all pieces are from it, none from before."""
        self._num_sources = 1
        if len(progress.num_by) == 1 and not progress.began_bytes:
            (source,) = progress.num_by
            self._refused.add(source)
            if not adopted.is_sound:
                self.sources.book.ban(source, loop_s(), adopted.reason)
                return BadMessage(adopted.reason)
        if not all(source.peer_id in self._refused for source in self._sources_in_order()):
            return NoUse(adopted.reason)
        self._num_worse += 1
        return NoUse(f"{adopted.reason}; asks again in {self._pause_s():.0f} s")

    def _report(self, progress: TransferProgress, pieces: Pieces) -> None:
        if loop_s() - self._reported_s >= REPORT_S or pieces.is_whole:
            self._reported_s = loop_s()
            self.emit(ProcessReported("joining", progress.describe(pieces.done_bytes, pieces.num_bytes, loop_s())))
            self.emit(ProgressMade("downloading weights", pieces.done_bytes / max(1, pieces.num_bytes)))


@dataclass(slots=True)
class TransferProgress:
    """How far a transfer is, over all rounds."""

    began_s: float  # loop time
    began_bytes: int  # what was there then
    num_by: Counter[PeerId] = field(default_factory=Counter)  # pieces, by source

    def describe(self, done_bytes: int, total_bytes: int, now_s: float) -> str:
        """Return a sentence: per cent, rate, time left, and a warning where it takes long; or what follows once all is here."""
        if done_bytes >= total_bytes:
            return f"downloaded {bytes_text(total_bytes)} of weights from {self._sources()}; the trainer compares them with its own"
        rate = (done_bytes - self.began_bytes) / max(1e-9, now_s - self.began_s)
        words = f"downloading weights: {100 * done_bytes // max(1, total_bytes)} % of {bytes_text(total_bytes)}"
        if rate <= 0.0:
            return words
        left_s = (total_bytes - done_bytes) / rate
        words += f" from {self._sources()}, {bytes_text(rate)}/s, {max(1.0, left_s):.0f} s left"
        return words + (f"; this line is slow for a model of this size ({left_s / 3600:.1f} h)" if left_s > LONG_S else "")

    def _sources(self) -> str:
        return f"{len(self.num_by)} {'peer' if len(self.num_by) == 1 else 'peers'}"


def _final_error_of_all(answers: list[GossamerError]) -> GossamerError | None:
    """Return the final error behind all answers, None unless all of them are final."""
    finals = [as_final(answer) if isinstance(answer, Refused) else None for answer in answers]
    return finals[0] if finals and None not in finals else None
