"""Statistics of each partner: route, traffic, and results of meetings. Folded from events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gossamer.peer.machine.events import ConnectionsChanged, MeetingDone

MAX_PARTNERS = 256  # the most recently seen; a peer in a large swarm meets more over the weeks
COUNTED_AS = {"completed": "completed", "busy": "refused", "refused": "refused"}  # any other outcome of a meeting: failed


@dataclass(frozen=True, slots=True)
class Partner:
    """One row of `peer peers`. Counts are since this start of the peer; a row is frozen, `met` gives the next one."""

    peer_id: str
    route: str = ""  # local direct punched relayed; empty while no connection is open
    round_trip_s: float | None = None  # shortest seen: one answer's way there and back, and a write to the partner's disk
    completed: int = 0
    refused: int = 0  # busy ones too
    failed: int = 0
    sent: int = 0  # bytes
    received: int = 0
    seen: float = 0.0  # Unix seconds: end of the last meeting, however it ended

    def met(self, done: MeetingDone) -> Partner:
        """Return the row after a meeting."""
        shortest_s = min(
            (value for value in (self.round_trip_s, done.round_trip_s) if value is not None and not math.isnan(value)), default=None
        )
        kind = COUNTED_AS.get(done.outcome, "failed")
        return replace(
            self,
            round_trip_s=shortest_s,
            completed=self.completed + (kind == "completed"),
            refused=self.refused + (kind == "refused"),
            failed=self.failed + (kind == "failed"),
            sent=self.sent + done.bytes_sent,
            received=self.received + done.bytes_received,
            seen=done.ts,
        )


Partners = Mapping[str, Partner]  # by peer id


def after_meeting(partners: Partners, done: MeetingDone) -> Partners:
    """Return the rows after a meeting, MAX_PARTNERS at most."""
    return _newest({**partners, done.partner: partners.get(done.partner, Partner(done.partner)).met(done)})


def with_routes(partners: Partners, changed: ConnectionsChanged) -> Partners:
    """Return the rows with the routes of the connections that are open now, MAX_PARTNERS at most."""
    known = {peer_id: replace(row, route=changed.routes.get(peer_id, "")) for peer_id, row in partners.items()}
    news = {peer_id: Partner(peer_id, route, seen=changed.ts) for peer_id, route in changed.routes.items() if peer_id not in known}
    return _newest(known | news)


def _newest(rows: Partners) -> Partners:
    """Return MAX_PARTNERS of the rows: those without a connection make room first, and then those that were seen longest ago."""
    if len(rows) <= MAX_PARTNERS:
        return rows
    order = sorted(rows, key=lambda peer_id: (bool(rows[peer_id].route), rows[peer_id].seen))
    dropped = set(order[: len(rows) - MAX_PARTNERS])
    return {peer_id: row for peer_id, row in rows.items() if peer_id not in dropped}


def without_routes(partners: Partners) -> Partners:
    """Return the rows of a peer without a connection."""
    return {peer_id: replace(row, route="") for peer_id, row in partners.items()}


def routes(partners: Partners) -> dict[str, int]:
    """Count the partners to which a connection is open, by route."""
    return dict(Counter(row.route for row in partners.values() if row.route))
