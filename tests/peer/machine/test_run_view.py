"""The picture of a run: true for honest members, and not bent by what one member claims."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from gossamer.peer.machine.events import MemberSeen, MembersSeen
from gossamer.peer.machine.run_view import DEAF_S, MAX_CHANGES, MAX_MEMBERS, MAX_POINTS, POINT_S, SILENT_S, RunView, spread

NOW_S = 1_800_000_000.0
STEP_TOKENS = 512
TOTAL = 5000


def seen(number: int, now_s: float, step: int = 100, **claims: Any) -> MemberSeen:
    """Return a member that has made every step and published a record just now."""
    facts: dict[str, Any] = {"tokens": STEP_TOKENS * step, "own_steps": step, "loss": 2.0, "joined": int(NOW_S) - 5000, "carried_mb": 10}
    facts |= {"state": "training", "sequence": int(now_s), "expires": now_s + 300} | claims
    return MemberSeen(peer_id=f"12D3KooW{number:06}", step=step, **facts)


def view(*looks: tuple[float, list[MemberSeen]], is_program: bool = False) -> RunView:
    found = RunView()
    found.begin("ab", TOTAL, 0 if is_program else STEP_TOKENS)
    for now_s, members in looks:
        found.take(MembersSeen(tuple(members), ts=now_s))
    return found


def row(shown: dict[str, Any], number: int) -> dict[str, Any]:
    return next(row for row in shown["members"] if row["peer_id"].endswith(f"{number:06}"))


def test_shares_and_totals_of_honest_members_are_those_that_they_publish() -> None:
    shown = view((NOW_S, [seen(1, NOW_S, 300, tokens=100 * STEP_TOKENS, own_steps=100), seen(2, NOW_S, 300)])).to_json(NOW_S)
    assert (shown["tokens"], shown["live"], shown["ever"], shown["carried_mb"]) == (400 * STEP_TOKENS, 2, 2, 10)
    assert [row["share"] for row in shown["members"]] == [0.75, 0.25]
    run = view((NOW_S, [seen(number, NOW_S, step) for number, step in enumerate((100, 200, 300))])).to_json(NOW_S)
    assert [round(row["share"], 3) for row in run["members"]] == [0.4, 0.4, 0.2], "no more than the steps of the run allow"


@pytest.mark.parametrize("is_program", [False, True])
@pytest.mark.parametrize(
    "claims",
    [
        {"tokens": 1 << 53},
        {"tokens": 1 << 53, "own_steps": 1},
        {"tokens": 1 << 53, "own_steps": None},
        {"loss": 0.0},
        {"loss": 1000.0},
        {"step": 1 << 48, "tokens": 1 << 53, "own_steps": 1 << 35},
        {"carried_mb": 1 << 35},
        {"joined": 1},
        {"joined": 1 << 34},
        {"joined": 1 << 35},
    ],
    ids=str,
)
def test_no_claim_of_one_member_bends_the_picture(claims: dict[str, Any], is_program: bool) -> None:
    honest = [seen(number, NOW_S, 100 + number, loss=2.0 + number / 100) for number in range(10)]
    fair, bent = (view((NOW_S, members), is_program=is_program).to_json(NOW_S) for members in (
        [*honest, seen(99, NOW_S, 105)], [*honest, seen(99, NOW_S, **({"step": 105} | claims))],
    ))  # fmt: skip
    assert abs(bent["step"] - fair["step"]) <= 1
    many = 16 if is_program else 1.1
    assert bent["tokens"] <= fair["tokens"] + many * 106 * STEP_TOKENS
    assert bent["carried_mb"] <= fair["carried_mb"] + 16 * 10
    assert row(bent, 99)["share"] <= (0.62 if is_program else 0.11)
    for name in ("low", "loss", "high"):
        assert abs(bent["points"][name][-1] - fair["points"][name][-1]) <= 0.02, name
    liar = row(bent, 99)
    assert liar["joined"] is None or NOW_S - 100_000 < liar["joined"] <= NOW_S, "nobody joined in the future, or long before all others"
    assert (liar["step"] or 0) <= 16 * 110 and (liar["own_steps"] or 0) <= 16 * 110 and (liar["carried_mb"] or 0) <= 160


def test_a_newcomer_that_has_not_begun_takes_nothing_from_the_others() -> None:
    shown = view((NOW_S, [seen(1, NOW_S, 300), seen(2, NOW_S, 0, loss=None)])).to_json(NOW_S)
    assert (shown["step"], shown["tokens"]) == (300, 300 * STEP_TOKENS)
    taken_over = view((NOW_S, [seen(1, NOW_S, 300), seen(2, NOW_S, 200, own_steps=0, tokens=0, loss=None)])).to_json(NOW_S)
    assert taken_over["step"] == 300
    assert shown["points"]["loss"] == [2.0]


def test_one_member_that_alone_says_it_has_begun_decides_nothing() -> None:
    """It is the first moment of a run, or of this member's watch: nobody else has made a step."""
    honest = [seen(number, NOW_S, 100, own_steps=0, tokens=0, loss=None) for number in range(5)]
    for step in (TOTAL, 1 << 48):
        liar = seen(99, NOW_S, step, own_steps=1 << 30, tokens=1 << 53)
        found = view((NOW_S, [*honest, liar]))
        shown = found.to_json(NOW_S)
        assert (shown["step"], shown["tokens"]) == (100, 100 * STEP_TOKENS)
        assert found.points[-1].step == 100


def test_what_one_of_two_overstated_has_no_effect_once_others_are_there() -> None:
    liar = seen(99, NOW_S, TOTAL, own_steps=TOTAL, tokens=1 << 53)
    found = view((NOW_S, [liar]))
    later = NOW_S + 30
    found.take(MembersSeen(tuple(seen(number, later, 100) for number in range(3)), ts=later))
    shown = found.to_json(later)
    assert (shown["step"], shown["tokens"]) == (100, 400 * STEP_TOKENS)


def test_the_range_of_few_members_is_whole_and_that_of_five_leaves_one_out_on_each_side() -> None:
    assert spread([], []) == (None, None, None)
    assert spread([1.0, 3.0, 2.0, 9.0], [1.0] * 4) == (1.0, 2.5, 9.0)
    assert spread([1.0, 3.0, 2.0, 9.0, 0.0], [1.0] * 5) == (1.0, 2.0, 3.0)
    assert spread([1.0, 3.0, 2.0, 9.0, 9.0], [1.0, 1.0, 1.0, 0.5, 0.5]) == (1.0, 2.5, 9.0), "four votes"


@pytest.mark.parametrize("num_keys", [1, 3, 200])
def test_the_identities_of_one_invite_have_one_vote_however_many_they_are(num_keys: int) -> None:
    honest = [seen(number, NOW_S, 100 + number, loss=2.0 + number / 10, group=f"invite {number}") for number in range(6)]
    liars = [seen(100 + number, NOW_S, 4000, loss=0.1, group="invite 9") for number in range(num_keys)]
    point = view((NOW_S, [*honest, *liars])).points[-1]
    assert (point.step, point.loss, point.high) == (103, 2.2, 2.4)
    assert point.low == 2.0, "the outermost vote is left out"
    together = [seen(number, NOW_S, 100 + number, group="one network") for number in range(3)]
    assert view((NOW_S, together)).points[-1].step == 101, "members of one group alone have a vote each"


def test_the_own_row_is_as_new_as_this_peer_and_not_as_its_record() -> None:
    found = view((NOW_S, [seen(1, NOW_S, is_own=True), seen(2, NOW_S)]))
    found.note_own(103, 103 * STEP_TOKENS, 103, None)
    own, other = (row(found.to_json(NOW_S), number) for number in (1, 2))
    assert (own["step"], own["loss"], other["step"]) == (103, 2.0, 100)


def test_the_own_rate_is_that_between_two_records_also_if_the_row_is_newer() -> None:
    found = view((NOW_S, [seen(1, NOW_S, 100, is_own=True)]))
    found.note_own(118, 118 * STEP_TOKENS, 118, 2.0)
    found.take(MembersSeen((seen(1, NOW_S + 20, 120, is_own=True),), ts=NOW_S + 20))
    assert math.isclose(found.to_json(NOW_S + 20)["tokens_per_second"], STEP_TOKENS)


@pytest.mark.parametrize("state", ["paused", "silent"])
def test_the_step_of_the_run_is_that_of_training_members(state: str) -> None:
    now_s = NOW_S + SILENT_S + 1
    paused = seen(2, now_s, 50, state="paused")
    found = view((NOW_S, [seen(2, NOW_S, 50)]), (now_s, [seen(1, now_s, 300), *([paused] if state == "paused" else [])]))
    assert row(found.to_json(now_s), 2)["state"] == state
    assert found.to_json(now_s)["step"] == 300


def test_members_without_figures_are_shown_and_count_their_tokens() -> None:
    old = seen(1, NOW_S, own_steps=None, loss=None, joined=None, carried_mb=None)
    shown = view((NOW_S, [old])).to_json(NOW_S)
    assert shown["tokens"] == 100 * STEP_TOKENS
    assert (shown["members"][0]["joined"], shown["points"]["loss"]) == (None, [None])


def test_a_paused_member_whose_node_was_restarted_keeps_its_figures() -> None:
    paused = seen(1, NOW_S + 20, state="paused", tokens=0, own_steps=None, loss=None, joined=None, carried_mb=None)
    paused = replace(paused, step=0)
    shown = view((NOW_S, [seen(1, NOW_S, 90), seen(2, NOW_S, 90)]), (NOW_S + 20, [paused])).to_json(NOW_S + 20)
    kept = row(shown, 1)
    assert (kept["state"], kept["step"], kept["own_steps"], kept["tokens"], kept["share"]) == ("paused", 90, 90, 90 * STEP_TOKENS, 0.5)
    assert (kept["joined"], kept["carried_mb"]) == (int(NOW_S) - 5000, 10)


def test_a_member_that_comes_back_is_starting_until_it_trains_and_keeps_its_figures() -> None:
    found = view((NOW_S, [seen(1, NOW_S, 90), seen(2, NOW_S, 90)]))
    states = list[tuple[str, int, int]]()
    for place, (state, step) in enumerate((("paused", 90), ("starting", 90), ("starting", 0), ("training", 95)), 1):
        now_s, shows = NOW_S + 10 * place, state != "starting"
        figures = {} if shows else {"own_steps": None, "loss": None, "joined": None, "carried_mb": None}
        found.take(MembersSeen((replace(seen(1, now_s, 90, state=state, **figures), step=step),), ts=now_s))
        shown = row(found.to_json(now_s), 1)
        states.append((shown["state"], shown["step"], shown["own_steps"]))
    assert states == [("paused", 90, 90), ("starting", 90, 90), ("starting", 90, 90), ("training", 95, 90)]


def test_a_member_that_has_not_trained_yet_is_joining_and_not_paused() -> None:
    newcomer = replace(seen(1, NOW_S, state="starting", tokens=0, own_steps=None, loss=None, joined=None, carried_mb=None), step=0)
    found = view((NOW_S, [newcomer, seen(2, NOW_S)]))
    assert row(found.to_json(NOW_S), 1)["state"] == "joining"
    waiting = replace(seen(1, NOW_S + 5, own_steps=0, tokens=0, loss=None), step=0)  # its trainer waits for weights
    found.take(MembersSeen((waiting,), ts=NOW_S + 5))
    assert row(found.to_json(NOW_S + 5), 1)["state"] == "joining"
    found.take(MembersSeen((seen(1, NOW_S + 10, 120, own_steps=3, tokens=3 * STEP_TOKENS),), ts=NOW_S + 10))
    assert row(found.to_json(NOW_S + 10), 1)["state"] == "training"


def test_joins_leaves_and_returns_are_noted_with_their_times() -> None:
    found = view((NOW_S, [seen(1, NOW_S, is_own=True)]))
    later = NOW_S + 20
    found.take(MembersSeen((seen(1, later, is_own=True), seen(2, later, joined=int(later)), seen(3, later)), ts=later))
    gone = later + 20
    found.take(MembersSeen((seen(1, gone), seen(2, gone, expires=gone - 1), seen(3, gone)), ts=gone))
    back = gone + 20
    found.take(MembersSeen((seen(1, back), seen(2, back), seen(3, back)), ts=back))
    changes = [(change["kind"], change["peer"][-1], change["ts"]) for change in found.to_json(back)["changes"]]
    assert changes == [("came back", "2", back), ("left", "2", gone), ("first seen", "3", later), ("joined", "2", later)]


def test_a_member_that_dies_is_silent_and_then_gone_and_keeps_its_tokens() -> None:
    found = view((NOW_S, [seen(1, NOW_S, is_own=True), seen(2, NOW_S)]))
    for number in range(1, 17):
        now_s = NOW_S + 20 * number
        found.take(MembersSeen((seen(1, now_s, is_own=True), seen(2, NOW_S)), ts=now_s))
        found.look(now_s + 1)
    assert row(found.to_json(NOW_S + SILENT_S + 1), 2)["state"] == "left"
    assert found.to_json(NOW_S + 320)["changes"][0]["kind"] == "silent"
    assert found.to_json(NOW_S + 320)["tokens"] == 200 * STEP_TOKENS
    assert len(found.live()) == 1
    still = view((NOW_S, [seen(1, NOW_S), seen(2, NOW_S)])).to_json(NOW_S + SILENT_S + 1)
    assert row(still, 2)["state"] == "silent"


def test_nobody_is_said_to_leave_while_this_member_was_away() -> None:
    found = view((NOW_S, [seen(1, NOW_S), seen(2, NOW_S)]))
    again = NOW_S + 100 * DEAF_S
    found.look(again)
    assert len(found.live()) == 2 and not found.changes
    found.take(MembersSeen((seen(1, again),), ts=again))
    assert len(found.live()) == 1 and not found.changes


def test_what_was_seen_survives_a_restart_and_is_forgotten_with_another_run() -> None:
    found = view((NOW_S, [seen(1, NOW_S, is_own=True)]), (NOW_S + 60, [seen(1, NOW_S + 60), seen(2, NOW_S + 60)]))
    again = RunView.from_record(json.loads(json.dumps(found.to_record())))
    again.begin("ab", TOTAL, STEP_TOKENS)
    assert again.to_json(NOW_S + 61) | {"members": []} == found.to_json(NOW_S + 61) | {"members": []}
    assert len(again.members) == 2 and again.since == NOW_S
    again.begin("cd", TOTAL, STEP_TOKENS)
    assert not again.members and not again.points and not again.since


def test_all_sizes_are_bounded() -> None:
    found = RunView(total_steps=TOTAL)
    for number in range(2000):
        now_s = NOW_S + POINT_S * number
        crowd = [seen(1_000 * number + each, now_s, expires=now_s + 1) for each in range(3)]
        found.take(MembersSeen((seen(0, now_s, 100 + number, is_own=True), *crowd), ts=now_s))
    assert len(found.members) <= MAX_MEMBERS and len(found.changes) == MAX_CHANGES and len(found.points) <= MAX_POINTS
    assert found.points[0].ts == NOW_S and found.members["12D3KooW000000"].gone is None
    assert found.to_json(now_s)["since"] == NOW_S


def test_a_crowd_with_large_claims_does_not_displace_our_own_row() -> None:
    own, crowd = seen(0, NOW_S, is_own=True), [seen(number, NOW_S, tokens=1 << 50) for number in range(1, 601)]
    found = view((NOW_S, [own, *crowd]))
    assert len(found.members) == MAX_MEMBERS and found.members[own.peer_id].seen.is_own


def test_a_token_of_a_staged_run_passes_one_holder_of_each_stage_and_counts_once() -> None:
    found = RunView()
    found.begin("ab", TOTAL, STEP_TOKENS, stages=2)
    members = [seen(number, NOW_S, 100, stage=stage) for number, stage in enumerate((1, 1, 2, 2))]
    found.take(MembersSeen(tuple(members), ts=NOW_S))
    later = [seen(number, NOW_S + 10, 120, stage=stage) for number, stage in enumerate((1, 1, 2, 2))]
    found.take(MembersSeen(tuple(later), ts=NOW_S + 10))
    shown = found.to_json(NOW_S + 10)
    assert shown["tokens"] == 2 * 120 * STEP_TOKENS == shown["points"]["tokens"][-1]
    assert shown["tokens_per_second"] == pytest.approx(2 * 20 * STEP_TOKENS / 10)
    assert shown["one_more_tokens_per_second"] == 0.0, "one stage alone trains nothing"
    assert shown["stage_holders"] == [2, 2] and row(shown, 3)["stage"] == 2
    assert RunView.from_record(json.loads(json.dumps(found.to_record()))).stages == 2


def test_a_killed_holder_is_no_holder_of_its_stage_within_two_minutes() -> None:
    found = RunView()
    found.begin("ab", TOTAL, STEP_TOKENS, stages=2)
    found.take(MembersSeen((seen(0, NOW_S, 100, stage=2), seen(1, NOW_S, 100, stage=2)), ts=NOW_S))
    for at_s in range(20, 130, 20):  # the second one is killed; our own record is renewed like the first one's
        found.take(MembersSeen((seen(0, NOW_S + at_s, 100 + at_s, stage=2),), ts=NOW_S + at_s))
        assert found.to_json(NOW_S + at_s)["stage_holders"] == [0, 2]
    found.take(MembersSeen((seen(0, NOW_S + 121, 300, stage=2),), ts=NOW_S + 121))
    shown = found.to_json(NOW_S + 121)
    assert (shown["stage_holders"], shown["stage_unheard"], shown["live"]) == ([0, 1], [0, 1], 2)
    assert view((NOW_S, [seen(1, NOW_S, 100)])).to_json(NOW_S)["stage_unheard"] == []


def test_the_rate_of_the_run_and_what_one_more_would_add_follow_from_two_records_of_each() -> None:
    looks = [(NOW_S + at_s, [seen(number, NOW_S + at_s, 100 + int(at_s)) for number in (1, 2, 3)]) for at_s in (0, 20)]
    shown = view(*looks).to_json(NOW_S + 20)
    assert math.isclose(shown["tokens_per_second"], 3 * STEP_TOKENS)
    assert math.isclose(shown["one_more_tokens_per_second"], STEP_TOKENS)
