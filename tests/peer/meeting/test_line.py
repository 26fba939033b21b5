from __future__ import annotations

import math

import pytest

from gossamer.peer.meeting.line import Direction, Line
from gossamer.protocol.limits import LEAST_BYTES_PER_S, SLOWEST_BYTES_PER_S


def test_no_rate_is_known_before_both_directions_were_used() -> None:
    line = Line()
    assert line.slower_bytes_per_s == 0.0
    line.carried(Direction.UP, 1000, 1.0, line.begin())
    assert (line.bytes_per_s(Direction.UP), line.slower_bytes_per_s) == (1000.0, 0.0)
    line.carried(Direction.DOWN, 4000, 1.0, 1)
    assert line.slower_bytes_per_s == 1000.0


def test_a_slow_partner_hardly_changes_the_measured_rate() -> None:
    line = Line()
    line.begin()
    for seconds in (1.0, 1.1, 0.9, 1.0, 30.0):
        line.carried(Direction.UP, 1000, seconds, 1)
    assert line.bytes_per_s(Direction.UP) == pytest.approx(1000, rel=0.2)


def test_rates_of_concurrent_meetings_are_added() -> None:
    line = Line()
    assert [line.begin(), line.begin()] == [1, 2]
    line.carried(Direction.UP, 1000, 2.0, 2)
    assert line.bytes_per_s(Direction.UP) == pytest.approx(1000)
    line.end()
    line.end()
    line.carried(Direction.DOWN, 1000, 1.0, line.begin())
    assert line.bytes_per_s(Direction.DOWN) == pytest.approx(1000)


def test_old_rates_expire() -> None:
    line = Line()
    line.begin()
    for rate in [1e6] * 20 + [1e3] * 16:
        line.carried(Direction.UP, 1000, 1000 / rate, 1)
    assert line.bytes_per_s(Direction.UP) == pytest.approx(1e3)


def test_the_operators_limit_caps_the_rate_and_stands_for_it_until_one_is_measured() -> None:
    line = Line()
    line.limits = {Direction.UP: 125_000.0, Direction.DOWN: math.inf}
    assert (line.bytes_per_s(Direction.UP), line.slower_bytes_per_s) == (125_000.0, 0.0)
    line.begin()
    for direction in Direction:
        line.carried(direction, 1_000_000, 1.0, 1)
    assert (line.bytes_per_s(Direction.DOWN), line.slower_bytes_per_s) == (1_000_000.0, 125_000.0)


def test_a_limit_bounds_the_concurrent_meetings_so_that_each_has_the_least_rate() -> None:
    line = Line()
    assert line.max_meetings == math.inf
    for limit in (LEAST_BYTES_PER_S, 125_000.0, 1e6):
        line.limits[Direction.UP] = limit
        assert limit / int(line.max_meetings) >= LEAST_BYTES_PER_S > SLOWEST_BYTES_PER_S
