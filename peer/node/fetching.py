"""Taking the manifest, or a donor's weights, from another peer: the asking half of the `Fetch` streams.

A joiner asks one donor after another until one delivers whole: the header is signed over the joiner's own nonce, the size is one that
may be, the hash covers every byte. What arrives goes straight to a file, so a model larger than memory is no trouble here. A partner that
is slower than a link worth having is given up. The other half: peer/node/donor.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from protocol.errors import (
    BadContents,
    BadMessage,
    DeadlineExceeded,
    GossamerError,
    PeerMisbehaved,
    RefusalCode,
    Refused,
    RunRefusesUs,
    SwarmUnreachable,
    TransportError,
    WrongVersion,
)
from protocol.identity import Identity, PeerId
from protocol.limits import MANIFEST_BYTES, PROTOCOL_VERSION
from protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Message, Part, Refusal
from protocol.run.invite import Credential
from protocol.run.manifest import SignedManifest
from protocol.streams.transport import Purpose, Stream, Transport

FRAME_S = 30.0  # a partner that says nothing, or takes nothing, for so long has gone
SLOWEST_BYTES_PER_S = 64 * 1024  # on the whole; slower than that, a place among the clones served is better given to another
CONNECT_S = 15.0
PATIENCE_S = 60.0  # for the first address that answers
PAUSE_S = 1.0
_FINAL = {
    RefusalCode.NOT_INVITED: RunRefusesUs,
    RefusalCode.WRONG_RUN: RunRefusesUs,
    RefusalCode.WRONG_VERSION: WrongVersion,
}


def transfer_s(num_bytes: int) -> float:
    """Return how long a transfer may take."""
    return 2 * FRAME_S + num_bytes / SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class FetchClient:
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
        async with _within(CONNECT_S, f"{donor.short()} did not answer in {CONNECT_S:.0f} s"):
            stream = await self.transport.connect(donor, addresses, Purpose.FETCH)
        try:
            nonce = secrets.token_bytes(16)
            request = FetchRequest(PROTOCOL_VERSION, self.run_id, self.identity.peer_id, donor, nonce, kind, self.credential)
            request = request.signed(self.identity)
            await stream.send(request)
            header = await receive(stream)
            if not isinstance(header, Contents) or header.kind is not kind:
                raise BadMessage(f"asked for contents, got {type(header).__name__}")
            header.verify(donor, *request.asked)
            check(header)
            async with _within(transfer_s(header.total_bytes), f"{donor.short()} sends too slowly"):
                await _take(stream, header, keep)
            return header
        finally:
            await stream.close()


@contextlib.asynccontextmanager
async def _within(seconds: float, late: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(late) from error


def _is_manifest(header: Contents) -> None:
    if not 0 < header.total_bytes <= MANIFEST_BYTES:
        raise BadMessage(f"a manifest of {header.total_bytes} bytes; at most {MANIFEST_BYTES} are read")


async def _take(stream: Stream, header: Contents, keep: Callable[[bytes], None]) -> None:
    digest, done = hashlib.sha256(), 0
    while done < header.total_bytes:
        chunk = await receive(stream)
        if not isinstance(chunk, Chunk) or chunk.part is not Part.CONTENTS or chunk.offset != done:
            raise BadMessage(f"expected the bytes at {done}, got {type(chunk).__name__}")
        if done + len(chunk.data) > header.total_bytes:
            raise BadMessage("more bytes than announced")
        done += len(chunk.data)
        digest.update(chunk.data)
        keep(chunk.data)
    if digest.digest() != header.sha256:
        raise BadContents("the bytes do not have the hash that was promised")


async def receive(stream: Stream) -> Message:
    """Return the partner's next message. Raises Refused for a Refusal, DeadlineExceeded when it falls silent, PeerGone, BadMessage."""
    async with _within(FRAME_S, f"{stream.partner.short()} fell silent"):
        message = await stream.receive()
    if isinstance(message, Refusal):
        raise Refused(message.code, message.detail)
    return message


async def find_manifest(client: FetchClient, addresses: Sequence[str], say: Callable[[str], None]) -> SignedManifest:
    """Ask the peers at `addresses` (multiaddrs that end in a peer id) again and again, until one gives the manifest of the client's run.

    `say` is told whom it asks. Raises SwarmUnreachable when none did for a minute, RunRefusesUs or WrongVersion when they do not
    want us, BadManifest or WrongVersion when this build cannot read it. Cancel-safe.
    """
    loop = asyncio.get_running_loop()
    until_s, last = loop.time() + PATIENCE_S, "none was asked"
    while loop.time() < until_s:
        for address in addresses:
            say(f"asking {address} for the run's manifest")
            try:
                return await _ask(client, address)
            except Refused as refusal:
                if (final := as_final(refusal)) is not None:
                    raise final from refusal
                last = str(refusal)
            except (TransportError, PeerMisbehaved) as error:
                last = f"{address}: {error}"
        await asyncio.sleep(PAUSE_S)
    raise SwarmUnreachable(
        f"none of the invite's addresses gave the manifest in {PATIENCE_S:.0f} s (last: {last})",
        hint="check that the host is running and that its address can be reached from here, then join again; "
        "peers that have banned this one do not answer it either",
    )


async def _ask(client: FetchClient, address: str) -> SignedManifest:
    data = await client.manifest(PeerId.from_text(address.rpartition("/p2p/")[2]), (address,))
    signed = SignedManifest.from_bytes(data, expect=client.run_id)
    signed.manifest()  # can this build read it?
    return signed


def as_final(refusal: Refused) -> GossamerError | None:
    """Return the operator's error behind a refusal that no retry can change, or None."""
    kind = _FINAL.get(refusal.code)
    return kind(str(refusal), hint=refusal.hint) if kind else None
