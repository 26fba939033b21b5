"""A member that joins late is told the curve of the run by others, within budgets, and tells only what it has seen itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.peer.machine.events import CurveTold, Event, MembersSeen
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.machine.told_curve import RunPoint
from gossamer.peer.node.run_curve import READ_S, OwnCurve, encoded, points_of
from gossamer.protocol.limits import CURVE_POINTS
from gossamer.protocol.messages.replies import RunCurve
from tests.peer.machine.test_run_view import NOW_S, STEP_TOKENS, TOTAL, seen
from tests.peer.machine.test_told_curve import told
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm

QUIET = tiny_manifest(run={"total_steps": 100_000})


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(tmp_path, manifest=QUIET)


def kept(home: Home, *, with_older: bool = False) -> RunView:
    """Keep a view of one point in a home."""
    view = RunView()
    view.begin("ab", TOTAL, STEP_TOKENS)
    view.take(MembersSeen((seen(1, NOW_S, 100, loss=2.5),), ts=NOW_S))
    if with_older:
        view.take_curve(told("another", 1.0))
    home.run.write_text(json.dumps(view.to_record()))
    return view


async def test_a_late_member_is_told_by_the_others(swarm: Swarm) -> None:
    residents = swarm.start(3)
    for resident in residents:
        kept(resident.home)
    await swarm.until(lambda: all(peer.num_completed for peer in residents))
    joiner = swarm.add(waits_for_start=True, is_founder=False)
    events: list[Event] = []
    joiner.forward = events.append
    joiner.start()
    await swarm.until(lambda: sum(isinstance(event, CurveTold) for event in events) == 3, within_s=100.0)
    answers = [event for event in events if isinstance(event, CurveTold)]
    assert {answer.source for answer in answers} == {str(peer.peer_id) for peer in residents}
    assert answers[0].points == ((int(NOW_S), 100, 2.5, 2.5, 2.5, 1, 100.0 * STEP_TOKENS),)


def test_it_tells_only_what_it_has_seen_itself_and_reads_the_file_seldom(tmp_path: Path) -> None:
    home, now_s = Home(tmp_path / "home"), [0.0]
    home.create()
    curve = OwnCurve(home, lambda: now_s[0])
    assert curve.to_bytes() == b"", "there is none yet"
    assert kept(home, with_older=True).older
    assert curve.to_bytes() == b"", "it has looked a moment ago"
    now_s[0] = READ_S
    assert RunCurve.from_bytes(curve.to_bytes()).times_s == (int(NOW_S),)


def test_a_long_curve_is_told_in_few_points_and_a_broken_one_not_at_all() -> None:
    points = [RunPoint(NOW_S + number, number, None, None, None, 1, 0.0) for number in range(10 * CURVE_POINTS)]
    told = RunCurve.from_bytes(encoded(points))
    assert len(told.times_s) == CURVE_POINTS and points_of(told)[1] == (NOW_S + 10, 10, None, None, None, 1, 0)
    assert encoded([RunPoint(NOW_S, -1, None, None, None, 1, 0.0)]) == b""
