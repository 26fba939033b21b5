"""Taking the manifest, or a clone of the weights, from another peer, and giving them: the `Fetch` streams.

A joiner asks one donor after another until one delivers whole: the header is signed over the joiner's own nonce, the size is one that
may be, the hash covers every byte. What arrives goes straight to a file, so a model larger than memory is no trouble here. Both ends
give up on a partner that is slower than a link worth having.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from peer import requests as ask
from peer.driver import LinkLost, TrainerLink
from peer.loop_time import loop_s
from peer.meetings import say
from peer.payloads import PayloadFolder
from protocol.errors import BadContents, BadMessage, DeadlineExceeded, PeerMisbehaved, TransportError
from protocol.identity import Identity, PeerId
from protocol.limits import CHUNK_BYTES, MANIFEST_BYTES, PROTOCOL_VERSION, REFUSAL_DETAIL_CHARS
from protocol.messages import Chunk, Contents, ContentsKind, Credential, FetchRequest, Message, Part, Refusal, RefusalCode, Refused
from protocol.terms import RunTerms, check_fetch
from protocol.transport import Purpose, Stream, Transport

FRAME_S = 30.0  # a partner that says nothing, or takes nothing, for so long has gone
SLOWEST_BYTES_PER_S = 64 * 1024  # on the whole; slower than that, a place among the clones served is better given to another
CONNECT_S = 15.0
MAX_CLONES = 2  # served at once; one to each partner
CLONE_S = 60.0  # how long a clone is given out again, unless our clock has gone on by
CLONE_SHARE = 4  # of the gap that may be between two clocks: a fourth; making one costs the trainer a copy and a hash of everything
MAX_GIVEN = 4  # states to one partner, one that only looks at the header or has to try again included, in
REST_S = 600.0  # unless our clock has gone on by that gap meanwhile, and it may be behind again


def transfer_s(num_bytes: int) -> float:
    """Return how long a transfer may take."""
    return 2 * FRAME_S + num_bytes / SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and by whose word."""

    identity: Identity
    run_id: bytes
    credential: Credential | None
    transport: Transport

    async def manifest(self, donor: PeerId, addresses: tuple[str, ...]) -> bytes:
        """Fetch the signed manifest; the caller checks that it has the run's hash. Raises TransportError, PeerMisbehaved or Refused."""
        parts: list[bytes] = []
        await self._fetch(donor, addresses, ContentsKind.MANIFEST, _is_manifest, parts.append)
        return b"".join(parts)

    async def state(
        self, donor: PeerId, addresses: tuple[str, ...], check: Callable[[Contents], None], keep: Callable[[bytes], None]
    ) -> Contents:
        """Fetch a donor's slow weights and momentum, piece by piece, and return the verified header.

        `check` raises for a header whose bytes are not wanted. What was kept is worth nothing unless this returns. Raises TransportError,
        PeerMisbehaved or Refused, and what `check` and `keep` raise.
        """
        return await self._fetch(donor, addresses, ContentsKind.STATE, check, keep)

    async def _fetch(
        self,
        donor: PeerId,
        addresses: tuple[str, ...],
        kind: ContentsKind,
        check: Callable[[Contents], None],
        keep: Callable[[bytes], None],
    ) -> Contents:
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await self.transport.connect(donor, addresses, Purpose.FETCH)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{donor.short()} did not answer in {CONNECT_S:.0f} s") from error
        try:
            return await self._converse(stream, kind, check, keep)
        finally:
            await stream.close()

    async def _converse(
        self, stream: Stream, kind: ContentsKind, check: Callable[[Contents], None], keep: Callable[[bytes], None]
    ) -> Contents:
        nonce = secrets.token_bytes(16)
        request = FetchRequest(PROTOCOL_VERSION, self.run_id, self.identity.peer_id, stream.partner, nonce, kind, self.credential)
        request = request.signed(self.identity)
        await stream.send(request)
        header = await _receive(stream)
        if not isinstance(header, Contents) or header.kind is not kind:
            raise BadMessage(f"asked for contents, got {type(header).__name__}")
        header.verify(stream.partner, request)
        check(header)
        try:
            async with asyncio.timeout(transfer_s(header.total_bytes)):
                await _take(stream, header, keep)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{stream.partner.short()} sends too slowly") from error
        return header


def _is_manifest(header: Contents) -> None:
    if not 0 < header.total_bytes <= MANIFEST_BYTES:
        raise BadMessage(f"a manifest of {header.total_bytes} bytes; at most {MANIFEST_BYTES} are read")


async def _take(stream: Stream, header: Contents, keep: Callable[[bytes], None]) -> None:
    digest, done = hashlib.sha256(), 0
    while done < header.total_bytes:
        chunk = await _receive(stream)
        if not isinstance(chunk, Chunk) or chunk.part is not Part.CONTENTS or chunk.offset != done:
            raise BadMessage(f"expected the bytes at {done}, got {type(chunk).__name__}")
        if done + len(chunk.data) > header.total_bytes:
            raise BadMessage("more bytes than announced")
        done += len(chunk.data)
        digest.update(chunk.data)
        keep(chunk.data)
    if digest.digest() != header.sha256:
        raise BadContents("the bytes do not have the hash that was promised")


async def _receive(stream: Stream) -> Message:
    try:
        async with asyncio.timeout(FRAME_S):
            message = await stream.receive()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{stream.partner.short()} fell silent") from error
    if isinstance(message, Refusal):
        raise Refused(message.code, message.detail)
    return message


@dataclass(frozen=True, slots=True)
class Given:
    """When, and at which clock, a clone was made or given."""

    at_s: float  # loop time
    clock_steps: int


@dataclass(frozen=True, slots=True)
class Clone:
    """A clone that may be given to several; the file is gone, its bytes stay mapped."""

    made: Given
    data: memoryview
    sha256: bytes


@dataclass(slots=True)
class Donor:
    """Serve manifest and state to members of the run. One for all streams of a node: it counts the clones that it serves."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    link: TrainerLink
    payloads: PayloadFolder
    now_s: Callable[[], float]  # Unix time
    clock_steps: Callable[[], int | None]  # our own; None while the trainer has no weights worth cloning
    _serving: set[PeerId] = field(default_factory=set)
    _given: dict[PeerId, list[Given]] = field(default_factory=dict)
    _clone: Clone | None = None
    _cloning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Fetch` stream and close it. Raises PeerMisbehaved, after saying so, when the partner breaks the rules."""
        try:
            request = await _receive(stream)
            if not isinstance(request, FetchRequest):
                raise BadMessage(f"a fetch begins with a FetchRequest, not with a {type(request).__name__}")
            check_fetch(request, self.terms, self.identity.peer_id, stream.partner, self.now_s())
            if request.kind is ContentsKind.MANIFEST:
                await self._send(stream, request, memoryview(self.manifest), hashlib.sha256(self.manifest).digest(), 0)
            else:
                await self._send_state(stream, request)
        except Refused as refusal:
            await say(stream, Refusal(refusal.code, refusal.detail[:REFUSAL_DETAIL_CHARS]))
        except PeerMisbehaved as error:
            await say(stream, Refusal(RefusalCode.BAD_MESSAGE, str(error)[:REFUSAL_DETAIL_CHARS]))
            raise
        except (TransportError, TimeoutError):
            return
        finally:
            await stream.close()

    async def _send_state(self, stream: Stream, request: FetchRequest) -> None:
        if len(self._serving) >= MAX_CLONES or stream.partner in self._serving:
            raise Refused(RefusalCode.BUSY, "serving as many clones as I allow")
        clock_steps = self.clock_steps()
        if clock_steps is None:
            raise Refused(RefusalCode.NOT_READY, "I have not begun to train")
        gap_steps = self.terms.max_clock_gap_steps
        given = {peer: [g for g in given if _is_fresh(g, clock_steps, REST_S, gap_steps)] for peer, given in self._given.items()}
        self._given = {peer: fresh for peer, fresh in given.items() if fresh}
        if len(self._given.get(stream.partner, ())) >= MAX_GIVEN:
            raise Refused(RefusalCode.BUSY, f"you have had my state {MAX_GIVEN} times lately")
        self._serving.add(stream.partner)
        try:
            clone = await self._recent_clone(clock_steps, gap_steps // CLONE_SHARE)
            await self._send(stream, request, clone.data, clone.sha256, clone.made.clock_steps)
            self._given.setdefault(stream.partner, []).append(Given(loop_s(), clone.made.clock_steps))
        except LinkLost:
            raise Refused(RefusalCode.NOT_READY, "trainer restarting") from None
        finally:
            self._serving.discard(stream.partner)

    async def _recent_clone(self, clock_steps: int, most_steps: int) -> Clone:
        """Return a clone of hardly any age, a new one if need be; whoever asks meanwhile gets the same."""
        async with self._cloning:
            if self._clone is None or not _is_fresh(self._clone.made, clock_steps, CLONE_S, most_steps):
                self._clone = None  # its memory first
                self._clone = await self._new_clone()
                asyncio.get_running_loop().call_later(CLONE_S, self._let_go, self._clone)
            return self._clone

    def _let_go(self, clone: Clone) -> None:
        """Free the memory of a clone that is too old to be given."""
        if self._clone is clone:
            self._clone = None

    async def _new_clone(self) -> Clone:
        name = f"clone-{next(self._names)}"
        try:
            cloned = await self.link.request(ask.Clone(name))
            if not isinstance(cloned, ask.Cloned):
                raise Refused(RefusalCode.NOT_READY, "no room for a clone now")
            return Clone(Given(loop_s(), cloned.clock_steps), self.payloads.read(name), bytes.fromhex(cloned.sha256))
        finally:
            self.payloads.remove(name)

    async def _send(self, stream: Stream, request: FetchRequest, data: memoryview, digest: bytes, clock_steps: int) -> None:
        header = Contents(request.kind, len(data), digest, clock_steps).signed(self.identity, request)
        async with asyncio.timeout(transfer_s(len(data))):
            await stream.send(header)
            for offset in range(0, len(data), CHUNK_BYTES):
                async with asyncio.timeout(FRAME_S):
                    await stream.send(Chunk(Part.CONTENTS, offset, bytes(data[offset : offset + CHUNK_BYTES])))


def _is_fresh(given: Given, clock_steps: int, most_s: float, most_steps: int) -> bool:
    return loop_s() - given.at_s < most_s and abs(clock_steps - given.clock_steps) <= most_steps
