"""Curves that stay short, and what is told of them."""

from __future__ import annotations

import json
import math

import pytest

from gossamer.peer.machine.history import FEWEST_POINTS, MAX_POINTS, History, HistoryPoint


def point(second: float, step: int, loss: float) -> HistoryPoint:
    return HistoryPoint(1000.0 + second, step, loss, 10.0, 0.01, 0, 0, 0, 0)


def falling(seconds: int) -> History:
    """A loss that falls by 0.01 nats a step, two steps a second."""
    history = History()
    for second in range(seconds):
        history = history.add(point(second, 2 * second, 5.0 - 0.01 * 2 * second))
    return history


def test_a_curve_stays_short_and_keeps_both_ends() -> None:
    history = falling(10 * MAX_POINTS)
    assert MAX_POINTS // 2 <= len(history.points) <= MAX_POINTS
    assert history.points[-1].step == 2 * (10 * MAX_POINTS - 1) or history.points[-1].ts >= 1000 + 10 * MAX_POINTS - 2 * history.spacing_s
    assert history.points[0].ts - 1000 <= history.spacing_s
    gaps = {later.ts - sooner.ts for sooner, later in zip(history.points, history.points[1:], strict=False)}
    assert max(gaps) <= 2 * min(gaps)


def test_a_point_stands_for_all_losses_since_the_one_before() -> None:
    history = History().add(point(0, 0, 4.0)).add(point(0.5, 1, 3.0)).add(point(1.0, 2, 1.0))
    assert [entry.loss for entry in history.points] == [4.0, 2.0]


def test_a_loss_that_is_not_finite_is_no_figure() -> None:
    history = History().add(point(0, 0, math.nan)).add(point(1, 1, 2.0))
    assert [entry.loss for entry in history.points] == [None, 2.0]
    assert json.loads(json.dumps(history.to_json(), allow_nan=False))["points"]["loss"] == [None, 2.0]


def test_trend_and_end_follow_from_the_pace() -> None:
    history = falling(100)
    assert history.loss_trend == pytest.approx(-1.0)
    assert history.ends(1000) == pytest.approx(1000.0 + 500)


def test_trend_and_end_need_enough_points() -> None:
    history = falling(FEWEST_POINTS - 1)
    assert history.loss_trend is None
    assert history.ends(1000) is None


def test_a_trend_is_not_carried_on_beyond_what_was_trained() -> None:
    history = History()
    for second in range(60):
        history = history.add(point(second, second // 4, 10.0 - second / 10))
        assert history.loss_trend is None  # of 15 steps


def test_a_run_that_stands_still_has_no_end() -> None:
    history = History()
    for second in range(50):
        history = history.add(point(second, 7, 2.0))
    assert history.loss_trend is None
    assert history.ends(1000) is None
