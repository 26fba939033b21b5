"""Answer the `Fetch` streams of members of the run: the other half of peer/sync/client.py.

Every answer is a signed header, bound to the nonce of the request, followed by the bytes. The weights come from `StateSource`. A peer
without a trainer serves everything else. Newcomers pass a bounded queue; what a peer asks about itself is limited by budgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.sync.client import receive, send, send_answer, take_chunks
from gossamer.peer.sync.pieces import PIECE_BYTES
from gossamer.peer.sync.state_source import OF_RESULT, ServedPart, StateSource
from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.budgets import Allowance, Budgets
from gossamer.protocol.errors import BadMessage, RefusalCode, Refused
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.messages.frames import write_unframed
from gossamer.protocol.messages.messages import Contents, ContentsKind, FetchRequest, Part
from gossamer.protocol.messages.terms import RunTerms, check_fetch
from gossamer.protocol.streams.transport import Stream
from gossamer.protocol.tasks import cancel, loop_s

OF_NEWCOMERS = (ContentsKind.MANIFEST, ContentsKind.PEER_LIST)
OF_RUNS = (ContentsKind.STATE, ContentsKind.RESULT)
OF_WEIGHTS = (*OF_RESULT, ContentsKind.STATE, ContentsKind.SLOW)
REQUESTS_TO_ALL = Allowance(60_000, 60.0)  # that bring less than a piece: checking and signing each takes half a millisecond
REQUESTS_TO_ONE = Allowance(1200, 60.0)  # a peer that asks for votes at the end of a run sends half as many
PLACES = 8
MOST_S = 5.0  # 64 KiB at the slowest legal rate take 2 s
ECHOES_TO_ALL = Allowance(32 << 20, 600.0)  # bytes
ECHOES_TO_ONE = Allowance(2 << 20, 600.0)
CURVES_TO_ALL = Allowance(600, 600.0)  # of 8 KiB at most
CURVES_TO_ONE = Allowance(6, 600.0)  # a member asks once in a start
PEER_LISTS_TO_ALL = Allowance(3000, 600.0)
PEER_LISTS_TO_ONE = Allowance(120, 600.0)  # a peer's anti-entropy asks a fourth as often
PEER_LISTS_TO_NETWORK = Allowance(600, 600.0)  # or through one relay: identities are free


@dataclass(slots=True)
class FetchServer:
    """Serve members of the run: its manifest, its members, their own addresses, and our weights once `source` returns a source."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    now_s: Callable[[], float]  # Unix time
    peer_exchange: PeerExchange
    source: Callable[[], StateSource | None] = lambda: None
    admit: Callable[[PeerId, PeerId], bool] = lambda peer, bearer: True  # whether an invite's uses leave one for a peer
    curve: Callable[[], bytes] = lambda: b""  # what this member has seen of the run, encoded
    _requests: Budgets = field(default_factory=lambda: Budgets(loop_s, REQUESTS_TO_ALL, REQUESTS_TO_ONE))
    _budgets: AnswerBudgets = field(default_factory=lambda: AnswerBudgets())
    _newcomers: BoundedQueue = field(default_factory=lambda: BoundedQueue())

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Fetch` stream until its opener ends it. Raises Refused and PeerMisbehaved for the partner, TransportError."""
        with contextlib.ExitStack() as serving:
            last_s: float | None = None
            while True:
                request = await receive(stream)
                if not isinstance(request, FetchRequest):
                    raise BadMessage(f"a fetch consists of FetchRequests, not of a {type(request).__name__}")
                if not self._brings_piece(request) and not self._requests.take(1, stream.partner):
                    raise Refused(RefusalCode.BUSY, "busy: too many requests in a minute")
                check_fetch(request, self.terms, self.identity.peer_id, stream.partner, self.now_s())
                if request.num_bytes > (stream.answer_bytes if request.kind in OF_RUNS else CHUNK_BYTES):
                    raise BadMessage(f"a request for {request.num_bytes} bytes, which no chunk holds, without a bulk stream")
                if request.kind in OF_NEWCOMERS:
                    await self._newcomers.answer(self._describe(stream, request))
                elif request.kind not in OF_WEIGHTS:
                    await self._describe(stream, request)
                elif (source := self.source()) is None:
                    raise Refused(RefusalCode.NOT_READY, "no weights here")
                else:
                    if last_s is None and request.kind is not ContentsKind.SLOW:  # a fragment sync asks on two streams at once
                        serving.enter_context(source.serving(stream))
                    answer = await source.answer(stream, request, last_s or 0.0)
                    began_s = loop_s()  # after the wait for meetings, which would otherwise grow with each piece
                    await self._send(stream, request, answer)
                    last_s = loop_s() - began_s

    def _brings_piece(self, request: FetchRequest) -> bool:
        """Return whether the answer takes the line longer than the processor."""
        return request.kind in OF_RUNS and PIECE_BYTES <= request.num_bytes <= self.terms.state_bytes - request.offset

    async def _describe(self, stream: Stream, request: FetchRequest) -> None:
        name = b""
        match request.kind:
            case ContentsKind.MANIFEST:
                data = self.manifest
            case ContentsKind.PEER_LIST:
                data = self._peer_list(stream, request)
            case ContentsKind.REVOCATIONS:
                shown = self.terms.revocations.shown_to(request.opening.sender, request.opening.credential)
                data, name = shown.to_bytes(), shown.digest()
            case ContentsKind.CREDENTIAL:
                data = self._named_credential(request)
            case ContentsKind.RUN_CURVE:
                self._budgets.allow_curve(stream.partner)
                data = self.curve()
            case _:
                data = await self._receive_echo(stream, request)
        await self._send(stream, request, ServedPart.part_of(data, request, 0, name))

    def _peer_list(self, stream: Stream, request: FetchRequest) -> bytes:
        """Name members; past the budget none, for other requests on the stream may still be served."""
        if not self._budgets.may_list_peers(stream.partner, stream.observed):
            return self.peer_exchange.peer_list(stream.partner, stream.observed, 0)
        self.peer_exchange.take_all(request.opening.records)
        return self.peer_exchange.peer_list(stream.partner, stream.observed, request.num_bytes)

    async def _receive_echo(self, stream: Stream, request: FetchRequest) -> bytes:
        self._budgets.allow_echo(stream.partner, request.num_bytes)
        parts: list[bytes] = []
        await take_chunks(stream, Part.CONTENTS, request.num_bytes, parts.append)
        return b"".join(parts)

    def _named_credential(self, request: FetchRequest) -> bytes:
        """Give the sender a credential in its own name, where we issued the one that it shows. Raises Refused."""
        sender, credential = request.opening.sender, request.opening.credential
        if credential is None or credential.issuer != self.identity.peer_id or credential.not_after_s <= self.now_s():
            raise Refused(RefusalCode.NOT_FOUND, "no valid invite from this issuer")
        if credential.subject is None and credential.bearer is not None and not self.admit(sender, credential.bearer):
            raise Refused(RefusalCode.NOT_FOUND, "the invite has been used as often as it may be")
        return write_unframed(credential.named(self.identity, request.opening.run_id, sender))

    async def _send(self, stream: Stream, request: FetchRequest, answer: ServedPart) -> None:
        sha256 = hashlib.sha256(answer.data).digest()
        header = Contents(request.kind, answer.total_bytes, sha256, answer.global_step, answer.name)
        await send(stream, header.signed(self.identity, *request.asked))
        await send_answer(stream, answer.data, request.offset)


class BoundedQueue:
    """A few places for answers to newcomers. When all are taken, the oldest answer gives way to the next newcomer."""

    def __init__(self) -> None:
        self._answering: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Run an answer in one of the places. Raises Refused when it was cancelled for another or for time, and as `work`. Cancel-safe."""
        if len(self._answering) >= PLACES:
            slowest = next(iter(self._answering))
            del self._answering[slowest]
            slowest.cancel()
        task = asyncio.create_task(work, name="newcomer")
        self._answering[task] = None
        try:
            await asyncio.wait([task], timeout=MOST_S)
            if not task.done() or task.cancelled():
                raise Refused(RefusalCode.BUSY, "busy; retry later")
            task.result()
        finally:
            self._answering.pop(task, None)
            await cancel(task)


@dataclass(frozen=True, slots=True)
class AnswerBudgets:
    """Budgets of small answers."""

    _echoes: Budgets = field(default_factory=lambda: Budgets(loop_s, ECHOES_TO_ALL, ECHOES_TO_ONE))
    _curves: Budgets = field(default_factory=lambda: Budgets(loop_s, CURVES_TO_ALL, CURVES_TO_ONE))
    _peer_lists: Budgets = field(default_factory=lambda: Budgets(loop_s, PEER_LISTS_TO_ALL, PEER_LISTS_TO_ONE, PEER_LISTS_TO_NETWORK))

    def allow_echo(self, partner: PeerId, num_bytes: int) -> None:
        """Count an echo against the budgets. Raises Refused when they are used up."""
        if not self._echoes.take(num_bytes, partner):
            raise Refused(RefusalCode.BUSY, "busy: echo limit reached")

    def allow_curve(self, partner: PeerId) -> None:
        """Count an answer with the run's curve. Raises Refused when the budget is used up."""
        if not self._curves.take(1, partner):
            raise Refused(RefusalCode.BUSY, "busy: told the curve of the run often enough")

    def may_list_peers(self, partner: PeerId, observed: str) -> bool:
        """Count a peer exchange against the budgets of the peer, its network and all; return False when one is used up."""
        is_near = not observed or route(observed) == "local"
        return self._peer_lists.take(1, partner, partner if is_near else network_of(observed))
