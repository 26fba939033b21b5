"""The members of the run as this peer knows them, for those who look at the run: by their newest signed records, its own among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gossamer.peer.machine.events import Event, MemberSeen, MembersSeen
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.protocol.messages.records import MemberRecord


class MemberReporter:
    """Emits the members whose record is new."""

    def __init__(self, emit: Callable[[Event], None], peer_exchange: PeerExchange) -> None:
        self._emit = emit
        self._peer_exchange = peer_exchange
        self._reported: dict[bytes, int] = {}

    def report(self) -> None:
        """Emit the members whose record is new since the last call."""
        records = list(self._records())
        if news := [record for record in records if self._reported.get(record.peer_id.raw) != record.sequence]:
            self._emit(MembersSeen(tuple(map(self._seen, news))))
        self._reported = {record.peer_id.raw: record.sequence for record in records}

    def _records(self) -> Iterator[MemberRecord]:
        if self._peer_exchange.own is not None:
            yield self._peer_exchange.own
        yield from self._peer_exchange.book.records()

    def _seen(self, record: MemberRecord) -> MemberSeen:
        exchange, figures = self._peer_exchange, record.figures
        return MemberSeen(
            peer_id=str(record.peer_id),
            state="paused" if record.paused else "finished" if record.finished else "training",
            sequence=record.sequence,
            expires=record.expires_s - exchange.time.ahead_s,
            step=record.global_step,
            tokens=record.tokens,
            own_steps=figures.own_steps if figures else None,
            loss=figures.loss if figures else None,
            joined=figures.joined_s if figures else None,
            carried_mb=figures.carried_mb if figures else None,
            is_own=record is exchange.own,
        )
