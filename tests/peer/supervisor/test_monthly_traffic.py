"""The count of a month: over restarts of node and peer, into the next month, and what it is used up for."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.supervisor.pauses import LAST_PAUSE, MonthlyTraffic, Pauses

NOON_S = datetime(2026, 11, 22, 12, 0).timestamp()
DECEMBER_S = datetime(2026, 12, 1).timestamp()


def kept(month: MonthlyTraffic, path: Path) -> None:
    path.write_text(json.dumps(month.record()))


def test_it_goes_on_over_restarts_of_node_and_peer(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    month = MonthlyTraffic(path, NOON_S)
    for total in (100, 250, 30, 40):  # of a node, and of the one after it
        month.count(total, NOON_S)
    assert month.num_bytes == 290
    kept(month, path)
    again = MonthlyTraffic(path, NOON_S + 60)
    again.count(10, NOON_S + 60)
    assert again.num_bytes == 300


def test_another_month_begins_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    month = MonthlyTraffic(path, NOON_S)
    month.count(100, NOON_S)
    kept(month, path)
    assert MonthlyTraffic(path, DECEMBER_S).num_bytes == 0
    month.count(150, DECEMBER_S)
    assert month.num_bytes == 50


def test_a_clock_that_is_wrong_for_a_while_loses_no_count(tmp_path: Path) -> None:
    """A machine without a battery for its clock starts in another year, and network time sets it minutes later."""
    path = tmp_path / "traffic.json"
    month = MonthlyTraffic(path, NOON_S)
    month.count(2 * 10**9, NOON_S)
    kept(month, path)
    again = MonthlyTraffic(path, 0.0)
    again.count(100, 1.0)
    again.count(250, 2.0)
    again.count(400, NOON_S)
    assert again.num_bytes == 2 * 10**9 + 150
    kept(again, path)
    assert MonthlyTraffic(path, NOON_S).num_bytes == 2 * 10**9 + 150


def test_a_leave_that_waits_for_its_meeting_goes_before_a_month_that_is_used_up(tmp_path: Path) -> None:
    pauses, config = Pauses(Home(tmp_path)), PeerConfig(home=tmp_path, monthly_traffic="1 GB")
    pauses.month.count(10**9, time.time())
    used_up = pauses.current_pause(config)
    pauses.asked = LAST_PAUSE
    assert used_up is not None and used_up.is_offline and pauses.current_pause(config) == LAST_PAUSE


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
