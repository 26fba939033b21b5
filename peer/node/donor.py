"""Giving the manifest, or this peer's state, to another peer: the answering half of the `Fetch` streams.

Who asks is checked like any partner. The state is given in pieces, from an idle copy of the slow weights that the trainer writes beside its
steps, renewed while it is asked for and let go when it is not. A piece waits while we meet somebody, as long as the one before it took, so
that meetings have the larger part of the line. The other half: peer/node/fetching.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from gossamer.peer.link import records as ask
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.records import File, payload_name
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.node.fetching import part_bytes, pull_seed, receive, send, send_chunks, take_chunks
from gossamer.peer.node.hatch import Hatch
from gossamer.peer.node.mirror import Mirror
from gossamer.peer.node.run_result import RunResult
from gossamer.peer.swarm.address_book import loop_s
from gossamer.peer.swarm.hearsay import Hearsay
from gossamer.peer.swarm.standing import Standing
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.frames import write_alone
from gossamer.protocol.messages.messages import Contents, ContentsKind, FetchRequest, Part
from gossamer.protocol.messages.terms import RunTerms, check_fetch
from gossamer.protocol.streams.transport import Stream

COPY_S = 10.0  # how old the copy may be, at least, before it is renewed
LATE_SHARE = 4  # of the gap that may be between two clocks: one that is a fourth of it behind is renewed before it is given
COPY_SHARE = 0.02  # of the time at most goes into copies: the trainer's second thread makes them
IDLE_S = 60.0  # the copy's memory is free again when nobody has asked for so long
MOST_GIVEN = 4  # states, in bytes, to one partner that has to try again
REST_S = 600.0  # after which it may have as many more, or once our clock has gone on by the gap that may be between two
GIVING_S = 2.0  # after a part of the result was asked for, more will be
MEMBER_S = 30 * 24 * 3600  # what an issuer gives who renews
YIELD_S = 2.0  # the longest that one piece waits for meetings
OF_RESULT = (ContentsKind.RESULT, ContentsKind.RESULT_HASHES, ContentsKind.RESULT_PIECES)


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """The slow weights at one moment; the file is gone, its bytes stay mapped."""

    data: memoryview
    made_s: float  # loop time, when it was begun
    took_s: float
    clock_steps: int


@dataclass(slots=True)
class Given:
    """How much one partner has had since when."""

    since_s: float  # loop time
    clock_steps: int  # ours, then
    num_bytes: int = 0


class StateDonor:
    """Gives our state to members, within bounds: it counts what it gives, so there is one for all streams of a node.

    `until_quiet` waits for the end of the meetings under way, which come first.
    """

    def __init__(
        self,
        link: NodeEnd,
        payloads: PayloadFolder,
        standing: Standing,
        terms: RunTerms,
        until_quiet: Callable[[], Awaitable[None]],
    ) -> None:
        self._link = link
        self._payloads = payloads
        self._standing = standing
        self._state_bytes = terms.state_bytes
        self._fragments = terms.fragments
        self.result: RunResult | None = None  # once we have settled on one
        self.coming: RunResult | None = None  # while it is fetched: what has come of it is given on
        self._gave_s: dict[PeerId, float] = {}  # when each that fetches last asked for a part of the result
        self._coding = asyncio.Lock()
        self._gap_steps = terms.max_clock_gap_steps
        self._until_quiet = until_quiet
        self._streams: dict[PeerId, Stream] = {}  # on which each asks for it
        self._given: dict[PeerId, Given] = {}
        self._copy: IdleCopy | None = None
        self._copying: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._names = itertools.count()

    @contextlib.contextmanager
    def serving(self, stream: Stream) -> Iterator[None]:
        """Note that a partner fetches on this stream: an earlier one of its is a broken one that we have not noticed yet, and ends."""
        if (earlier := self._streams.pop(stream.partner, None)) is not None:
            earlier.hang_up()
        self._streams[stream.partner] = stream
        try:
            yield
        finally:
            if self._streams.get(stream.partner) is stream:
                del self._streams[stream.partner]

    async def piece(self, partner: PeerId, request: FetchRequest) -> tuple[memoryview, int]:
        """Return the part of our state that is asked for, and the clock behind it. Raises Refused."""
        if not self._standing.has_begun:
            raise Refused(RefusalCode.NOT_READY, "I have not begun to train")
        num_bytes = part_bytes(request, self._state_bytes)
        if not num_bytes:
            return memoryview(b""), self._standing.clock_steps
        self._count(partner, num_bytes)
        try:
            copy = await self._recent_copy()
        except LinkLost:
            raise Refused(RefusalCode.NOT_READY, "trainer restarting") from None
        return copy.data[request.offset : request.offset + num_bytes], copy.clock_steps

    @property
    def clock_steps(self) -> int:
        """Return where we stand ourselves."""
        return self._standing.clock_steps

    @property
    def fetching(self) -> set[PeerId]:
        """Return who has asked for a part of our result just now."""
        return {partner for partner, at_s in self._gave_s.items() if loop_s() - at_s < GIVING_S}

    def of_result(self, partner: PeerId, request: FetchRequest) -> tuple[int, memoryview, bytes]:
        """Return the size of what is asked for of our result, the part of it, and whose it is by name. Raises Refused."""
        if request.kind is ContentsKind.RESULT and not request.num_bytes:  # which one we have settled on, if any
            return self._state_bytes, memoryview(b""), self.result.name if self.result else b""
        result = self.result or self.coming
        if result is None:
            return 0, memoryview(b""), b""
        self._gave_s = {other: self._gave_s[other] for other in self.fetching} | {partner: loop_s()}
        if request.kind is ContentsKind.RESULT:
            return self._state_bytes, result.part(request.offset, request.num_bytes), result.name
        data = result.hashes if request.kind is ContentsKind.RESULT_HASHES else result.held()
        return len(data), memoryview(data)[request.offset : request.offset + request.num_bytes], result.name

    async def coded(self, stream: Stream, request: FetchRequest) -> tuple[memoryview, int]:
        """Code a fragment's slow weights against the sketch that follows the request; one at a time. Raises Refused, as `receive`."""
        if not self._standing.has_begun or request.fragment in self._standing.stale:
            raise Refused(RefusalCode.NOT_READY, "my own weights are not fit to be pulled yet")
        if request.fragment >= len(self._fragments):
            raise Refused(RefusalCode.WRONG_TERMS, f"fragment {request.fragment} of {len(self._fragments)}")
        sizes = self._fragments[request.fragment]
        self._count(stream.partner, sizes.slow_bytes)
        name, clock_steps = f"give-{next(self._names)}", self._standing.clock_steps
        sketch, coded = payload_name(name, File.PARTNER_SKETCH), payload_name(name, File.OWN_PAYLOAD)
        try:
            self._payloads.write(sketch, b"")
            await take_chunks(stream, Part.SKETCH, sizes.sketch_bytes, lambda data: self._payloads.append(sketch, data))
            async with self._coding:
                written = await self._link.request(ask.CodeSlow(name, request.fragment, pull_seed(request.run_id, request.nonce)))
            data = self._payloads.read(coded)
            if not isinstance(written, ask.Written) or written.reason or len(data) != sizes.slow_bytes:
                raise Refused(RefusalCode.NOT_READY, "my weights could not be coded against this")
            return data, clock_steps
        except (LinkLost, OSError):
            raise Refused(RefusalCode.NOT_READY, "no room, or my trainer is restarting") from None
        finally:
            for file in (sketch, coded):
                self._payloads.remove(file)

    async def give_way(self, last_s: float) -> None:
        """Let meetings go first, no longer than the last piece took."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(YIELD_S, last_s)):
                await self._until_quiet()

    def _count(self, partner: PeerId, num_bytes: int) -> None:
        now_s, clock_steps = loop_s(), self._standing.clock_steps
        self._given = {
            peer: had
            for peer, had in self._given.items()
            if now_s - had.since_s < REST_S and clock_steps - had.clock_steps <= self._gap_steps
        }
        given = self._given.setdefault(partner, Given(now_s, clock_steps))
        if given.num_bytes + num_bytes > MOST_GIVEN * self._state_bytes:
            raise Refused(RefusalCode.BUSY, f"you have had my state {MOST_GIVEN} times lately")
        given.num_bytes += num_bytes

    # ------------------------------------------------------------------ the copy

    async def _recent_copy(self) -> IdleCopy:
        """Return the copy that is there, and have it renewed where it is old; wait for the first."""
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._let_go)
        copy = self._copy
        age_s, age_steps = (loop_s() - copy.made_s, self._standing.clock_steps - copy.clock_steps) if copy else (math.inf, 0)
        is_late = age_steps > self._gap_steps // LATE_SHARE
        if self._copying is None and (is_late or age_s > COPY_S) and age_s > (copy.took_s / COPY_SHARE if copy else 0.0):
            self._copying = asyncio.create_task(self._renew(), name="copy of the state")
            self._copying.add_done_callback(_heard)
        if self._copying is not None and (self._copy is None or is_late):
            await asyncio.shield(self._copying)
        assert self._copy is not None
        return self._copy

    async def _renew(self) -> None:
        try:
            self._copy = await self._new_copy()
        finally:
            self._copying = None

    async def _new_copy(self) -> IdleCopy:
        name = f"clone-{next(self._names)}"
        await self._link.request(ask.BringUp(name))
        made_s, clock_steps = loop_s(), self._standing.clock_steps
        try:
            taken = await self._link.request(ask.CopyState(name))
            if not isinstance(taken, ask.Written) or taken.reason:
                raise Refused(RefusalCode.NOT_READY, "no room for a copy of my state now")
            data = self._payloads.read(name)
        finally:
            self._payloads.remove(name)
        if len(data) != self._state_bytes:
            raise Refused(RefusalCode.NOT_READY, "my own copy is not whole")
        return IdleCopy(data, made_s, loop_s() - made_s, clock_steps)

    def _let_go(self) -> None:
        """Free the copy's memory: nobody has asked for it."""
        self._copy = None


_OF_ANYBODY = frozenset(ContentsKind) - {*OF_RESULT, ContentsKind.STATE, ContentsKind.SLOW}


def _heard(task: asyncio.Task[None]) -> None:
    """Take note of how it ended, whether anybody waits for it or not."""
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, slots=True)
class FetchServer:
    """Serve the manifest, what a member wants to know of itself, and where there is a donor our state, to members of the run."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    now_s: Callable[[], float]  # Unix time
    mirror: Mirror
    hearsay: Hearsay
    donor: StateDonor | None = None
    hatch: Hatch = field(default_factory=Hatch)

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Fetch` stream until its opener ends it. Raises Refused and PeerMisbehaved for the partner, TransportError."""
        with contextlib.ExitStack() as serving:
            last_s: float | None = None
            while True:
                request = await receive(stream)
                began_s = loop_s()
                if not isinstance(request, FetchRequest):
                    raise BadMessage(f"a fetch consists of FetchRequests, not of a {type(request).__name__}")
                check_fetch(request, self.terms, self.identity.peer_id, stream.partner, self.now_s())
                if request.kind in _OF_ANYBODY:
                    await self._answer_about_us(stream, request)
                    continue
                if self.donor is None:
                    raise Refused(RefusalCode.NOT_READY, "I have no weights")
                if last_s is None and request.kind is not ContentsKind.SLOW:  # who pulls asks on two streams at once
                    serving.enter_context(self.donor.serving(stream))
                await self._give(self.donor, stream, request, last_s or 0.0)
                last_s = loop_s() - began_s

    async def _answer_about_us(self, stream: Stream, request: FetchRequest) -> None:
        """Answer what needs no weights."""
        if request.kind in (ContentsKind.MANIFEST, ContentsKind.INTRODUCTION):
            await self.hatch.answer(self._answer_newcomer(stream, request))
            return
        if request.kind is ContentsKind.REVOCATIONS:
            shown = self.terms.revocations.shown_to(request.sender, request.credential)
            data = memoryview(shown.to_bytes())
            part = data[request.offset : request.offset + request.num_bytes]
            await self._send(stream, request, len(data), part, 0, shown.digest())
            return
        if request.kind is ContentsKind.CREDENTIAL:
            renewed = self._renewed(request)
            await self._send(stream, request, len(renewed), renewed[: request.num_bytes], 0)
            return
        data = await self._reflected(stream, request)
        await self._send(stream, request, len(data), data, 0)

    async def _answer_newcomer(self, stream: Stream, request: FetchRequest) -> None:
        """Tell what the run is, or who is in it."""
        if request.kind is ContentsKind.MANIFEST:
            await self._send(stream, request, len(self.manifest), self._of_manifest(request), 0)
        else:
            data = self._introduced(stream, request)
            await self._send(stream, request, len(data), data, 0)

    async def _give(self, donor: StateDonor, stream: Stream, request: FetchRequest, last_s: float) -> None:
        """Give weights; the piece before took `last_s`."""
        if request.kind in OF_RESULT:
            total_bytes, data, name = donor.of_result(stream.partner, request)
            await self._send(stream, request, total_bytes, data, donor.clock_steps, name)
        elif request.kind is ContentsKind.SLOW:
            data, clock_steps = await donor.coded(stream, request)
            await self._send(stream, request, len(data), data, clock_steps)
        else:
            data, clock_steps = await donor.piece(stream.partner, request)
            await donor.give_way(last_s)
            await self._send(stream, request, self.terms.state_bytes, data, clock_steps)

    def _introduced(self, stream: Stream, request: FetchRequest) -> memoryview:
        """Name members; once there have been enough of them, only the time: what is asked for beside it may still be given."""
        if not self.mirror.may_introduce(stream.partner, stream.observed):
            return memoryview(self.hearsay.introduction(stream.partner, 0))
        self.hearsay.take_all(request.records)
        return memoryview(self.hearsay.introduction(stream.partner, request.num_bytes))

    async def _reflected(self, stream: Stream, request: FetchRequest) -> memoryview:
        if request.kind is ContentsKind.SIGHTING:
            return memoryview(self.mirror.sighting(stream.observed))[: request.num_bytes]
        self.mirror.allow_echo(stream.partner, request.num_bytes)
        said: list[bytes] = []
        await take_chunks(stream, Part.CONTENTS, request.num_bytes, said.append)
        return memoryview(b"".join(said))

    def _renewed(self, request: FetchRequest) -> memoryview:
        """Sign the asker's credential anew, where it is ours. Raises Refused."""
        credential = request.credential
        if credential is None or credential.issuer != self.identity.peer_id or credential.not_after_s <= self.now_s():
            raise Refused(RefusalCode.NOT_FOUND, "I have signed no invite of yours that is in force")
        renewed = credential.renewed(self.identity, request.run_id, request.sender, int(self.now_s()) + MEMBER_S)
        return memoryview(write_alone(renewed))

    def _of_manifest(self, request: FetchRequest) -> memoryview:
        return memoryview(self.manifest)[request.offset : request.offset + request.num_bytes]

    async def _send(
        self, stream: Stream, request: FetchRequest, total_bytes: int, data: memoryview, clock_steps: int, name: bytes = b""
    ) -> None:
        header = Contents(request.kind, total_bytes, hashlib.sha256(data).digest(), clock_steps, name)
        await send(stream, header.signed(self.identity, *request.asked))
        await send_chunks(stream, Part.CONTENTS, data, request.offset)
