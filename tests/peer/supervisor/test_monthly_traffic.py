"""The count of a month: over restarts of node and peer, into the next month, and what it is used up for."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from gossamer.peer.supervisor.pauses import SAVE_S, MonthlyTraffic

NOON_S = datetime(2026, 11, 22, 12, 0).timestamp()
DECEMBER_S = datetime(2026, 12, 1).timestamp()


def test_it_goes_on_over_restarts_of_node_and_peer(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    month = MonthlyTraffic(path, NOON_S)
    for total in (100, 250, 30, 40):  # of a node, and of the one after it
        month.count(total, NOON_S)
    assert month.num_bytes == 290
    month.save(NOON_S)
    again = MonthlyTraffic(path, NOON_S + 60)
    again.count(10, NOON_S + 60)
    assert again.num_bytes == 300


def test_it_is_written_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    month = MonthlyTraffic(path, NOON_S)
    month.count(100, NOON_S + 1)
    assert not path.exists()
    month.count(200, NOON_S + SAVE_S)
    assert MonthlyTraffic(path, NOON_S).num_bytes == 200


def test_another_month_begins_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    month = MonthlyTraffic(path, NOON_S)
    month.count(100, NOON_S)
    month.save(NOON_S)
    assert MonthlyTraffic(path, DECEMBER_S).num_bytes == 0
    month.count(150, DECEMBER_S)
    assert month.num_bytes == 50


def test_a_clock_that_is_wrong_for_a_while_loses_no_count(tmp_path: Path) -> None:
    """A machine without a battery for its clock starts in another year, and network time sets it minutes later."""
    path = tmp_path / "traffic.json"
    month = MonthlyTraffic(path, NOON_S)
    month.count(2 * 10**9, NOON_S)
    month.save(NOON_S)
    again = MonthlyTraffic(path, 0.0)
    again.count(100, 1.0)
    again.count(250, 2.0 + SAVE_S)
    again.count(400, NOON_S)
    assert again.num_bytes == 2 * 10**9 + 150
    again.count(500, NOON_S - 7200)
    assert MonthlyTraffic(path, NOON_S).num_bytes == 2 * 10**9 + 250, "a clock that is set back delays no write"


def test_an_unreadable_count_starts_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    path.write_text('{"month": 3')
    assert MonthlyTraffic(path, NOON_S).num_bytes == 0


def test_a_month_that_is_used_up_takes_the_peer_off_the_network_until_the_next(tmp_path: Path) -> None:
    month = MonthlyTraffic(tmp_path / "traffic.json", NOON_S)
    month.count(10**9, NOON_S)
    assert month.pause("2 GB", 2e9, NOON_S) is None
    rest = month.pause("1 GB", 1e9, NOON_S)
    assert rest is not None and rest.is_offline
    assert rest.reason == "the traffic of this month, 1 GB, is used up until Tue 01 Dec, 00:00"
    assert "monthly_traffic" in rest.way_out
    assert month.pause("1 GB", 1e9, DECEMBER_S) is None
