"""Answer the `Fetch` streams of members of the run: the other half of peer/sync/client.py.

Every answer is a signed header, bound to the nonce of the request, followed by the bytes. The weights come from `StateSource`. A peer
without a trainer serves everything else.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.swarm.address_book import loop_s
from gossamer.peer.swarm.hearsay import Hearsay
from gossamer.peer.sync.client import receive, send, send_chunks, take_chunks
from gossamer.peer.sync.hatch import Hatch
from gossamer.peer.sync.mirror import Mirror
from gossamer.peer.sync.state_source import OF_RESULT, StateSource
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Contents, ContentsKind, FetchRequest, Part
from gossamer.protocol.messages.revocations import credential_bytes
from gossamer.protocol.messages.terms import RunTerms, check_fetch
from gossamer.protocol.streams.transport import Stream

MEMBER_S = 30 * 24 * 3600  # what an issuer gives who renews
_OF_ANYBODY = frozenset(ContentsKind) - {*OF_RESULT, ContentsKind.STATE, ContentsKind.SLOW}


@dataclass(frozen=True, slots=True)
class FetchServer:
    """Serve the manifest, what a member wants to know of itself, and where there is a donor our state, to members of the run."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    now_s: Callable[[], float]  # Unix time
    mirror: Mirror
    hearsay: Hearsay
    donor: StateSource | None = None
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

    async def _give(self, donor: StateSource, stream: Stream, request: FetchRequest, last_s: float) -> None:
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
        return memoryview(credential_bytes(renewed))

    def _of_manifest(self, request: FetchRequest) -> memoryview:
        return memoryview(self.manifest)[request.offset : request.offset + request.num_bytes]

    async def _send(
        self, stream: Stream, request: FetchRequest, total_bytes: int, data: memoryview, clock_steps: int, name: bytes = b""
    ) -> None:
        header = Contents(request.kind, total_bytes, hashlib.sha256(data).digest(), clock_steps, name)
        await send(stream, header.signed(self.identity, *request.asked))
        await send_chunks(stream, Part.CONTENTS, data, request.offset)
