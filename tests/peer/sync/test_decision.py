"""When another peer's weights are wanted: what is known, and what is done about it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gossamer.peer.link.messages import FollowClock, Start, StepBack
from gossamer.peer.sync.decision import (
    ALONE_S,
    APART_S,
    STEP_BACK_S,
    UNSERVED_S,
    Act,
    Decision,
    SyncView,
    Wanted,
    decide,
    fragment_to_sync,
    wanted,
)

IN_STEP = SyncView(state_bytes=8, total_steps=1000, gap_steps=60, own_global_step=300, typical_steps=300, others_steps=300)
BEGINNING = replace(IN_STEP, own_global_step=0, typical_steps=0, others_steps=0, is_waiting=True)
BEHIND = replace(IN_STEP, typical_steps=400, others_steps=400)
AHEAD = replace(IN_STEP, typical_steps=100, others_steps=100, is_refused=True, is_far=True, refused_s=math.inf, has_partners=True)

APART = replace(IN_STEP, is_staged=True, stages_steps=600, apart_s=APART_S)  # the other holders of its stage, if any, are where it is


def fetch(earliest_steps: int, latest_steps: int) -> Wanted:
    return Wanted(8, earliest_steps, latest_steps, 1000)


TO_BEGIN = [
    ("a founder starts at once where nobody is known", {"has_start": True, "is_founder": True}, Start()),
    ("one whose run has begun without it asks", {"has_start": True, "is_founder": True, "others_have_begun": True}, Act.ASK_CLOCKS),
    ("a founder without the initial weights asks", {"is_founder": True}, Act.ASK_CLOCKS),
    ("any other peer asks", {"has_start": True}, Act.ASK_CLOCKS),
    ("and starts while the others have hardly begun", {"has_start": True, "are_steps_fresh": True, "others_steps": 6}, Start()),
    ("later it takes a state", {"has_start": True, "are_steps_fresh": True, "others_steps": 7}, fetch(0, 67)),
    ("without the initial weights it always does", {"are_steps_fresh": True, "others_steps": 1}, fetch(0, 61)),
    ("so does a founder that comes back", {"is_founder": True, "are_steps_fresh": True, "others_steps": 500}, fetch(440, 560)),
    ("no state is further than the run", {"are_steps_fresh": True, "others_steps": 990}, fetch(930, 1000)),
    ("any state will do where no global step is known", {"are_steps_fresh": True}, fetch(0, 1000)),
]  # fmt: skip


@pytest.mark.parametrize(("known", "decision"), [row[1:] for row in TO_BEGIN], ids=[row[0] for row in TO_BEGIN])
def test_how_a_peer_begins(known: dict[str, object], decision: Decision) -> None:
    assert decide(replace(BEGINNING, **known)) == decision  # type: ignore[arg-type]


FRESH = {"are_steps_fresh": True}
LEFT = {"is_back": True, "left_behind_steps": 700}
TO_STAY = [
    ("in step: train on", IN_STEP, {}, None),
    ("behind by what partners may be apart: train on", IN_STEP, {"typical_steps": 360, "others_steps": 360}, None),
    ("behind by more: ask first", BEHIND, {}, Act.ASK_CLOCKS),
    ("and take a state that is further than ours", BEHIND, FRESH, fetch(340, 460)),
    ("never one of fewer steps than ours", IN_STEP, {**FRESH, "typical_steps": 361, "gap_steps": 60}, fetch(301, 421)),
    ("what has been behind only by announcements is not", IN_STEP, FRESH, None),
    ("behind, while meetings complete: train on", BEHIND, {**FRESH, "is_in_company": True}, None),
    ("refused, but by no signed global step: ask", IN_STEP, {"is_refused": True}, Act.ASK_CLOCKS),
    ("and train on", IN_STEP, {"is_refused": True, **FRESH}, None),
    ("refused, and far: take a state", BEHIND, {**FRESH, "is_refused": True, "is_far": True, "is_in_company": True}, fetch(361, 460)),
    ("far ahead: ask", AHEAD, {}, Act.ASK_CLOCKS),
    ("far ahead for long: keep the weights, set the global step back", AHEAD, FRESH, StepBack(145)),
    ("far ahead, but not for long: wait for the others", AHEAD, {**FRESH, "refused_s": STEP_BACK_S}, None),
    ("far ahead, and a partner takes our state: let it catch up", AHEAD, {**FRESH, "refused_s": 500.0, "giving_s": 500.0}, None),
    ("a holder of a stage never goes back", AHEAD, {**FRESH, "is_staged": True}, None),
    ("but not longer than that takes", AHEAD, {**FRESH, "refused_s": 561.0, "giving_s": 500.0}, StepBack(145)),
    ("back from an absence: ask", IN_STEP, {"is_back": True}, Act.ASK_CLOCKS),
    ("and train on where nobody went on without us", IN_STEP, {**FRESH, "is_back": True}, None),
    ("left behind, though most were away too: catch up", IN_STEP, {**FRESH, **LEFT, "is_in_company": True}, fetch(640, 760)),
    ("what went on long ago is no reason to catch up", IN_STEP, {**FRESH, **LEFT, "is_back": False}, None),
    ("far ahead by the statements of strangers alone: train on", AHEAD, {**FRESH, "has_partners": False}, None),
    ("ahead by little more than the gap: set back", AHEAD, {**FRESH, "others_steps": 239}, StepBack(284)),
    ("ahead by no more than the gap: keep the global step; no state fits", AHEAD, {**FRESH, "others_steps": 240}, fetch(361, 300)),
    ("ahead of most, but nobody's signed global step is far: wait", AHEAD, {**FRESH, "is_far": False}, None),
    ("gated: ask", IN_STEP, {"is_gated": True}, Act.ASK_CLOCKS),
    ("and take a state of about our time that is further than ours", IN_STEP, {**FRESH, "is_gated": True}, fetch(301, 360)),
    ("far behind the other stages, without a lane: take a state", APART, {}, fetch(540, 660)),
    ("which comes before stale fragments", APART, {"has_stale": True}, fetch(540, 660)),
    ("while a lane is there: train on", APART, {"apart_s": 0.0}, None),
    ("without a lane for a moment: train on", APART, {"apart_s": 0.9 * APART_S}, None),
    ("without a lane, and near the others: wait for them", APART, {"stages_steps": 360}, None),
    ("nobody gives a state: follow the clock alone", APART, {"unserved_s": UNSERVED_S}, FollowClock(600, is_unlimited=True)),
    ("but not to the end of the run", APART, {"unserved_s": UNSERVED_S, "stages_steps": 1000}, FollowClock(999, is_unlimited=True)),
    ("far ahead of the other stages: wait for them", APART, {"stages_steps": 100, "apart_s": 0.9 * ALONE_S}, None),
    ("for long: set the global step back", APART, {"stages_steps": 100, "apart_s": ALONE_S}, StepBack(100)),
    ("no holder of another stage is known: wait", APART, {"stages_steps": 0, "apart_s": ALONE_S}, None),
    ("stale fragments come before another state", BEHIND, {"has_stale": True}, Act.SYNC_FRAGMENTS),
    ("the result comes before all", BEHIND, {"has_stale": True, "has_result": True}, Act.TAKE_RESULT),
]  # fmt: skip


@pytest.mark.parametrize(("base", "known", "decision"), [row[1:] for row in TO_STAY], ids=[row[0] for row in TO_STAY])
def test_how_a_peer_stays_with_the_others(base: SyncView, known: dict[str, object], decision: Decision | None) -> None:
    assert decide(replace(base, **known)) == decision  # type: ignore[arg-type]


def test_a_peer_far_ahead_wants_no_state() -> None:
    assert wanted(AHEAD) is None


@pytest.mark.parametrize(("unpaused_steps", "takes_clock"), [(699, False), (700, True)])
def test_worse_weights_of_who_went_on_move_the_global_step_no_further_than_without_the_absence(
    unpaused_steps: int, takes_clock: bool
) -> None:
    found = wanted(replace(IN_STEP, is_back=True, left_behind_steps=700, unpaused_steps=unpaused_steps))
    assert found is not None and found.takes_clock is takes_clock


def test_a_fragment_comes_from_a_source_of_the_typical_time() -> None:
    assert fragment_to_sync(BEHIND) == Wanted(8, 340, 460, 1000)
