"""A ward: a copy of the higher stage's slow weights on this peer's disk. If that stage loses all holders, one of this stage takes it over.

The first stage counts as the higher one of the last. The copy is fetched in the background with a small share of the line, from any holder
that is there, and is as old as that makes it. In doubt a peer does not move: what others claim moves nobody, only answers to our own
questions do.

Before the first step of a run there is nothing to copy: then one of several holders of a stage moves to an empty one, once in a run. A
stage is empty that nobody has claimed for fifteen minutes (FORGET_S) as far as this peer knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gossamer.peer.machine.events import Event, ProcessReported, StageMoved, Warned
from gossamer.peer.machine.held_stage import has_moved, left_stage
from gossamer.peer.machine.home import Home, finished_checkpoints, write_whole
from gossamer.peer.node.lasting import Lasting
from gossamer.peer.node.mates import ANSWER_S, ASKED, RANK_S, Mates
from gossamer.peer.node.rebalancing import Rebalancing
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.decision import NoUse
from gossamer.peer.sync.pieces import Pieces
from gossamer.peer.sync.sources import Sources
from gossamer.protocol.errors import BadMessage, GossamerError, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind
from gossamer.protocol.messages.terms import stage_name
from gossamer.protocol.tasks import loop_s, work_until

LOOK_S = 2.0  # between two looks at who holds the higher stage
MOST_AGAIN_S = 60.0  # at most, from one try to the next: a holder that many ask refuses some of them
SIGN_S = 20.0  # after the last sign of a holder of it, until we ask
ASK_S = 10.0  # between two looks for such a sign
LOST_S = 60.0  # in which a mate answers each time and no holder of it: a restarted one is back by then
FRESH_S = 600.0  # at least, from one copy to the next
LINE_SHARE = 0.02  # of the time in which the line carries a piece
MOST_PAUSE_S = 15.0  # between two pieces: a source waits for thirty seconds
PIECE_S = 20.0  # for a source to give a piece
NOT_FINITE = 0x7F80  # the exponent of a bf16 value that is not finite


@dataclass(slots=True)
class Ward:
    """Keep a copy of the higher stage, and move there when it is lost. Belongs to one event loop.

    `sources` asks as a holder of the higher stage. `fits` are the stages, from 0, that this peer's devices can hold.
    """

    home: Home
    membership: Membership
    lifecycle: Lifecycle
    sources: Sources
    mates: Mates
    rebalancing: Rebalancing
    fits: tuple[int, ...]
    rng: random.Random
    emit: Callable[[Event], None]
    _answered_s: dict[PeerId, float] = field(default_factory=dict)  # when holders of the higher stage last answered us; loop time
    _sign_s: float | None = None  # of the last sign of a holder of the higher stage while we trained; loop time
    _back_s: float | None = None  # when this peer came back from the higher stage, whose holders gave no weights; loop time
    _silent: Lasting = field(default_factory=Lasting)  # mates answer each time, and no holder of the higher stage
    _empty_stage: int | None = None  # as `find_empty_stage` returned it last
    _narrow_stage: int | None = None  # to which we move
    _warned: str = ""  # why we do not move, as reported last

    @property
    def own_stage(self) -> int:
        """The stage that this peer holds, counted from one."""
        return self.mates.own_stage

    @property
    def stage(self) -> int:
        """The stage of which a copy is kept, counted from one."""
        return self.own_stage % self._num_stages + 1

    @property
    def _num_stages(self) -> int:
        assert self.membership.terms.stage is not None
        return self.membership.terms.stage.count

    @property
    def file(self) -> Path:
        """Where the copy lies."""
        return self._file_of(self.stage)

    @property
    def own_file(self) -> Path:
        """Where the weights of our own stage lie if this peer has moved to it."""
        return self._file_of(self.own_stage)

    def _file_of(self, stage: int) -> Path:
        return self.home.downloads / f"ward-{stage}"

    def _spare_of(self, stage: int) -> Path:
        """Where the copy of a stage lies while its holders give us newer weights."""
        return self.home.downloads / f"ward-{stage}.spare"

    async def run(self) -> None:
        """Copy and watch until cancelled. Returns once this peer has decided to move: its supervisor starts it anew."""
        with contextlib.suppress(FileNotFoundError):
            files.rename(self._spare_of(self.stage), self.file)
            self._back_s = loop_s()
        await work_until(self._copy_again_and_again(), self._until_it_is_our_turn())
        if self._narrow_stage:
            self._spare_copy(self._narrow_stage)
            self._move_to(self._narrow_stage, self.rebalancing.reason(self._narrow_stage))
            return
        if self._empty_stage:
            write_whole(self.home.filled, f"{self.membership.terms.run_id.hex()}\n".encode())
        self._move_to(self._empty_stage or self.stage, "nobody holds it")

    # ------------------------------------------------------------------ the copy

    async def _copy_again_and_again(self) -> None:
        again_s, next_s = LOOK_S, 0.0  # until the next try, twice as long after each one in a row that failed
        while True:
            await asyncio.sleep(LOOK_S)
            if self.lifecycle.may_meet and finished_checkpoints(self.home.checkpoints):
                for copy in self.home.downloads.glob("ward-*"):  # others are kept until a checkpoint holds what they were for
                    if copy.name.partition(".")[0] != self.file.name:
                        copy.unlink(missing_ok=True)
                self.home.left_stage.unlink(missing_ok=True)
            there = [entry for entry in self._claimed(self.stage) if not entry.failures]
            if there and loop_s() >= next_s and self.lifecycle.may_meet and self.stage - 1 in self.fits and self._is_old():
                try:
                    await self._copy(self.rng.choice(there))
                    again_s = LOOK_S
                except (GossamerError, OSError):  # the next try asks another holder
                    again_s = min(MOST_AGAIN_S, 2 * again_s)
                next_s = loop_s() + again_s

    def _is_old(self) -> bool:
        """Return whether the copy is old, or not there, or from the future by a clock that was set back."""
        try:
            return not 0 <= time.time() - self.file.stat().st_mtime < FRESH_S
        except FileNotFoundError:
            return True

    async def _copy(self, holder: KnownPeer) -> None:
        """Fetch what is missing, piece by piece. Raises GossamerError, and OSError for a full disk."""
        coming, num_bytes = self.file.with_name(f"{self.file.name}.coming"), self.membership.terms.next_state_bytes
        if shutil.disk_usage(self.home.path).free < 2 * num_bytes:
            return  # checkpoints go first
        async with self.sources.open(holder) as source:
            await source.header(ContentsKind.STATE, self._check)
            self._answered_s[holder.peer_id] = loop_s()
            with contextlib.closing(Pieces.open(coming, self.membership.terms.run_id, num_bytes)) as pieces:
                for piece in list(pieces.missing()):
                    began_s = loop_s()
                    await source.ask(ContentsKind.STATE, pieces.offset(piece), pieces.size(piece))
                    header, data = await source.take_run(self._check, PIECE_S)
                    _need_finite(holder, data)
                    pieces.put(range(piece, piece + 1), data, header.global_step)
                    self._answered_s[holder.peer_id] = loop_s()
                    await asyncio.sleep(min(MOST_PAUSE_S, (loop_s() - began_s) / LINE_SHARE))
        files.rename(coming, self.file)

    def _check(self, header: Contents) -> None:
        """Raise NoUse for a state of another size than the higher stage's, or of another time than ours."""
        terms = self.membership.terms
        if header.total_bytes != terms.next_state_bytes:
            raise NoUse(f"a state of {header.total_bytes} bytes; that of stage {self.stage} has {terms.next_state_bytes}")
        if abs(header.global_step - self.lifecycle.global_step) > terms.max_clock_gap_steps:
            raise NoUse(f"its global step is {header.global_step}, ours {self.lifecycle.global_step}")

    # ------------------------------------------------------------------ moving

    async def _until_it_is_our_turn(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            await self._look()
            is_lost = self._sign_s is not None and loop_s() - self._sign_s >= LOST_S and self._hears_others(self._sign_s)
            obstacle = self._obstacle() if is_lost else ""
            self._warn(obstacle)
            may_move = self._empty_stage or (is_lost and not obstacle)
            if may_move and self._silent.lasts_s >= LOST_S + self.mates.rank() * RANK_S and await self._leave_to_mates():
                return
            self._narrow_stage = await self.rebalancing.find_destination()
            if self._narrow_stage:
                return

    async def _look(self) -> None:
        """Ask the holders of the higher stage if there is no sign of any, then our mates: their answers show that our line is not down."""
        now_s, book = loop_s(), self.sources.book
        self._answered_s = {peer: at_s for peer, at_s in self._answered_s.items() if book.get(peer).stage == self.stage}
        signs = [entry.seen_s for entry in self._claimed(self.stage) if entry.has_worked] + list(self._answered_s.values())
        self._sign_s = max([*signs, *(at_s for at_s in (self._sign_s, self._back_s) if at_s is not None)], default=None)
        if (empty_stage := self.find_empty_stage()) != self._empty_stage:
            self._empty_stage, self._silent = empty_stage, Lasting()
        if self._empty_stage:
            await self._ask_mates()
        elif self._sign_s is None or not self.lifecycle.may_meet or self._has_ended():
            self._sign_s, self._silent = None, Lasting()
        elif now_s - self._sign_s < SIGN_S or await self._any_holder_answers():
            self._silent = Lasting()
        else:
            await self._ask_mates()

    def _hears_others(self, sign_s: float) -> bool:
        """Return whether a mate answers now, or others gave signs long after this one, of the higher stage: else our line may be down."""
        others = (entry.seen_s for entry in self.sources.book.seen_lately(loop_s()) if entry.stage != self.stage)
        return bool(self.mates.answered) or max(others, default=-math.inf) - sign_s >= LOST_S

    async def _ask_mates(self) -> None:
        await self.mates.ask(self._asked_mates())
        self._silent.look(bool(self.mates.answered))

    def find_empty_stage(self) -> int | None:
        """Return another stage that fits this peer and that nobody has claimed for fifteen minutes as far as it knows, counted from one.

        None where one record has a step above 0, and after one such move in this run: forged claims could otherwise move it for ever.
        """
        if not self.lifecycle.may_meet or self.lifecycle.global_step > 0 or self._has_filled():
            return None
        claims = [self._claimed(stage) for stage in range(1, self._num_stages + 1)]
        if any(entry.global_step > 0 for entries in claims for entry in entries):
            return None
        return next((stage + 1 for stage in self.fits if stage + 1 != self.own_stage and not claims[stage]), None)

    def _has_filled(self) -> bool:
        """Return whether this peer has moved to an empty stage in this run."""
        try:
            return self.home.filled.read_text().strip() == self.membership.terms.run_id.hex()
        except FileNotFoundError:
            return False
        except OSError:  # in doubt it stays
            return True

    def _has_ended(self) -> bool:
        """Return whether a holder of the higher stage that has carried hops with us, or answered us, came to the end, or may have."""
        book, membership = self.sources.book, self.membership
        if membership.total_steps - self.lifecycle.global_step <= membership.terms.max_clock_gap_steps:
            return True
        return any(entry.finished for entry in (*book.carriers(self.stage), *map(book.get, self._answered_s)))

    async def _any_holder_answers(self) -> bool:
        """Ask those that claim the higher stage, known ones first. A known one that refuses is there too; others may lack its weights."""

        def is_known(entry: KnownPeer) -> bool:
            return entry.has_worked or entry.peer_id in self._answered_s

        claimed = self._claimed(self.stage)
        asked = sorted(self.rng.sample(claimed, len(claimed)), key=is_known, reverse=True)[:ASKED]
        answers = await self.sources.ask_for_headers(asked, ANSWER_S)
        there = [peer for peer, answer in answers if isinstance(answer, Contents) or (isinstance(answer, Refused) and is_known(peer))]
        if there:
            self._sign_s = loop_s()
        self._answered_s |= {entry.peer_id: loop_s() for entry, answer in answers if isinstance(answer, Contents)}
        return bool(there)

    def _asked_mates(self) -> list[KnownPeer]:
        """Return the other holders of our stage that have met us, those to ask first: one that gives its weights stays if we move.

        Before the first step nobody has met anybody, and a stranger's answer does: our stage's weights are those of the seed. Strangers
        choose their ids, so those that answered the last time are asked again, then others at random: silent ones crowd out nobody.
        """
        others = self.mates.claims()
        if self._empty_stage:
            return sorted(self.rng.sample(others, len(others)), key=lambda entry: entry not in self.mates.answered)
        return sorted((entry for entry in others if entry.has_met), key=lambda entry: entry.peer_id)

    async def _leave_to_mates(self) -> bool:
        """Return whether we leave: a mate still gives our weights, and nobody has claimed the empty stage, or made a step, meanwhile."""

        def may_leave() -> bool:
            return bool(self.mates.answered) and (not self._empty_stage or self.find_empty_stage() == self._empty_stage)

        leaves = await self.mates.leave_to(self._asked_mates(), self._empty_stage or self.stage, may_leave)
        self._silent.look(leaves)
        return leaves

    def _obstacle(self) -> str:
        """Return why we may not move; empty if we may."""
        if not self.mates.answered:
            return f"no other holder of stage {self.own_stage} that this peer has met answers"
        if self.stage - 1 not in self.fits:
            return "it does not fit this peer's device"
        return "" if self.file.exists() else "this peer has no copy of it yet"

    def _warn(self, obstacle: str) -> None:
        if obstacle != self._warned:
            self._warned = obstacle
            self.emit(
                Warned("lost stage", f"stage {self.stage} is lost, and this peer does not take it over: {obstacle}" if obstacle else "")
            )

    def _claimed(self, stage: int) -> list[KnownPeer]:
        return self.sources.book.claimed(stage, loop_s())

    @property
    def may_move_back(self) -> bool:
        """Whether this peer has moved to its stage and has no checkpoint of it yet."""
        return has_moved(self.home)

    def move_back(self, reason: str) -> None:
        """Hold the stage again that this peer has left, from the next start on: its trainer has no weights of this one, for this reason."""
        files.remove(self.own_file)
        stage = (left_stage(self.home) if self.may_move_back else None) or (self.own_stage - 2) % self._num_stages + 1
        self._hold(stage, f"no weights of {stage_name(self.own_stage, self._num_stages)}: {reason}")
        self.home.left_stage.unlink(missing_ok=True)

    def _spare_copy(self, stage: int) -> None:
        """Set the copy of a stage aside, to which this peer moves: its holders give newer weights. Without room for both it goes."""
        copy = self._file_of(stage)
        if shutil.disk_usage(self.home.path).free < 2 * self.membership.terms.next_state_bytes:
            files.remove(copy)
        with contextlib.suppress(FileNotFoundError):
            files.rename(copy, self._spare_of(stage))

    def _move_to(self, stage: int, reason: str) -> None:
        write_whole(self.home.left_stage, f"{self.own_stage}\n".encode())
        self._hold(stage, reason)

    def _hold(self, stage: int, reason: str) -> None:
        """Hold a stage from the next start on. That is one write: its weights lie in its ward, or in checkpoints that were set aside."""
        files.remove(self.home.downloads / "state")  # of the stage that we leave
        write_whole(self.home.stage, f"{stage}\n".encode())
        self.lifecycle.hold(stage)
        self.emit(ProcessReported("joining", f"moves to {stage_name(stage, self._num_stages)}: {reason}"))
        self.emit(StageMoved(self.own_stage, stage, reason))


def _need_finite(holder: KnownPeer, data: bytes | memoryview) -> None:
    """Raise BadMessage unless all values of a piece, bf16, are finite."""
    if ((np.frombuffer(data, dtype="<u2") & NOT_FINITE) == NOT_FINITE).any():
        raise BadMessage(f"{holder.peer_id.short()} gives values that are not finite")
