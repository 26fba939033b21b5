"""An admission table under test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gossamer.protocol.identity import PeerId
from gossamer.protocol.streams.admission import Admission, InboundConnection, StreamCaps
from gossamer.protocol.streams.transport import Purpose
from tests.protocol.peers import seeded

A, B, C, D = (seeded(number).peer_id for number in range(1, 5))


class TableUnderTest:
    """A table, and the time at which each of its visits was dropped."""

    def __init__(
        self,
        caps: StreamCaps | None = None,
        is_banned: Callable[[PeerId], bool] = lambda partner: False,
        has_met: Callable[[PeerId], bool] = lambda partner: False,
    ) -> None:
        self.table = Admission(caps, is_banned, has_met)
        self.dropped_s: dict[InboundConnection, float] = {}
        self.carried_bytes = 0  # in total

    def admit(self, partner: PeerId, observed: str = "") -> InboundConnection | None:
        def drop() -> None:
            assert connection is not None
            self.dropped_s[connection] = asyncio.get_running_loop().time()

        connection = self.table.admit(partner, drop, lambda: self.carried_bytes, observed)
        return connection

    def admitted(self, partner: PeerId, observed: str = "") -> InboundConnection:
        connection = self.admit(partner, observed)
        assert connection is not None
        return connection

    def in_call(self, partner: PeerId, purpose: Purpose = Purpose.MEET, observed: str = "") -> InboundConnection:
        connection = self.admitted(partner, observed)
        assert self.table.begin_call(connection, purpose)
        assert self.table.note_message(connection)
        return connection
