"""Giving the manifest, or this peer's weights, to another peer: the answering half of the `Fetch` streams.

Who asks is checked like any partner; what a state costs (a copy, a hash, bytes of the line) is bounded per peer and in all. The other
half: peer/node/fetching.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from peer.link import records as ask
from peer.link.payload_folder import PayloadFolder
from peer.link.socket import LinkLost, NodeEnd
from peer.node.fetching import FRAME_S, receive, transfer_s
from peer.swarm.address_book import loop_s
from peer.swarm.standing import Standing
from protocol.errors import BadMessage, RefusalCode, Refused
from protocol.identity import Identity, PeerId
from protocol.limits import CHUNK_BYTES
from protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part
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


class StateDonor:
    """Gives our weights to members, within bounds: it counts the states that it gives, so there is one for all streams of a node."""

    def __init__(self, link: NodeEnd, payloads: PayloadFolder, standing: Standing, max_clock_gap_steps: int) -> None:
        self._link = link
        self._payloads = payloads
        self._standing = standing
        self._gap_steps = max_clock_gap_steps
        self._serving: set[PeerId] = set()
        self._given: dict[PeerId, list[Given]] = {}
        self._clone: StateSnapshot | None = None
        self._cloning = asyncio.Lock()
        self._names = itertools.count()

    async def give(self, partner: PeerId, send: Callable[[StateSnapshot], Awaitable[None]]) -> None:
        """Have `send` give a partner a clone of hardly any age. Raises Refused, and what `send` raises."""
        if len(self._serving) >= MAX_CLONES or partner in self._serving:
            raise Refused(RefusalCode.BUSY, "serving as many clones as I allow")
        if not self._standing.has_begun:
            raise Refused(RefusalCode.NOT_READY, "I have not begun to train")
        self._forget_given()
        if len(self._given.get(partner, ())) >= MAX_GIVEN:
            raise Refused(RefusalCode.BUSY, f"you have had my state {MAX_GIVEN} times lately")
        self._serving.add(partner)
        try:
            clone = await self._recent_clone()
            await send(clone)
            self._given.setdefault(partner, []).append(Given(loop_s(), clone.made.clock_steps))
        except LinkLost:
            raise Refused(RefusalCode.NOT_READY, "trainer restarting") from None
        finally:
            self._serving.discard(partner)

    def _forget_given(self) -> None:
        given = {peer: [one for one in given if self._is_fresh(one, REST_S, self._gap_steps)] for peer, given in self._given.items()}
        self._given = {peer: fresh for peer, fresh in given.items() if fresh}

    async def _recent_clone(self) -> StateSnapshot:
        """Return a clone of hardly any age, a new one if need be; whoever asks meanwhile gets the same."""
        async with self._cloning:
            if self._clone is None or not self._is_fresh(self._clone.made, CLONE_S, self._gap_steps // CLONE_SHARE):
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
            cloned = await self._link.request(ask.TakeSnapshot(name))
            if not isinstance(cloned, ask.SnapshotTaken):
                raise Refused(RefusalCode.NOT_READY, "no room for a clone now")
            return StateSnapshot(Given(loop_s(), cloned.clock_steps), self._payloads.read(name), bytes.fromhex(cloned.sha256))
        finally:
            self._payloads.remove(name)

    def _is_fresh(self, given: Given, most_s: float, most_steps: int) -> bool:
        return loop_s() - given.at_s < most_s and abs(self._standing.clock_steps - given.clock_steps) <= most_steps


@dataclass(frozen=True, slots=True)
class FetchServer:
    """Serve the manifest, and where there is a donor our state, to members of the run."""

    identity: Identity
    terms: RunTerms
    manifest: bytes
    now_s: Callable[[], float]  # Unix time
    donor: StateDonor | None = None

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Fetch` stream. Raises Refused and PeerMisbehaved for the partner, TransportError, TimeoutError."""
        request = await receive(stream)
        if not isinstance(request, FetchRequest):
            raise BadMessage(f"a fetch begins with a FetchRequest, not with a {type(request).__name__}")
        check_fetch(request, self.terms, self.identity.peer_id, stream.partner, self.now_s())
        if request.kind is ContentsKind.MANIFEST:
            await self._send(stream, request, memoryview(self.manifest), hashlib.sha256(self.manifest).digest(), 0)
        elif self.donor is None:
            raise Refused(RefusalCode.NOT_READY, "I have no weights")
        else:
            await self.donor.give(
                stream.partner, lambda clone: self._send(stream, request, clone.data, clone.sha256, clone.made.clock_steps)
            )

    async def _send(self, stream: Stream, request: FetchRequest, data: memoryview, digest: bytes, clock_steps: int) -> None:
        header = Contents(request.kind, len(data), digest, clock_steps).signed(self.identity, *request.asked)
        async with asyncio.timeout(transfer_s(len(data))):
            await stream.send(header)
            for offset in range(0, len(data), CHUNK_BYTES):
                async with asyncio.timeout(FRAME_S):
                    await stream.send(Chunk(Part.CONTENTS, offset, bytes(data[offset : offset + CHUNK_BYTES])))
