"""Request the manifest, weights and documents from another peer: the client of the `Fetch` streams.

Every answer has a header, signed over the nonce of the request, with the hash of the bytes that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.addresses import network_seen
from gossamer.protocol.errors import BadMessage, GossamerError, RefusalCode, Refused, RunRefusesUs, TransportError, WrongVersion
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import CHUNK_BYTES, MANIFEST_BYTES, NONCE_BYTES, PROTOCOL
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Message, Opening, Part, Refusal, chunks
from gossamer.protocol.messages.replies import PEER_LIST_BYTES, SEEN_BYTES, PeerList
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.protocol.streams.transport import Purpose, Stream, Transport
from gossamer.protocol.tasks import loop_s

FRAME_S = 30.0  # a peer that sends nothing, or takes nothing, for so long is gone
CONNECT_S = 15.0


@dataclass(slots=True)
class FetchClient:
    """Opens streams to sources as this peer. The credential is replaced by one in this peer's name."""

    identity: Identity
    run_id: bytes
    credential: OwnCredential
    transport: Transport
    stage: int = 0  # in a staged run: the stage that we hold, plus one, once it is known

    async def document(self, peer: PeerId, addresses: tuple[str, ...], kind: ContentsKind, known: bytes) -> bytes:
        """Fetch a content of one chunk at most; return nothing if its name is `known`. Raises as `take`."""
        async with self.source(peer, addresses) as source:
            if known and (await source.header(kind, _is_small)).name == known:
                return b""
            await source.ask(kind, 0, CHUNK_BYTES)
            _, data = await source.take(_is_small)
            return data

    @contextlib.asynccontextmanager
    async def source(self, peer: PeerId, addresses: tuple[str, ...]) -> AsyncIterator[Source]:
        """Open a stream to a source for the body. Raises TransportError."""
        async with _timeout(CONNECT_S, f"no connection to {peer.short()}"):
            stream = await self.transport.connect(peer, addresses, Purpose.FETCH)
        try:
            yield Source(self, stream)
        finally:
            stream.close()


@dataclass(slots=True)
class Source:
    """A source at the other end of a stream. Requests may be sent ahead; answers are taken in the order of the requests."""

    client: FetchClient
    stream: Stream
    _asked: deque[FetchRequest] = field(default_factory=deque)
    _room: bytearray = field(default_factory=bytearray)  # for what comes over the bulk stream

    @property
    def peer_id(self) -> PeerId:
        """Return who is at the other end."""
        return self.stream.partner

    async def ask(
        self, kind: ContentsKind, offset: int, num_bytes: int, *, nonce: bytes = b"", fragment: int = 0, records: tuple[bytes, ...] = ()
    ) -> None:
        """Request these bytes of a content; without a `nonce`, with a random one. Raises TransportError."""
        client = self.client
        opening = Opening(
            protocol_version=PROTOCOL,
            run_id=client.run_id,
            sender=client.identity.peer_id,
            receiver=self.stream.partner,
            nonce=nonce or secrets.token_bytes(NONCE_BYTES),
            stage=client.stage,
            credential=client.credential.current,
            records=records,
        )
        request = FetchRequest(opening, kind, offset, num_bytes, fragment).signed(client.identity)
        self._asked.append(request)
        await self.stream.send(request)

    async def header(self, kind: ContentsKind, check: Callable[[Contents], None] = lambda header: None) -> Contents:
        """Request only the header of a content, and return it. Raises as `take`."""
        await self.ask(kind, 0, 0)
        header, _ = await self.take(check)
        return header

    async def ask_slow(self, fragment: int, nonce: bytes, sketch: memoryview) -> None:
        """Request the slow weights of a fragment, coded against the sketch of ours; the nonce gives the seed. Raises TransportError."""
        await self.ask(ContentsKind.SLOW, 0, 0, nonce=nonce, fragment=fragment)
        await send_chunks(self.stream, Part.SKETCH, sketch, 0)

    async def observed_address(self) -> PeerList:
        """Request the address from which the source sees us, and its time, without members. Raises as `take`."""
        await self.ask(ContentsKind.PEER_LIST, 0, SEEN_BYTES)
        _, data = await self.take()
        return PeerList.from_bytes(data)

    async def manifest(self) -> SignedManifest:
        """Request the manifest of the run. Raises as `take`."""
        await self.ask(ContentsKind.MANIFEST, 0, MANIFEST_BYTES)
        _, data = await self.take()
        return SignedManifest.from_bytes(data, expect=self.client.run_id)

    async def peer_list(self, records: tuple[bytes, ...], time: SwarmTime, *, is_bootstrap: bool, group: PeerId | None) -> PeerList:
        """Exchange member records, and give the time of the source to `time`. The records are unchecked. Raises as `take`.

        `group`: the key of the source's Sybil group; None: it is unknown. All sources behind relays count as of one network: a member
        chooses its relays.
        """
        asked_s = loop_s()
        await self.ask(ContentsKind.PEER_LIST, 0, PEER_LIST_BYTES, records=records)
        _, data = await self.take()
        peer_list = PeerList.from_bytes(data)
        took_s = loop_s() - asked_s
        there_s = peer_list.unix_ms / 1000 + took_s / 2
        time.add_reading(network_seen(self.stream.observed), group, there_s, is_bootstrap=is_bootstrap)
        return peer_list

    async def echo(self, num_bytes: int) -> tuple[float, float]:
        """Send so many bytes (a chunk at most) and have them sent back; return the seconds that each direction took. Raises as `take`."""
        loop, data = asyncio.get_running_loop(), secrets.token_bytes(num_bytes)
        began_s, arrived_s = loop.time(), [0.0]
        await self.ask(ContentsKind.ECHO, 0, num_bytes)
        await send(self.stream, Chunk(Part.CONTENTS, 0, data))
        _, back = await self.take(lambda header: arrived_s.append(loop.time()))
        if back != data:
            raise BadMessage("an echo of something else")
        return arrived_s[-1] - began_s, loop.time() - arrived_s[-1]

    async def take(self, check: Callable[[Contents], None] = lambda header: None, within_s: float = FRAME_S) -> tuple[Contents, bytes]:
        """Return the answer of one chunk to the first request that has none: its verified header, and the bytes.

        `check` raises for a header whose bytes are not wanted. A source that sends nothing for `within_s` has fallen silent. Raises
        TransportError, PeerMisbehaved or Refused, and what `check` raises.
        """
        header, data = await self.take_run(check, within_s)
        return header, bytes(data)

    async def take_run(self, check: Callable[[Contents], None], within_s: float) -> tuple[Contents, bytes | memoryview]:
        """Return an answer like `take`, also one over the bulk stream. The bytes are valid until the next answer."""
        request, header = await self._header(check, within_s)
        num_bytes = part_bytes(request, header.total_bytes)
        if not num_bytes:
            return header, b""
        is_chunk = num_bytes <= CHUNK_BYTES
        data = await (self._chunk(request.offset, num_bytes, within_s) if is_chunk else self._bytes(num_bytes, within_s))
        _need_hash(hashlib.sha256(data).digest(), header)
        return header, data

    async def _chunk(self, offset: int, num_bytes: int, within_s: float) -> bytes:
        chunk = await receive(self.stream, within_s)
        if not isinstance(chunk, Chunk) or (chunk.part, chunk.offset, len(chunk.data)) != (Part.CONTENTS, offset, num_bytes):
            raise BadMessage(f"expected {num_bytes} bytes from {offset} on, got another {type(chunk).__name__}")
        return chunk.data

    async def _bytes(self, num_bytes: int, within_s: float) -> memoryview:
        if len(self._room) < num_bytes:
            self._room = bytearray(num_bytes)  # kept: new pages cost more than a copy
        data = memoryview(self._room)[:num_bytes]
        for begin in range(0, num_bytes, CHUNK_BYTES):
            async with _timeout(within_s, f"{self.stream.partner.short()} fell silent"):
                await self.stream.receive_into(data[begin : begin + CHUNK_BYTES])
        return data

    async def take_slow(self, num_bytes: int, check: Callable[[Contents], None], keep: Callable[[bytes], None]) -> Contents:
        """Return the verified header of what `ask_slow` requested, once `keep` has all its bytes. Raises as `take`."""
        _, header = await self._header(check, FRAME_S)
        if header.total_bytes != num_bytes:
            raise BadMessage(f"a fragment of {header.total_bytes} bytes; the manifest implies {num_bytes}")
        sha256 = await take_chunks(self.stream, Part.CONTENTS, num_bytes, keep)
        _need_hash(sha256, header)
        return header

    async def _header(self, check: Callable[[Contents], None], within_s: float) -> tuple[FetchRequest, Contents]:
        header = await receive(self.stream, within_s)
        request = self._asked.popleft()
        if not isinstance(header, Contents) or header.kind is not request.kind:
            raise BadMessage(f"asked for contents, got {type(header).__name__}")
        header.verify(self.stream.partner, *request.asked)
        check(header)
        return request, header


def sync_seed(run_id: bytes, nonce: bytes) -> int:
    """Return the seed of the codec for a fragment sync; both sides derive it from the request."""
    return int.from_bytes(hashlib.sha256(b"gossamer-pull" + run_id + nonce).digest()[:8], "little") & (2**63 - 1)


async def send_answer(stream: Stream, data: memoryview, first: int) -> None:
    """Send the bytes that answer a request, of which `first` is the place of the first one. Raises as `send`."""
    if len(data) <= CHUNK_BYTES:
        return await send_chunks(stream, Part.CONTENTS, data, first)
    for begin in range(0, len(data), CHUNK_BYTES):
        async with _timeout(FRAME_S, f"{stream.partner.short()} takes nothing"):
            await stream.send_bytes(data[begin : begin + CHUNK_BYTES])


async def send_chunks(stream: Stream, part: Part, data: memoryview, first: int) -> None:
    """Send bytes as chunks in their order; `first` is where the first byte lies. Raises TransportError."""
    for chunk in chunks(part, data, first):
        await send(stream, chunk)


async def send(stream: Stream, message: Message) -> None:
    """Send a message. Raises TransportError, also when the peer takes nothing."""
    async with _timeout(FRAME_S, f"{stream.partner.short()} takes nothing"):
        await stream.send(message)


async def take_chunks(stream: Stream, part: Part, num_bytes: int, keep: Callable[[bytes], None]) -> bytes:
    """Pass so many bytes to `keep` as they come, and return their SHA-256. Raises as `receive`, and BadMessage."""
    digest, done = hashlib.sha256(), 0
    while done < num_bytes:
        chunk = await receive(stream)
        if not isinstance(chunk, Chunk) or (chunk.part, chunk.offset) != (part, done) or done + len(chunk.data) > num_bytes:
            raise BadMessage(f"expected the bytes at {done} of {num_bytes}, got another {type(chunk).__name__}")
        done += len(chunk.data)
        digest.update(chunk.data)
        keep(chunk.data)
    return digest.digest()


def _need_hash(sha256: bytes, header: Contents) -> None:
    if sha256 != header.sha256:
        raise BadMessage("the bytes do not have the hash that was promised")


def part_bytes(request: FetchRequest, total_bytes: int) -> int:
    """Return how many bytes answer a request for a part of a content of so many bytes."""
    return max(0, min(request.num_bytes, total_bytes - request.offset))


@contextlib.asynccontextmanager
async def _timeout(seconds: float, late: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TransportError(late) from error


def _is_small(header: Contents) -> None:
    if header.total_bytes > CHUNK_BYTES:
        raise BadMessage(f"a document of {header.total_bytes} bytes; at most {CHUNK_BYTES} are read")


async def receive(stream: Stream, within_s: float = FRAME_S) -> Message:
    """Return the next message. Raises Refused for a Refusal, BadMessage, and TransportError, also when the peer falls silent."""
    async with _timeout(within_s, f"{stream.partner.short()} fell silent"):
        message = await stream.receive()
    if isinstance(message, Refusal):
        raise Refused(message.code, message.detail)
    return message


def as_final(refusal: Refused) -> GossamerError | None:
    """Return the operator's error behind a refusal that no retry can change, or None."""
    match refusal.code:
        case RefusalCode.NOT_INVITED | RefusalCode.WRONG_RUN:
            return RunRefusesUs(str(refusal), hint=refusal.hint)
        case RefusalCode.WRONG_VERSION:
            return WrongVersion(str(refusal), hint=refusal.hint)
    return None
