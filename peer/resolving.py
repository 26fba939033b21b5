"""Asking a partner again what it decided: the way out for a responder that lost the stream between its verdict and the decision."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from peer.partners import AddressBook
from protocol.errors import BadMessage, PeerMisbehaved, TransportError
from protocol.identity import PeerId
from protocol.messages import Outcome, Resolve
from protocol.transport import Purpose, Transport

TRY_S = 5.0  # for one question and its answer
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Resolver:
    """Asks on behalf of one peer in one run."""

    transport: Transport
    book: AddressBook
    run_id: bytes

    async def ask(self, partner: PeerId, meeting_id: bytes) -> Outcome:
        """Ask again and again until the partner answers. Bounded by the caller's cancellation."""
        while True:
            try:
                async with asyncio.timeout(TRY_S):
                    return await self._ask_once(partner, Resolve(self.run_id, meeting_id))
            except (TransportError, PeerMisbehaved, TimeoutError):
                await asyncio.sleep(PAUSE_S)

    async def _ask_once(self, partner: PeerId, question: Resolve) -> Outcome:
        stream = await self.transport.connect(partner, self.book.addresses(partner), Purpose.MEET)
        try:
            await stream.send(question)
            answer = await stream.receive()
        finally:
            await stream.close()
        if not isinstance(answer, Outcome) or answer.meeting_id != question.meeting_id:
            raise BadMessage(f"asked for an outcome, got {type(answer).__name__}")
        return answer
