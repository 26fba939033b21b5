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
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.sync.client import receive, send, send_chunks, take_chunks
from gossamer.peer.sync.hatch import Hatch
from gossamer.peer.sync.mirror import Mirror
from gossamer.peer.sync.state_source import OF_RESULT, ServedPart, StateSource
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.frames import write_alone
from gossamer.protocol.messages.messages import Contents, ContentsKind, FetchRequest, Part
from gossamer.protocol.messages.terms import RunTerms, check_fetch
from gossamer.protocol.streams.transport import Stream

MEMBER_S = 30 * 24 * 3600  # for which an issuer renews a credential
OF_NEWCOMERS = (ContentsKind.MANIFEST, ContentsKind.INTRODUCTION)
OF_WEIGHTS = (*OF_RESULT, ContentsKind.STATE, ContentsKind.SLOW)


@dataclass(frozen=True, slots=True)
class FetchServer:
    """Serve members of the run: its manifest, its members, what they ask of themselves, and our weights where there is a trainer."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    now_s: Callable[[], float]  # Unix time
    mirror: Mirror
    peer_exchange: PeerExchange
    source: StateSource | None = None
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
                if request.kind in OF_NEWCOMERS:
                    await self.hatch.answer(self._describe(stream, request))
                elif request.kind not in OF_WEIGHTS:
                    await self._describe(stream, request)
                elif self.source is None:
                    raise Refused(RefusalCode.NOT_READY, "I have no weights")
                else:
                    if last_s is None and request.kind is not ContentsKind.SLOW:  # a fragment sync asks on two streams at once
                        serving.enter_context(self.source.serving(stream))
                    await self._send(stream, request, await self.source.answer(stream, request, last_s or 0.0))
                    last_s = loop_s() - began_s

    async def _describe(self, stream: Stream, request: FetchRequest) -> None:
        """Answer what needs no weights. Raises as `answer`."""
        match request.kind:
            case ContentsKind.MANIFEST:
                answer = ServedPart.part_of(self.manifest, request)
            case ContentsKind.INTRODUCTION:
                answer = ServedPart.whole(self._introduction(stream, request))
            case ContentsKind.REVOCATIONS:
                shown = self.terms.revocations.shown_to(request.sender, request.credential)
                answer = ServedPart.part_of(shown.to_bytes(), request, name=shown.digest())
            case ContentsKind.CREDENTIAL:
                answer = ServedPart.part_of(self._renewed(request), request)
            case ContentsKind.SIGHTING:
                answer = ServedPart.whole(self.mirror.sighting(stream.observed)[: request.num_bytes])
            case _:
                answer = ServedPart.whole(await self._echo(stream, request))
        await self._send(stream, request, answer)

    def _introduction(self, stream: Stream, request: FetchRequest) -> bytes:
        """Name members; past the budget return only the time, for other requests on the stream may still be served."""
        if not self.mirror.may_introduce(stream.partner, stream.observed):
            return self.peer_exchange.introduction(stream.partner, 0)
        self.peer_exchange.take_all(request.records)
        return self.peer_exchange.introduction(stream.partner, request.num_bytes)

    async def _echo(self, stream: Stream, request: FetchRequest) -> bytes:
        self.mirror.allow_echo(stream.partner, request.num_bytes)
        parts: list[bytes] = []
        await take_chunks(stream, Part.CONTENTS, request.num_bytes, parts.append)
        return b"".join(parts)

    def _renewed(self, request: FetchRequest) -> bytes:
        """Renew the sender's credential, where we issued it. Raises Refused."""
        credential = request.credential
        if credential is None or credential.issuer != self.identity.peer_id or credential.not_after_s <= self.now_s():
            raise Refused(RefusalCode.NOT_FOUND, "I have signed no invite of yours that is in force")
        return write_alone(credential.renewed(self.identity, request.run_id, request.sender, int(self.now_s()) + MEMBER_S))

    async def _send(self, stream: Stream, request: FetchRequest, answer: ServedPart) -> None:
        sha256 = hashlib.sha256(answer.data).digest()
        header = Contents(request.kind, answer.total_bytes, sha256, answer.clock_steps, answer.name)
        await send(stream, header.signed(self.identity, *request.asked))
        await send_chunks(stream, Part.CONTENTS, answer.data, request.offset)
