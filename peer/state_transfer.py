"""Taking the manifest, or a clone of the weights, from another peer, and giving them: the `Fetch` streams.

A joiner asks one donor after another until one delivers whole: the header is signed over the joiner's own nonce, the size is the one
that the manifest implies, the hash covers every byte. What arrives goes straight to a file, so a model larger than memory is no trouble
here.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from peer import requests as ask
from peer.driver import LinkLost, TrainerLink
from peer.payloads import PayloadFolder
from protocol.errors import BadContents, BadMessage, DeadlineExceeded, PeerMisbehaved, TransportError
from protocol.identity import Identity, PeerId
from protocol.limits import CHUNK_BYTES, MANIFEST_BYTES, PROTOCOL_VERSION
from protocol.messages import Chunk, Contents, ContentsKind, Credential, FetchRequest, Message, Part, Refusal, RefusalCode, Refused
from protocol.terms import RunTerms, check_fetch
from protocol.transport import Purpose, Stream, Transport

FRAME_S = 30.0  # a donor that says nothing for so long has gone
CONNECT_S = 15.0
MAX_CLONES = 2  # served at once


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
        await self._fetch(donor, addresses, ContentsKind.MANIFEST, lambda size: size <= MANIFEST_BYTES, parts.append)
        return b"".join(parts)

    async def state(
        self, donor: PeerId, addresses: tuple[str, ...], state_bytes: int, keep: Callable[[bytes], None]
    ) -> Contents:
        """Fetch a donor's slow weights and momentum, piece by piece, and return the verified header.

        What was kept is worth nothing unless this returns. Raises TransportError, PeerMisbehaved or Refused.
        """
        return await self._fetch(donor, addresses, ContentsKind.STATE, lambda size: size == state_bytes, keep)

    async def _fetch(
        self, donor: PeerId, addresses: tuple[str, ...], kind: ContentsKind, fits: Callable[[int], bool], keep: Callable[[bytes], None]
    ) -> Contents:
        request = FetchRequest(
            PROTOCOL_VERSION, self.run_id, self.identity.peer_id, donor, secrets.token_bytes(16), kind, self.credential
        ).signed(self.identity)
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = await self.transport.connect(donor, addresses, Purpose.FETCH)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{donor.short()} did not answer in {CONNECT_S:.0f} s") from error
        try:
            await stream.send(request)
            header = await _receive(stream)
            if not isinstance(header, Contents) or header.kind is not kind:
                raise BadMessage(f"asked for contents, got {type(header).__name__}")
            header.verify(donor, request)
            if not fits(header.total_bytes):
                raise BadMessage(f"{header.total_bytes} bytes is not a size that the manifest implies")
            await _take(stream, header, keep)
            return header
        finally:
            await stream.close()


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
    """Serve manifest and state to members of the run."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    link: TrainerLink
    payloads: PayloadFolder
    now_s: Callable[[], float]
    is_ready: Callable[[], bool]  # whether the trainer has weights worth cloning
    num_clones: int = 0
    _names: int = field(default=0)

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Fetch` stream and close it; raises nothing that the partner causes."""
        try:
            request = await _receive(stream)
            if not isinstance(request, FetchRequest):
                raise BadMessage(f"a fetch begins with a FetchRequest, not with {type(request).__name__}")
            check_fetch(request, self.terms, self.identity.peer_id, stream.partner, self.now_s())
            if request.kind is ContentsKind.MANIFEST:
                await self._send(stream, request, memoryview(self.manifest), hashlib.sha256(self.manifest).digest(), 0)
            else:
                await self._send_state(stream, request)
        except Refused as refusal:
            await _refuse(stream, refusal.code, refusal.detail)
        except PeerMisbehaved as error:
            await _refuse(stream, RefusalCode.BAD_MESSAGE, str(error))
        except TransportError:
            return
        finally:
            await stream.close()

    async def _send_state(self, stream: Stream, request: FetchRequest) -> None:
        if self.num_clones >= MAX_CLONES:
            raise Refused(RefusalCode.BUSY, "serving as many clones as I allow")
        if not self.is_ready():
            raise Refused(RefusalCode.NOT_READY, "I have not begun to train")
        self.num_clones += 1
        self._names += 1
        name = f"clone-{self._names}"
        try:
            cloned = await self.link.request(ask.Clone(name))
            if not isinstance(cloned, ask.Cloned):
                raise Refused(RefusalCode.NOT_READY, "no room for a clone now")
            await self._send(stream, request, self.payloads.read(name), bytes.fromhex(cloned.sha256), cloned.clock_steps)
        except LinkLost:
            raise Refused(RefusalCode.NOT_READY, "trainer restarting") from None
        finally:
            self.num_clones -= 1
            self.payloads.remove(name)

    async def _send(self, stream: Stream, request: FetchRequest, data: memoryview, digest: bytes, clock_steps: int) -> None:
        header = Contents(request.kind, len(data), digest, clock_steps).signed(self.identity, request)
        await stream.send(header)
        for offset in range(0, len(data), CHUNK_BYTES):
            async with asyncio.timeout(FRAME_S):
                await stream.send(Chunk(Part.CONTENTS, offset, bytes(data[offset : offset + CHUNK_BYTES])))


async def _refuse(stream: Stream, code: RefusalCode, detail: str) -> None:
    try:
        await stream.send(Refusal(code, detail[:200]))
    except TransportError:
        return


