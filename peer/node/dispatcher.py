"""The dispatcher: the one handler of inbound streams, from the start of the process to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gossamer.peer.node.meetings import send_last
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.errors import PeerMisbehaved, RefusalCode, Refused, TransportError
from gossamer.protocol.messages.messages import refusal_of
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import loop_s

Answer = Callable[[Stream], Awaitable[None]]
"""Serves an inbound stream of one purpose. Raises Refused and PeerMisbehaved for the partner, TransportError."""


@dataclass(slots=True)
class Dispatcher:
    """Dispatches inbound streams. `answering` returns what serves a purpose now, or None; then the refusal's detail is `not_ready`."""

    book: AddressBook
    not_ready: str
    answering: Callable[[Purpose], Answer | None]

    async def answer(self, purpose: Purpose, stream: Stream) -> None:
        """Serve an inbound stream, which its transport closes. Raises PeerMisbehaved, for the log, when the partner broke the protocol."""
        try:
            answering = self.answering(purpose)
            if answering is None:
                raise Refused(RefusalCode.NOT_READY, self.not_ready)
            await answering(stream)
        except Refused as refusal:
            await send_last(stream, refusal_of(refusal))
        except PeerMisbehaved as error:
            self.book.ban(stream.partner, loop_s(), str(error))
            await send_last(stream, refusal_of(error))
            raise
        except (TransportError, TimeoutError):
            return
