"""A ward: a copy of the next stage's slow weights on this peer's disk. If that stage loses all holders, one of this stage takes it over.

The last stage keeps the first. The copy is fetched in the background with a small share of the line, from any holder that is there, and is
as old as that makes it. A holder moves only if another one of its own stage stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.peer.machine.events import Event, StageMoved, Warned
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.swarm.address_book import KnownPeer, loop_s
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.sync import pieces as files
from gossamer.peer.sync.pieces import Pieces
from gossamer.peer.sync.sources import Sources
from gossamer.protocol.errors import BadMessage, GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind
from gossamer.protocol.tasks import work_until

LOOK_S = 2.0  # between two looks at who holds the next stage
LOST_S = 60.0  # without a sign of any holder of it: a restarted one is back by then
RANK_S = 25.0  # before the next holder in the order moves: a record is seen by then
FRESH_S = 600.0  # at least, from one copy to the next
LINE_SHARE = 0.02  # of the time in which the line carries a piece
MOST_PAUSE_S = 15.0  # between two pieces: a source waits for thirty seconds
PIECE_S = 20.0  # for a source to give a piece
MOST_SIZES = 16  # the next stage's state over ours: stages are balanced


@dataclass(slots=True)
class Ward:
    """Keep a copy of the next stage, and move there when it is lost. Belongs to one event loop.

    `sources` asks as a holder of the next stage. `fits` are the stages, from 0, that this peer's devices can hold.
    """

    home: Home
    membership: Membership
    lifecycle: Lifecycle
    sources: Sources
    fits: tuple[int, ...]
    rng: random.Random
    emit: Callable[[Event], None]
    _began_s: float = field(default_factory=loop_s)
    _warned: str = ""  # why we do not move, as reported last

    @property
    def own_stage(self) -> int:
        """The stage that this peer holds, counted from one."""
        return self.membership.terms.own_stage

    @property
    def stage(self) -> int:
        """The stage of which a copy is kept, counted from one."""
        terms = self.membership.terms
        assert terms.stage is not None
        return terms.own_stage % terms.stage.count + 1

    @property
    def file(self) -> Path:
        """Where the copy lies."""
        return self.home.downloads / f"ward-{self.stage}"

    async def run(self) -> None:
        """Copy and watch until cancelled. Returns once this peer has decided to move: its supervisor starts it anew."""
        await work_until(self._copy_again_and_again(), self._until_it_is_our_turn())
        self._move()

    # ------------------------------------------------------------------ the copy

    async def _copy_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            there = [entry for entry in self._seen(self.stage) if not entry.paused and not entry.failures]
            if there and self.lifecycle.may_meet and self.stage - 1 in self.fits and self._age_s() >= FRESH_S:
                with contextlib.suppress(GossamerError, OSError):  # the next look tries another holder
                    await self._copy(self.rng.choice(there))

    def _age_s(self) -> float:
        """Return the seconds since the copy was complete."""
        try:
            return time.time() - self.file.stat().st_mtime
        except FileNotFoundError:
            return FRESH_S

    async def _copy(self, holder: KnownPeer) -> None:
        """Fetch what is missing, piece by piece. Raises GossamerError, and OSError for a full disk."""
        coming = self.file.with_name(f"{self.file.name}.coming")
        async with self.sources.open(holder) as source:
            header = await source.header(ContentsKind.STATE, self._check)
            if shutil.disk_usage(self.home.path).free < 2 * header.total_bytes:
                return  # checkpoints go first
            with contextlib.closing(Pieces.open(coming, self.membership.terms.run_id, header.total_bytes)) as pieces:
                for piece in list(pieces.missing()):
                    began_s = loop_s()
                    await source.ask(ContentsKind.STATE, pieces.offset(piece), pieces.size(piece))
                    header, data = await source.take_run(self._check, PIECE_S)
                    pieces.put(range(piece, piece + 1), data, header.global_step)
                    await asyncio.sleep(min(MOST_PAUSE_S, (loop_s() - began_s) / LINE_SHARE))
        files.rename(coming, self.file)

    def _check(self, header: Contents) -> None:
        if not 0 < header.total_bytes <= MOST_SIZES * self.membership.terms.state_bytes:
            raise BadMessage(f"a stage of {header.total_bytes} bytes; ours has {self.membership.terms.state_bytes}")

    # ------------------------------------------------------------------ moving

    async def _until_it_is_our_turn(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            lost_s = self._lost_s()
            obstacle = self._obstacle() if lost_s >= LOST_S else ""
            self._warn(obstacle)
            if lost_s >= LOST_S + self._rank() * RANK_S and not obstacle:
                return

    def _lost_s(self) -> float:
        """Return for how long there was no sign of a holder of the next stage; 0 while we do not train, and where one came to the end."""
        book = self.sources.book
        seen_s, has_ended = book.last_seen_s(self.stage), any(entry.finished for entry in book.claimed(self.stage, loop_s()))
        return 0.0 if seen_s is None or has_ended or not self.lifecycle.may_meet else loop_s() - max(seen_s, self._began_s)

    def _obstacle(self) -> str:
        """Return why we may not move; empty if we may."""
        if not self._mates():
            return f"this peer is the only holder of stage {self.own_stage}"
        if self.stage - 1 not in self.fits:
            return "it does not fit this peer's device"
        return "" if self.file.exists() else "this peer has no copy of it yet"

    def _warn(self, obstacle: str) -> None:
        if obstacle != self._warned:
            self._warned = obstacle
            self.emit(
                Warned("lost stage", f"stage {self.stage} is lost, and this peer does not take it over: {obstacle}" if obstacle else "")
            )

    def _mates(self) -> list[PeerId]:
        return [entry.peer_id for entry in self._seen(self.own_stage) if not entry.paused]

    def _rank(self) -> int:
        return sum(mate < self.membership.identity.peer_id for mate in self._mates())

    def _seen(self, stage: int) -> list[KnownPeer]:
        """Return the holders of a stage, counted from one, of whom there was a sign lately."""
        return [entry for entry in self.sources.book.claimed(stage, loop_s()) if loop_s() - entry.seen_s < LOST_S]

    def _move(self) -> None:
        """Hold the next stage from the next start on: its weights are found where a transfer leaves them."""
        files.rename(self.file, self.home.downloads / "state")
        write_whole(self.home.stage, f"{self.stage}\n".encode())
        self.lifecycle.hold(self.stage)
        self.emit(StageMoved(self.own_stage, self.stage))
