"""What holds for every inbound stream, whatever transport it came by: how many there may be, and how its handler is run."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import PeerMisbehaved, Refused, TransportError
from protocol.identity import PeerId
from protocol.streams.transport import Purpose, Stream, StreamHandler

log = logging.getLogger(__name__)

FIRST_FRAME_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamCaps:
    """Inbound streams at once; a retry may overlap the stream that it replaces, hence two."""

    per_purpose: int = 2  # from one partner
    total: int = 32


@dataclass(eq=False, slots=True)
class Place:
    """One inbound stream among those that are open."""

    partner: PeerId
    purpose: Purpose
    is_heard: bool = False  # its opener has said something
    is_lost: bool = False  # it had said nothing, and somebody else came
    patience: asyncio.Timeout | None = None  # while its first frame is waited for

    def lose(self) -> None:
        """Have its `first_frame` give up at once."""
        self.is_lost = True
        if self.patience is not None and not self.patience.expired():
            self.patience.reschedule(asyncio.get_running_loop().time())


class Admission:
    """The inbound streams of one transport. Where all places are taken, a newcomer gets that of the stream that is silent the longest."""

    def __init__(self, caps: StreamCaps) -> None:
        self._caps = caps
        self._places: dict[Place, None] = {}  # oldest first

    def enter(self, partner: PeerId, purpose: Purpose) -> Place | None:
        """Take a place for one more stream, or return None when that would be too many."""
        num_own = sum((place.partner, place.purpose) == (partner, purpose) for place in self._places)
        if num_own >= self._caps.per_purpose or (len(self._places) >= self._caps.total and not self._displace()):
            return None
        place = Place(partner, purpose)
        self._places[place] = None
        return place

    def leave(self, place: Place) -> None:
        """Give a place back, if it was not lost before."""
        self._places.pop(place, None)

    def _displace(self) -> bool:
        silent = next((place for place in self._places if not place.is_heard), None)
        if silent is None:
            return False
        del self._places[silent]
        silent.lose()
        return True


class Arriving(Stream, Protocol):
    """A stream that can be waited for without taking its first message."""

    async def arrived(self) -> None:
        """Wait until the first frame is there, or the stream has ended."""
        ...


async def first_frame(stream: Arriving, place: Place) -> bool:
    """Wait for the opener to say something; return False when it stays silent for FIRST_FRAME_S, or loses its place before that."""
    try:
        async with asyncio.timeout(0.0 if place.is_lost else FIRST_FRAME_S) as place.patience:
            await stream.arrived()
    except TimeoutError:
        log.info("%s opened a stream and stayed silent", stream.partner.short())
        return False
    finally:
        place.patience = None
    place.is_heard = True
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
