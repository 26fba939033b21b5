"""The curve of a run before this member came, from what others tell: no single voter bends or lengthens it."""

from __future__ import annotations

import json

from gossamer.peer.machine.events import CurveTold, MembersSeen
from gossamer.peer.machine.run_view import RunView
from gossamer.peer.machine.told_curve import MAX_POINTS, MAX_SOURCES, merged
from tests.peer.machine.test_run_view import NOW_S, STEP_TOKENS, TOTAL, seen

HOUR_S = 3600.0


def told(source: str, hours: float, *, group: str = "", is_issuer: bool = False, loss: float = 0.0, step: int = 0) -> CurveTold:
    """Return what a member tells that has watched for so many hours, a point every minute: a step in ten seconds."""
    points = []
    for minute in range(int(60 * hours)):
        ts = NOW_S - 3600 * hours + 60 * minute
        true_step = 1000 + int((ts - NOW_S) / 10) // 2
        middle = loss or 3.0 - true_step / 1000
        points.append((ts, step or max(1, true_step), middle, middle - 0.1, middle + 0.1, 4, 1000.0 * true_step))
    return CurveTold(source, group, is_issuer, tuple(points))


def by_source(*answers: CurveTold) -> dict[str, CurveTold]:
    return {answer.source: answer for answer in answers}


def test_what_two_votes_have_seen_is_shown_and_what_one_alone_claims_is_not() -> None:
    points = merged(by_source(told("a", 2.0), told("b", 1.0), told("c", 0.5)), NOW_S, TOTAL)
    assert len(points) == MAX_POINTS
    assert points[0].ts == NOW_S - HOUR_S, "only one member has seen what was before"
    assert [point.step for point in points] == sorted(point.step for point in points)
    assert points[-1].loss is not None and abs(points[-1].loss - 2.0) < 0.05


def test_an_issuer_or_the_only_one_that_answers_is_believed_for_the_beginning() -> None:
    assert merged(by_source(told("a", 2.0, is_issuer=True), told("b", 1.0)), NOW_S, TOTAL)[0].ts == NOW_S - 2 * HOUR_S
    assert merged(by_source(told("a", 2.0)), NOW_S, TOTAL)[0].ts == NOW_S - 2 * HOUR_S


def test_a_group_that_lies_has_one_vote_however_many_answer_for_it() -> None:
    honest = [told("a", 1.0, group="one"), told("b", 1.0, group="two")]
    liars = [told(f"m{number}", 3.0, group="mallory", loss=9.0, step=TOTAL) for number in range(3)]
    points = merged(by_source(*honest, *liars), NOW_S, TOTAL)
    assert points[0].ts == NOW_S - HOUR_S
    assert all(point.loss is not None and point.loss < 3.0 and point.step < 1000 for point in points)


def test_points_that_cannot_be_true_are_left_out() -> None:
    odd = CurveTold("a", "", False, ((NOW_S - 50, TOTAL + 1, None, None, None, 1, 0.0), (NOW_S - 40, 5, None, None, None, 1, 0.0),
        (NOW_S - 45, 6, None, None, None, 1, 0.0), (NOW_S - 30, 4, None, None, None, 1, 0.0), (NOW_S - 20, 9, None, None, None, 1, 0.0),
        (NOW_S + 20, 10, None, None, None, 1, 0.0)))  # fmt: skip
    points = merged(by_source(odd), NOW_S, TOTAL)
    assert {point.step for point in points} == {5, 9} and all(point.loss is None for point in points)
    assert merged({}, NOW_S, TOTAL) == []


def test_a_view_shows_what_others_saw_before_its_own_points_and_keeps_it_over_a_restart() -> None:
    view = RunView()
    view.begin("ab", TOTAL, STEP_TOKENS)
    view.take(MembersSeen((seen(1, NOW_S, 1000, is_own=True),), ts=NOW_S))
    for number in range(MAX_SOURCES + 2):
        view.take_curve(told(f"source {number}", 1.0))
    shown = view.to_json(NOW_S)
    assert (shown["told"], len(shown["points"]["ts"]), len(view.told)) == (MAX_POINTS, MAX_POINTS + 1, MAX_SOURCES)
    assert shown["points"]["ts"] == sorted(shown["points"]["ts"])
    again = RunView.from_record(json.loads(json.dumps(view.to_record())))
    assert again.to_json(NOW_S)["points"] == shown["points"]
    again.take_curve(told("mallory", 5.0, loss=9.0))
    assert again.to_json(NOW_S)["points"] == shown["points"], "one answer alone does not replace what several gave"
    again.begin("cd", TOTAL, STEP_TOKENS)
    assert not again.older
