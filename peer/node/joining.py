"""How a peer gets a state when it begins: by pieces, from several donors at once, until the trainer has taken it over.

Pieces may come from different donors and moments: a mixture of near replicas is as good to begin with as one of them. What can be checked
of a piece is size and hash, and that the donor's clock is about where most others say that theirs are; of the whole, what the trainer finds
(peer/trainer/shared_state.py). What is here stays on the disk until it is adopted or refused, so nothing is fetched twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.machine.events import Event, ProcessSays, ProgressMade, StateCloned
from gossamer.peer.node import pieces as files
from gossamer.peer.node.donor_samples import DonorSamples, spread_over
from gossamer.peer.node.download import Download
from gossamer.peer.node.fetching import FetchClient, as_final
from gossamer.peer.node.meetings import Meetings
from gossamer.peer.node.pieces import Pieces
from gossamer.peer.swarm.address_book import KnownPeer, loop_s
from gossamer.peer.swarm.heads import Head, Heads
from gossamer.peer.swarm.standing import Standing
from gossamer.protocol.errors import (
    BadContents,
    BadMessage,
    BadSettings,
    GossamerError,
    PeerMisbehaved,
    Refused,
    SwarmUnreachable,
    TransportError,
)
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind
from gossamer.protocol.messages.terms import RunTerms

PATIENCE_S = 60.0  # without any donor that answers at all
PAUSE_S = 1.0  # between two rounds of asking everybody
ROUNDS_TO_BELIEVE = 3  # in which every donor that answers does not want us: a single one must not send us away
DONORS = 4  # at once
ASKED = 8  # for their clocks, at once
CLOCK_S = 5.0  # for them to answer
TELL_S = 0.5  # between two words about how far it is
OLD_SHARE = 4  # of the gap that may be between two clocks: a state whose oldest piece is a fourth of it behind is too old to be met about
LONG_S = 3600.0  # a download that takes longer than this is worth a word


class NoUse(GossamerError):
    """A donor's state would not help us; nobody's fault."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which state is of use."""

    state_bytes: int
    earliest_clock_steps: int
    latest_clock_steps: int  # one that is further than anybody else is would end our training
    total_steps: int

    def check(self, header: Contents) -> None:
        """Raise BadMessage for a state that cannot be, NoUse for one of another time, before any of its bytes come."""
        if header.total_bytes != self.state_bytes:
            raise BadMessage(f"a state of {header.total_bytes} bytes; the manifest implies {self.state_bytes}")
        self.check_clock(header)

    def check_clock(self, header: Contents) -> None:
        """Raise as `check`, for the clock's sake alone."""
        if header.clock_steps > self.total_steps:
            raise BadMessage(f"a clock of {header.clock_steps} steps in a run of {self.total_steps}")
        if header.clock_steps < self.earliest_clock_steps:
            raise NoUse(f"its clock shows {header.clock_steps} steps, others are at {self.earliest_clock_steps} or more")
        if header.clock_steps > self.latest_clock_steps:
            raise NoUse(f"its clock shows {header.clock_steps} steps, others are at {self.latest_clock_steps} or less")


class Joining:
    """Get a state, and have the trainer adopt it. `file` is where it is kept meanwhile."""

    def __init__(
        self,
        client: FetchClient,
        terms: RunTerms,
        heads: Heads,
        standing: Standing,
        meetings: Meetings,
        link: NodeEnd,
        file: Path,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._client = client
        self._num_fragments = len(terms.fragments)
        self._gap_steps = terms.max_clock_gap_steps
        self._heads = heads
        self._book = heads.book
        self._standing = standing
        self._meetings = meetings
        self._link = link
        self._file = file
        self._rng = rng
        self._emit = emit
        self._num_donors = DONORS
        self._dissenting: frozenset[PeerId] = frozenset()  # who gives other weights than most
        self._refused: set[PeerId] = set()  # who alone gave weights that were refused
        self._told_s = -TELL_S
        self._progress: DownloadProgress | None = None

    async def hear_clocks(self) -> None:
        """Ask peers for their clocks, and return once the book knows one of a peer that has begun.

        Waits as long as they answer that they have not begun themselves. Raises SwarmUnreachable when none has answered for PATIENCE_S,
        RunRefusesUs or WrongVersion when all that answer do not want us.
        """
        await self._until_done(self.ask_clocks)

    async def take_over(self, wanted: Callable[[], Wanted]) -> None:
        """Fetch a state and have the trainer adopt it; ask everybody again and again until that is done. Raises as `hear_clocks`."""
        await self._until_done(lambda: self.ask_everybody(wanted))

    async def ask_everybody(self, wanted: Callable[[], Wanted]) -> list[GossamerError] | None:
        """Fetch what every live peer together can give. Return None once it is adopted, else what those that answered said.

        Raises BadSettings when the disk has no room for it.
        """
        donors = await self._compared(wanted().state_bytes)
        if not donors:
            return []
        try:
            with contextlib.closing(self._open(wanted().state_bytes)) as pieces:
                errors = await self._fetch(pieces, donors, wanted)
                if pieces.is_whole:
                    refusal = await self._adopt(pieces, wanted().total_steps)
                    if refusal is None:
                        return None
                    errors.append(refusal)
        except OSError as full:
            errors = [NoUse(f"no room for the weights here: {full.strerror}")]
        for error in errors:
            self._emit(ProcessSays("joining", f"no weights yet: {error}"))
        return [error for error in errors if not isinstance(error, TransportError)]

    # ------------------------------------------------------------------ whom to ask, again and again

    async def _until_done(self, ask_all: Callable[[], Awaitable[list[GossamerError] | None]]) -> None:
        heard_s, num_unwanted = loop_s(), 0
        while loop_s() - heard_s < PATIENCE_S:
            began_s = loop_s()
            answers = await ask_all()
            if answers is None:
                return
            final = _unanimous(answers)
            num_unwanted = num_unwanted + 1 if final else 0
            if final is not None and num_unwanted >= ROUNDS_TO_BELIEVE:
                raise final
            if answers:
                heard_s = loop_s()
            await asyncio.sleep(max(0.0, PAUSE_S - (loop_s() - began_s)))
        raise SwarmUnreachable(
            f"no peer of the run answered for {PATIENCE_S:.0f} s",
            hint="check that the host is running and that its address in the invite can be reached from here, then join again; "
            "peers that have banned this one do not answer it either",
        )

    def _donors(self) -> list[KnownPeer]:
        """Return the live peers in an order by chance, head by head; those whose weights were refused come last."""
        return sorted(spread_over(self._heads_by_chance()), key=lambda donor: donor.peer_id in self._refused)

    def _heads_by_chance(self) -> list[Head]:
        donors = self._book.live(loop_s())
        self._rng.shuffle(donors)
        return self._heads.group(donors)

    async def _compared(self, state_bytes: int) -> list[KnownPeer]:
        """Return whom to fetch from. Who has nothing of its own yet compares donors before; who has, compares with that."""
        if self._standing.has_begun or self._num_donors == 1 or self._progress is not None:
            return [donor for donor in self._donors() if donor.peer_id not in self._dissenting] or self._donors()
        samples = DonorSamples(self._client, state_bytes, self._rng)
        found = await samples.compare(self._heads_by_chance(), DONORS)
        if found is None:
            return self._donors()
        self._dissenting = found.dissenting
        self._num_donors = found.num_at_once
        self._emit(ProcessSays("joining", found.says))
        return found.donors

    async def ask_clocks(self) -> list[GossamerError] | None:
        """Have some live peers tell their clocks. Return None when one that has begun did, else what those that answered said."""
        asked = await asyncio.gather(*(self._clock_of(donor) for donor in self._donors()[:ASKED]))
        if None in asked:
            return None
        answers = [error for error in asked if error is not None and not isinstance(error, TransportError)]
        for error in answers:
            self._emit(ProcessSays("joining", f"waiting until somebody begins: {error}"))
        return answers

    async def _clock_of(self, donor: KnownPeer) -> GossamerError | None:
        try:
            async with asyncio.timeout(CLOCK_S):
                header = await self._client.header(donor.peer_id, donor.addresses, ContentsKind.STATE)
        except TimeoutError:
            return TransportError(f"{donor.peer_id.short()} does not answer")
        except PeerMisbehaved as error:
            self._book.ban(donor.peer_id, loop_s())
            return error
        except GossamerError as error:
            return error
        self._book.tells_clock(donor.peer_id, header.clock_steps)
        return None

    # ------------------------------------------------------------------ one state

    def _open(self, num_bytes: int) -> Pieces:
        """Go on with what is on the disk, or begin. Raises OSError, and BadSettings when there is not enough room."""
        pieces = Pieces.open(self._file, self._client.run_id, num_bytes)
        left, free = num_bytes - pieces.done_bytes, shutil.disk_usage(self._file.parent).free
        if left > free:
            pieces.close()
            files.remove(self._file)
            raise BadSettings(
                f"joining takes {num_bytes / 1e6:.0f} MB in {self._file.parent}, {free / 1e6:.0f} MB are free",
                hint="make room, or choose another folder with --home",
            )
        return pieces

    async def _fetch(self, pieces: Pieces, donors: list[KnownPeer], wanted: Callable[[], Wanted]) -> list[GossamerError]:
        progress = self._progress = self._progress or DownloadProgress(loop_s(), pieces.done_bytes)

        def check(donor: PeerId, header: Contents, _piece: int) -> None:
            self._book.tells_clock(donor, header.clock_steps)  # records are old by some seconds
            wanted().check(header)  # as of now: clocks go on while a long download lasts

        def on_piece(donor: PeerId) -> None:
            progress.num_by[donor] += 1
            self._tell(progress, pieces)

        self._tell(progress, pieces)
        download = Download(self._client, self._book, ContentsKind.STATE, pieces, pieces.missing(), check, on_piece)
        return await download.from_donors(donors, self._num_donors)

    async def _adopt(self, pieces: Pieces, total_steps: int) -> GossamerError | None:
        """Have the trainer take the state over; return why it did not. What it refuses is not kept."""
        await self.ask_clocks()
        oldest, now = min(pieces.clocks.values()), self._heads.typical_clock(loop_s(), total_steps)
        is_old = now - oldest > self._gap_steps // OLD_SHARE
        clock_steps = now if is_old else min(oldest, now or oldest)  # what is old is pulled before it is met about; no donor sets our clock
        try:
            async with self._meetings.set_aside():
                adopted = await self._link.request(messages.Adopt(str(pieces.path), clock_steps))
        except LinkLost:
            return NoUse("our own trainer is being restarted")
        files.remove(pieces.path)
        progress, self._progress = self._progress, None
        assert isinstance(adopted, messages.Adopted) and progress is not None
        if not adopted.accepted:
            return self._blame(progress.num_by, adopted)
        self._num_donors = DONORS
        self._standing.stale = set(range(self._num_fragments)) if is_old and not adopted.reason else set()
        if adopted.reason:
            self._emit(ProcessSays("joining", f"kept our own weights: {adopted.reason}"))
            return None
        donors = tuple(str(donor) for donor, _ in progress.num_by.most_common())
        fetched_bytes = pieces.num_bytes - progress.began_bytes
        self._emit(StateCloned(donors, clock_steps, pieces.num_bytes, fetched_bytes, loop_s() - progress.began_s))
        return None

    def _blame(self, num_by: Counter[PeerId], adopted: messages.Adopted) -> GossamerError:
        """A bad piece names its donor only where all are its own; so from here on one donor gives all."""
        self._num_donors = 1
        if len(num_by) == 1:
            self._refused |= set(num_by)
        if len(num_by) == 1 and not adopted.is_sound:
            (donor,) = num_by
            self._book.ban(donor, loop_s())
            return BadContents(adopted.reason)
        return NoUse(adopted.reason)

    def _tell(self, progress: DownloadProgress, pieces: Pieces) -> None:
        if loop_s() - self._told_s >= TELL_S or pieces.is_whole:
            self._told_s = loop_s()
            self._emit(ProcessSays("joining", progress.describe(pieces.done_bytes, pieces.num_bytes, loop_s())))
            self._emit(ProgressMade("downloading weights", pieces.done_bytes / max(1, pieces.num_bytes)))


@dataclass(slots=True)
class DownloadProgress:
    """How far a download is, over all rounds of asking."""

    began_s: float  # loop time
    began_bytes: int  # what was there then
    num_by: Counter[PeerId] = field(default_factory=Counter)  # pieces, by donor

    def describe(self, done_bytes: int, total_bytes: int, now_s: float) -> str:
        """Say per cent, rate and estimate, and what that means where it will take long."""
        rate = (done_bytes - self.began_bytes) / max(1e-9, now_s - self.began_s)
        words = f"downloading weights: {100 * done_bytes // max(1, total_bytes)} % of {total_bytes / 1e6:.1f} MB"
        if rate <= 0.0:
            return words
        left_s = (total_bytes - done_bytes) / rate
        words += f" from {len(self.num_by)} peers, {rate / 1e6:.2f} MB/s, {left_s:.0f} s left"
        return words + (f"; this line is slow for a model of this size ({left_s / 3600:.1f} h)" if left_s > LONG_S else "")


def _unanimous(answers: list[GossamerError]) -> GossamerError | None:
    """Return the final error behind what everybody said, None unless all of it is final."""
    finals = [as_final(answer) if isinstance(answer, Refused) else None for answer in answers]
    return finals[0] if finals and None not in finals else None
