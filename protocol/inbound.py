"""What holds for every inbound stream, whatever transport it came by: how many there may be, and how its handler is run."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import PeerMisbehaved, TransportError
from protocol.identity import PeerId
from protocol.refusals import Refused
from protocol.transport import Purpose, Stream, StreamHandler

log = logging.getLogger(__name__)

FIRST_FRAME_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamCaps:
    """Inbound streams at once; a retry may overlap the stream that it replaces, hence two."""

    per_purpose: int = 2  # from one partner
    total: int = 32


class Admission:
    """The inbound streams of one transport."""

    def __init__(self, caps: StreamCaps) -> None:
        self._caps = caps
        self._open: Counter[tuple[PeerId, Purpose]] = Counter()

    def enter(self, partner: PeerId, purpose: Purpose) -> bool:
        """Count one more stream, or return False when that would be too many."""
        if self._open[partner, purpose] >= self._caps.per_purpose or self._open.total() >= self._caps.total:
            return False
        self._open[partner, purpose] += 1
        return True

    def leave(self, partner: PeerId, purpose: Purpose) -> None:
        """Count one stream less."""
        self._open[partner, purpose] -= 1
        self._open += Counter()  # drop what stands at zero


class Arriving(Stream, Protocol):
    """A stream that can be waited for without taking its first message."""

    async def arrived(self) -> None:
        """Wait until the first frame is there, or the stream has ended."""
        ...


async def first_frame(stream: Arriving) -> bool:
    """Wait for the opener to say something; return False when it stays silent for FIRST_FRAME_S."""
    try:
        async with asyncio.timeout(FIRST_FRAME_S):
            await stream.arrived()
    except TimeoutError:
        log.info("%s opened a stream and stayed silent", stream.partner.short())
        return False
    return True


async def handle(handler: StreamHandler, purpose: Purpose, stream: Stream) -> None:
    """Run the handler, log how it failed, and close its stream."""
    try:
        await handler(purpose, stream)
    except (TransportError, PeerMisbehaved, Refused) as error:
        log.info("stream from %s: %s", stream.partner.short(), error)
    except Exception:
        log.exception("the handler of a stream from %s failed", stream.partner.short())
    finally:
        await stream.close()
