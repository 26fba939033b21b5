"""The rows of `peer peers`."""

from __future__ import annotations

from gossamer.peer.machine.events import ConnectionsChanged, MeetingDone
from gossamer.peer.machine.partners import MAX_PARTNERS, Partner, Partners, after_meeting, routes, with_routes


def met(partner: str, outcome: str, ts: float, round_trip_s: float = float("nan")) -> MeetingDone:
    return MeetingDone(partner, 0, outcome, "", "libp2p", 10, 20, 0.5, round_trip_s, ts=ts)


def test_a_row_sums_up_its_meetings() -> None:
    rows: Partners = {}
    for done in (met("a", "completed", 1, 0.2), met("a", "completed", 2, 0.1), met("a", "busy", 3), met("a", "gated", 4, 0.3)):
        rows = after_meeting(rows, done)
    assert rows == {"a": Partner("a", "", 0.1, completed=2, refused=1, failed=1, sent=40, received=80, seen=4)}


def test_a_route_is_known_while_a_connection_is_open() -> None:
    rows = with_routes(after_meeting({}, met("a", "completed", 1)), ConnectionsChanged({"a": "direct", "b": "relayed"}))
    assert (rows["a"].route, rows["b"].route) == ("direct", "relayed")
    assert routes(rows) == {"direct": 1, "relayed": 1}
    rows = with_routes(rows, ConnectionsChanged({"b": "local"}))
    assert (rows["a"].route, routes(rows)) == ("", {"local": 1})


def test_the_partner_seen_longest_ago_is_dropped_first() -> None:
    rows: Partners = {}
    for number in range(MAX_PARTNERS + 2):
        rows = after_meeting(rows, met(str(number), "completed", number))
    assert len(rows) == MAX_PARTNERS
    assert "1" not in rows and "2" in rows
    everybody = ConnectionsChanged({str(number): "direct" for number in range(2 * MAX_PARTNERS)})
    assert len(with_routes(rows, everybody)) == MAX_PARTNERS


def test_a_connected_partner_has_a_row_however_many_were_met_before() -> None:
    rows: Partners = {}
    for number in range(MAX_PARTNERS):
        rows = after_meeting(rows, met(str(number), "completed", 100 + number))
    rows = with_routes(rows, ConnectionsChanged({"0": "direct", "new": "relayed"}, ts=50))
    assert routes(rows) == {"direct": 1, "relayed": 1} and len(rows) == MAX_PARTNERS
    assert "0" in rows and "1" not in rows
    rows = after_meeting(rows, met("another", "completed", 1000))
    assert routes(rows) == {"direct": 1, "relayed": 1} and "another" in rows
