"""How two holders of neighbouring stages open a lane: a signed Lane from each side, checked like the Hellos of a meeting."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from gossamer.peer.swarm.membership import Membership
from gossamer.protocol.errors import BadMessage, Refused, TransportError
from gossamer.protocol.limits import NONCE_BYTES
from gossamer.protocol.messages.messages import Lane, Refusal, RunPhase
from gossamer.protocol.messages.terms import check_global_step, check_lane, check_phase
from gossamer.protocol.streams.transport import Stream

GREETING_S = 10.0  # for the partner's Lane


@dataclass(frozen=True, slots=True)
class LaneSide:
    """What this side says of itself when a lane opens."""

    membership: Membership
    global_step: int
    phase: RunPhase
    window: int  # that we grant, where the partner holds the lower stage
    records: tuple[bytes, ...]
    now_s: float  # Unix time

    async def open(self, stream: Stream, stage: int, rng: random.Random) -> Lane:
        """Open a lane to a holder of this stage, counted from one; return its Lane. Raises Refused, PeerMisbehaved and TransportError."""
        own = self._lane(stream, stage, rng, b"")
        await stream.send(own)
        theirs = await self._receive(stream)
        if isinstance(theirs, Refusal):
            raise Refused(theirs.code, theirs.detail)
        if not isinstance(theirs, Lane):
            raise BadMessage(f"a lane begins with a Lane, not with a {type(theirs).__name__}")
        membership = self.membership
        check_lane(theirs, membership.terms, membership.identity.peer_id, stream.partner, self.now_s, own_lane=own)
        self._check_clock(theirs)
        return theirs

    async def answer(self, stream: Stream, first: Lane, rng: random.Random) -> None:
        """Answer a Lane that `check` has accepted. Raises TransportError."""
        await stream.send(self._lane(stream, first.opening.stage, rng, first.opening.nonce))

    def check(self, stream: Stream, first: Lane) -> None:
        """Raise Refused or PeerMisbehaved unless we may answer this Lane."""
        check_lane(first, self.membership.terms, self.membership.identity.peer_id, stream.partner, self.now_s)
        self._check_clock(first)

    def _check_clock(self, theirs: Lane) -> None:
        check_phase(theirs.phase, self.phase)
        check_global_step(theirs.global_step, self.global_step, self.membership.terms)

    async def _receive(self, stream: Stream) -> object:
        try:
            async with asyncio.timeout(GREETING_S):
                return await stream.receive()
        except TimeoutError:
            raise TransportError(f"{stream.partner.short()} does not answer") from None

    def _lane(self, stream: Stream, stage: int, rng: random.Random, partner_nonce: bytes) -> Lane:
        membership = self.membership
        opening = membership.opening(stream.partner, rng.randbytes(NONCE_BYTES), partner_nonce, self.records)
        window = self.window if stage < opening.stage else 0
        return Lane(opening, self.global_step, self.phase, window).signed(membership.identity)
