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


@dataclass(slots=True)
class Donor:
    """Serve manifest and state to members of the run. One for all streams of a node: it counts the clones that it serves."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    link: TrainerLink
    payloads: PayloadFolder
    now_s: Callable[[], float]  # Unix time
    is_ready: Callable[[], bool]  # whether the trainer has weights worth cloning
    _serving: set[PeerId] = field(default_factory=set)
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
        if not self.is_ready():
            raise Refused(RefusalCode.NOT_READY, "I have not begun to train")
        self._serving.add(stream.partner)
        name = f"clone-{next(self._names)}"
        try:
            cloned = await self.link.request(ask.Clone(name))
            if not isinstance(cloned, ask.Cloned):
                raise Refused(RefusalCode.NOT_READY, "no room for a clone now")
            data = self.payloads.read(name)
            await self._send(stream, request, data, bytes.fromhex(cloned.sha256), cloned.clock_steps)
        except LinkLost:
            raise Refused(RefusalCode.NOT_READY, "trainer restarting") from None
        finally:
            self._serving.discard(stream.partner)
            self.payloads.remove(name)

    async def _send(self, stream: Stream, request: FetchRequest, data: memoryview, digest: bytes, clock_steps: int) -> None:
        header = Contents(request.kind, len(data), digest, clock_steps).signed(self.identity, request)
        async with asyncio.timeout(transfer_s(len(data))):
            await stream.send(header)
            for offset in range(0, len(data), CHUNK_BYTES):
                async with asyncio.timeout(FRAME_S):
                    await stream.send(Chunk(Part.CONTENTS, offset, bytes(data[offset : offset + CHUNK_BYTES])))
