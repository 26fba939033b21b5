"""Serve this peer's weights to members of the run: its state, its fragments coded against a sketch, and the result of the run.

The state is served in pieces from an idle copy of the slow weights, which the trainer writes beside its steps. A piece waits while a
meeting is under way, as long as the piece before it took, so that meetings have the larger part of the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.sync.client import part_bytes, sync_seed, take_chunks
from gossamer.peer.sync.pieces import RunResult, bits_bytes, count
from gossamer.protocol.addresses import network_seen
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.messages.messages import ContentsKind, FetchRequest, Part
from gossamer.protocol.messages.terms import RunTerms, check_stage
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.streams.transport import Stream
from gossamer.protocol.tasks import loop_s

COPY_S = 10.0  # the least age at which the copy is renewed
LATE_SHARE = 4  # of the allowed gap: a copy that is a fourth of it behind is renewed before it is served
COPY_SHARE = 0.02  # of the time, at most, goes into copies; the trainer's second thread makes them
IDLE_S = 60.0  # without a request: then the memory of the copy is freed
MOST_GIVEN = 4  # states, in bytes, to one peer: it may have to try again
MOST_GIVEN_ALIKE = 32  # to the peers of one invite, or of one network: identities are free, and a group of guests may join at once
REST_S = 600.0  # after which it may have as many more, or once our global step has gone on by the allowed gap
TAKING_S = 30.0  # after a request for a part of our state, more are expected, or the trainer there judges it
GIVING_S = 2.0  # after a request for a part of the result, more are expected
ASKING = 256  # peers that ask about the result and are remembered
YIELD_S = 2.0  # the longest that one piece waits for meetings
OF_RESULT = (ContentsKind.RESULT, ContentsKind.RESULT_HASHES, ContentsKind.RESULT_PIECES, ContentsKind.RESULT_AGREED)


@dataclass(frozen=True, slots=True)
class ServedPart:
    """The bytes that answer a request, and the contents of their header."""

    total_bytes: int  # of the whole content
    data: memoryview
    global_step: int
    name: bytes = b""  # of a result, or the digest of a document

    @classmethod
    def part_of(cls, data: bytes, request: FetchRequest, global_step: int, name: bytes) -> ServedPart:
        """Answer with the part of a content that is asked for."""
        return cls(len(data), memoryview(data)[request.offset : request.offset + request.num_bytes], global_step, name)


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """The slow weights at one moment; the file is removed, its bytes stay mapped."""

    data: memoryview
    made_s: float  # loop time, when it was begun
    took_s: float
    global_step: int


@dataclass(slots=True)
class Given:
    """How much one peer, or the peers of one invite or network, were served in their current period."""

    since_s: float  # loop time
    global_step: int  # our global step then
    num_bytes: int = 0
    last_s: float = -math.inf  # when it last asked; loop time

    def add(self, num_bytes: int) -> None:
        """Count bytes that the peer is given now."""
        self.num_bytes += num_bytes
        self.last_s = loop_s()

    def is_taken(self, within_s: float) -> bool:
        """Return whether the peer has asked within this time, and takes at the slowest rate that peers wait for at least."""
        now_s = loop_s()
        return now_s - self.last_s < within_s and self.num_bytes >= SLOWEST_BYTES_PER_S / 8 * (now_s - self.since_s - TAKING_S)


@dataclass(slots=True)
class StateSource:
    """Serves our weights to members, within budgets. `until_quiet` waits for the end of the meetings in progress, which come first."""

    link: NodeEnd
    payloads: PayloadFolder
    lifecycle: Lifecycle
    terms: RunTerms
    until_quiet: Callable[[], Awaitable[None]]
    result: RunResult | None = None  # once we have one
    coming: RunResult | None = None  # while it is fetched: the pieces that are here are served
    agreed: bytes = b""  # name of the result that we have seen agreed, and of which all pieces are here
    agreed_s: float = -math.inf  # since when, in this start; loop time
    asked_s: dict[PeerId, float] = field(default_factory=dict)  # when a peer last asked about the result, even in vain; loop time
    _given_of_result: dict[PeerId, Given] = field(default_factory=dict)
    _coding: asyncio.Lock = field(default_factory=asyncio.Lock)
    _streams: dict[PeerId, Stream] = field(default_factory=dict)  # on which each peer asks
    _given: dict[object, Given] = field(default_factory=dict)  # by peer, and by origin
    _copy: IdleCopy | None = None
    _copying: asyncio.Task[IdleCopy] | None = None
    _idle: asyncio.TimerHandle | None = None
    _names: itertools.count[int] = field(default_factory=itertools.count)

    @contextlib.contextmanager
    def serving(self, stream: Stream) -> Iterator[None]:
        """Note that a peer fetches on this stream. An earlier stream of the same peer is broken, and is closed."""
        if (earlier := self._streams.pop(stream.partner, None)) is not None:
            earlier.close()
        self._streams[stream.partner] = stream
        try:
            yield
        finally:
            if self._streams.get(stream.partner) is stream:
                del self._streams[stream.partner]

    async def answer(self, stream: Stream, request: FetchRequest, last_s: float) -> ServedPart:
        """Return what is asked for of our weights; the answer before took `last_s`. Raises Refused, and as `receive`."""
        check_stage(request, self.terms)
        if request.kind in OF_RESULT:
            return self._part_of_result(stream.partner, request)
        if request.kind is ContentsKind.SLOW:
            return await self._code_fragment(stream, request)
        answer = await self._piece(stream, request)
        with contextlib.suppress(TimeoutError):  # meetings go first
            async with asyncio.timeout(min(YIELD_S, last_s)):
                await self.until_quiet()
        return answer

    def takes_state(self, partner: PeerId) -> bool:
        """Return whether a peer takes our state, or a fragment, at the slowest rate that peers wait for at least."""
        given = self._given.get(partner)
        return given is not None and given.is_taken(within_s=TAKING_S)

    def gave_weights(self, partner: PeerId, since_s: float) -> bool:
        """Return whether a peer has had a part of our state, or a fragment, since then; loop time, some minutes ago at most."""
        given = self._given.get(partner)
        return given is not None and given.last_s >= since_s

    @property
    def fetching(self) -> set[PeerId]:
        """Return the peers that take our result, at the slowest rate that peers wait for at least: others could hold us here for hours."""
        return {partner for partner, given in self._given_of_result.items() if given.is_taken(within_s=GIVING_S)}

    async def _piece(self, stream: Stream, request: FetchRequest) -> ServedPart:
        if not self.lifecycle.has_begun:
            raise Refused(RefusalCode.NOT_READY, "not training yet")
        if self.lifecycle.stage not in (0, self.terms.own_stage):
            raise Refused(RefusalCode.NOT_READY, "leaving this stage")
        num_bytes = part_bytes(request, self.terms.state_bytes)
        if not num_bytes:
            return ServedPart(self.terms.state_bytes, memoryview(b""), self.lifecycle.global_step)
        self._charge(stream, request, num_bytes)
        try:
            copy = await self._recent_copy()
        except LinkLost:
            raise Refused(RefusalCode.NOT_READY, "trainer restarting") from None
        return ServedPart(self.terms.state_bytes, copy.data[request.offset : request.offset + num_bytes], copy.global_step)

    def _part_of_result(self, partner: PeerId, request: FetchRequest) -> ServedPart:
        global_step, result = self.lifecycle.global_step, self.result or self.coming
        keep_newest(self.asked_s, partner, loop_s(), ASKING)
        if request.kind is ContentsKind.RESULT and not request.num_bytes:  # the name of the result that we have, if any
            return ServedPart(self.terms.state_bytes, memoryview(b""), global_step, self.result.name if self.result else b"")
        if request.kind is ContentsKind.RESULT_AGREED:
            return ServedPart(0, memoryview(b""), global_step, self.agreed)
        if result is None:
            return ServedPart(0, memoryview(b""), global_step)
        if request.kind is ContentsKind.RESULT:
            part = ServedPart(self.terms.state_bytes, result.part(request.offset, request.num_bytes), global_step, result.name)
        elif request.kind is ContentsKind.RESULT_PIECES and not request.num_bytes:  # the name, asked for often: listing pieces takes long
            part = ServedPart(bits_bytes(count(self.terms.state_bytes)), memoryview(b""), global_step, result.name)
        else:
            data = result.hashes if request.kind is ContentsKind.RESULT_HASHES else result.held()
            part = ServedPart.part_of(data, request, global_step, result.name)
        self._note_given(partner, len(part.data))
        return part

    def _note_given(self, partner: PeerId, num_bytes: int) -> None:
        """Count bytes of the result that a peer is given; one that comes back later begins anew."""
        given = self._given_of_result.get(partner)
        if given is None or loop_s() - given.last_s >= TAKING_S:
            given = Given(loop_s(), self.lifecycle.global_step)
        given.add(num_bytes)
        keep_newest(self._given_of_result, partner, given, ASKING)

    async def _code_fragment(self, stream: Stream, request: FetchRequest) -> ServedPart:
        """Code a fragment's slow weights against the sketch that follows the request; one at a time."""
        if not self.lifecycle.has_begun or request.fragment in self.lifecycle.stale:
            raise Refused(RefusalCode.NOT_READY, "the weights here are being synchronized")
        if request.fragment >= len(self.terms.fragments):
            raise Refused(RefusalCode.WRONG_TERMS, f"fragment {request.fragment} of {len(self.terms.fragments)}")
        sizes = self.terms.fragments[request.fragment]
        self._charge(stream, request, sizes.slow_bytes)
        name, global_step = f"give-{next(self._names)}", self.lifecycle.global_step
        seed = sync_seed(request.opening.run_id, request.opening.nonce)
        sketch, coded = payload_name(name, File.PARTNER_SKETCH), payload_name(name, File.OWN_PAYLOAD)
        try:
            self.payloads.write(sketch, b"")
            await take_chunks(stream, Part.SKETCH, sizes.sketch_bytes, lambda data: self.payloads.append(sketch, data))
            async with self._coding:
                written = await self.link.request(messages.CodeSlow(name, request.fragment, seed))
            data = self.payloads.read(coded)
            if not isinstance(written, messages.Written) or written.reason or len(data) != sizes.slow_bytes:
                raise Refused(RefusalCode.NOT_READY, "my weights could not be coded against this")
            return ServedPart(len(data), data, global_step)
        except (LinkLost, OSError):
            raise Refused(RefusalCode.NOT_READY, "no room, or the trainer is restarting") from None
        finally:
            for file in (sketch, coded):
                self.payloads.remove(file)

    def _charge(self, stream: Stream, request: FetchRequest, num_bytes: int) -> None:
        """Count bytes that a peer is to be given. Raises Refused where it, or the peers of its invite or network, had too many."""
        now_s, global_step = loop_s(), self.lifecycle.global_step
        self._given = {
            who: had
            for who, had in self._given.items()
            if now_s - had.since_s < REST_S and global_step - had.global_step <= self.terms.max_clock_gap_steps
        }
        most: dict[object, int] = {stream.partner: MOST_GIVEN} | dict.fromkeys(_origins(stream, request), MOST_GIVEN_ALIKE)
        given = {who: self._given.get(who) or Given(now_s, global_step) for who in most}
        for who, times in most.items():
            if given[who].num_bytes + num_bytes > times * self.terms.state_bytes:
                whose = "you have" if who == stream.partner else "peers of your invite or network have"
                raise Refused(RefusalCode.BUSY, f"{whose} had my state {times} times lately")
        for one in given.values():
            one.add(num_bytes)
        self._given |= given

    async def _recent_copy(self) -> IdleCopy:
        """Return the copy, and have it renewed if it is old; wait for the first one, and for one in place of a late one."""
        self._free_later()
        copy = self._copy
        if copy is None:
            return await asyncio.shield(self._renewal())
        age_s, age_steps = loop_s() - copy.made_s, self.lifecycle.global_step - copy.global_step
        is_late = age_steps > self.terms.max_clock_gap_steps // LATE_SHARE
        if (is_late or age_s > COPY_S) and age_s > copy.took_s / COPY_SHARE:
            self._renewal()
        return await asyncio.shield(self._copying) if is_late and self._copying is not None else copy

    def _renewal(self) -> asyncio.Task[IdleCopy]:
        """Return the task that makes the next copy."""
        if self._copying is None:
            self._copying = asyncio.create_task(self._renew(), name="copy of the state")
            self._copying.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio logs it where nobody awaits
        return self._copying

    async def _renew(self) -> IdleCopy:
        name = f"copy-{next(self._names)}"
        try:
            await self.link.request(messages.BringUp(name))
            made_s, global_step = loop_s(), self.lifecycle.global_step
            taken = await self.link.request(messages.CopyState(name))
            if not isinstance(taken, messages.Written) or taken.reason:
                raise Refused(RefusalCode.NOT_READY, "no room for a copy of my state now")
            data = self.payloads.read(name)
            if len(data) != self.terms.state_bytes:
                raise Refused(RefusalCode.NOT_READY, "the copy is not complete")
            self._copy = copy = IdleCopy(data, made_s, loop_s() - made_s, global_step)
            self._free_later()  # whoever asked for it may have gone
            return copy
        finally:
            self._copying = None
            self.payloads.remove(name)

    def _free_later(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._free_copy)

    def _free_copy(self) -> None:
        self._copy = None


def _origins(stream: Stream, request: FetchRequest) -> list[tuple[str, object]]:
    """Return the invite of a peer, and the network in which its connection shows it, where they are known."""
    network, bearer = network_seen(stream.observed), request.opening.credential.bearer if request.opening.credential else None
    return [(kind, origin) for kind, origin in (("network", network), ("invite", bearer)) if origin]
