"""Giving the manifest, or this peer's weights, to another peer: the answering half of the `Fetch` streams.

Who asks is checked like any partner; what a state costs (a copy, a hash, bytes of the line) is bounded per peer and in all. The other
half: peer/node/fetching.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from peer.link import records as ask
from peer.link.payload_folder import PayloadFolder
from peer.link.socket import LinkLost, TrainerLink
from peer.node.fetching import FRAME_S, receive, transfer_s
from peer.node.meetings import say
from peer.swarm.address_book import loop_s
from protocol.errors import BadMessage, PeerMisbehaved, RefusalCode, Refused, TransportError
from protocol.identity import Identity, PeerId
from protocol.limits import CHUNK_BYTES
from protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part, refusal_of
from protocol.messages.terms import RunTerms, check_fetch
from protocol.streams.transport import Stream

MAX_CLONES = 2  # served at once; one to each partner
CLONE_S = 60.0  # how long a clone is given out again, unless our clock has gone on by
CLONE_SHARE = 4  # of the gap that may be between two clocks: a fourth; making one costs the trainer a copy and a hash of everything
MAX_GIVEN = 4  # states to one partner, one that only looks at the header or has to try again included, in
REST_S = 600.0  # unless our clock has gone on by that gap meanwhile, and it may be behind again


@dataclass(frozen=True, slots=True)
class Given:
    """When, and at which clock, a clone was made or given."""

    at_s: float  # loop time
    clock_steps: int


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A clone that may be given to several; the file is gone, its bytes stay mapped."""

    made: Given
    data: memoryview
    sha256: bytes


@dataclass(slots=True)
class FetchServer:
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
    _clone: StateSnapshot | None = None
    _cloning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _names: itertools.count[int] = field(default_factory=itertools.count)

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Fetch` stream and close it. Raises PeerMisbehaved, after saying so, when the partner breaks the rules."""
        try:
            request = await receive(stream)
            if not isinstance(request, FetchRequest):
                raise BadMessage(f"a fetch begins with a FetchRequest, not with a {type(request).__name__}")
            check_fetch(request, self.terms, self.identity.peer_id, stream.partner, self.now_s())
            if request.kind is ContentsKind.MANIFEST:
                await self._send(stream, request, memoryview(self.manifest), hashlib.sha256(self.manifest).digest(), 0)
            else:
                await self._send_state(stream, request)
        except Refused as refusal:
            await say(stream, refusal_of(refusal))
        except PeerMisbehaved as error:
            await say(stream, refusal_of(error))
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

    async def _recent_clone(self, clock_steps: int, most_steps: int) -> StateSnapshot:
        """Return a clone of hardly any age, a new one if need be; whoever asks meanwhile gets the same."""
        async with self._cloning:
            if self._clone is None or not _is_fresh(self._clone.made, clock_steps, CLONE_S, most_steps):
                self._clone = None  # its memory first
                self._clone = await self._new_clone()
                asyncio.get_running_loop().call_later(CLONE_S, self._let_go, self._clone)
            return self._clone

    def _let_go(self, clone: StateSnapshot) -> None:
        """Free the memory of a clone that is too old to be given."""
        if self._clone is clone:
            self._clone = None

    async def _new_clone(self) -> StateSnapshot:
        name = f"clone-{next(self._names)}"
        try:
            cloned = await self.link.request(ask.TakeSnapshot(name))
            if not isinstance(cloned, ask.SnapshotTaken):
                raise Refused(RefusalCode.NOT_READY, "no room for a clone now")
            return StateSnapshot(Given(loop_s(), cloned.clock_steps), self.payloads.read(name), bytes.fromhex(cloned.sha256))
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
