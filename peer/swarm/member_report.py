"""The members of the run as this peer knows them, for those who look at the run: by their newest signed records, its own among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gossamer.peer.machine.events import Event, MemberSeen, MembersSeen
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.tasks import loop_s


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
            groups = self._groups(records)
            self._emit(MembersSeen(tuple(self._seen(record, groups.get(record.peer_id, "")) for record in news)))
        self._reported = {record.peer_id.raw: record.sequence for record in records}

    def _records(self) -> Iterator[MemberRecord]:
        if self._peer_exchange.own is not None:
            yield self._peer_exchange.own
        yield from self._peer_exchange.book.records(loop_s())

    def _groups(self, records: Sequence[MemberRecord]) -> dict[PeerId, str]:
        """Return the Sybil groups of the members by name; in an open run, this peer belongs to none."""
        exchange = self._peer_exchange
        entries = [exchange.book.get(record.peer_id) for record in records if record is not exchange.own]
        if exchange.own is not None and exchange.terms.access != "open":
            entries.append(KnownPeer(exchange.own.peer_id, record=exchange.own))
        return SybilGroups(exchange.book, exchange.terms).names(entries)

    def _seen(self, record: MemberRecord, group: str) -> MemberSeen:
        exchange, figures = self._peer_exchange, record.figures
        return MemberSeen(
            peer_id=str(record.peer_id),
            state=_state(record),
            sequence=record.sequence,
            expires=record.expires_s - exchange.time.ahead_s,
            step=record.global_step,
            tokens=record.tokens,
            own_steps=figures.own_steps if figures else None,
            loss=figures.loss if figures else None,
            joined=figures.joined_s if figures else None,
            carried_mb=figures.carried_mb if figures else None,
            is_own=record is exchange.own,
            stage=record.stage,
            group=group,
        )


def _state(record: MemberRecord) -> str:
    if record.is_starting:
        return "starting"
    return "paused" if record.paused else "finished" if record.finished else "training"
