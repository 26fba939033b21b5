"""The status as it follows from events."""

from __future__ import annotations

import json
import math
import random
from functools import reduce

import pytest

from gossamer.peer.machine.events import (
    AddressesChanged,
    CheckpointFailed,
    CheckpointSaved,
    EnergyUsed,
    EvalDone,
    Event,
    HopsCarried,
    LaneSeen,
    LimitsSet,
    MeetingDone,
    ModelBuilt,
    NodeRestarted,
    NodeSpent,
    NodeStopped,
    OutputsMoved,
    PeersSeen,
    PeerStarted,
    PipelineSeen,
    ProgressMade,
    RunKnown,
    SoloStep,
    StageHeld,
    StageMoved,
    StateChanged,
    StepDone,
    StepsLost,
    TrafficExpected,
    TrainerRestarted,
    Warned,
    from_line,
    to_line,
)
from gossamer.peer.machine.status import VERSION, Status, apply

DESIGN = {
    "state", "reason", "since", "run_id", "peer_id", "step", "total_steps", "tokens", "loss", "peers_seen", "meetings", "bytes",
    "version",
}  # fmt: skip


def after(*events: Event) -> Status:
    return reduce(apply, events, Status())


def met(outcome: str, route: str = "direct") -> MeetingDone:
    return MeetingDone("12D3KooX", 1, outcome, "", route, 10, 20, 0.5)


def test_the_keys_of_the_contract_are_there() -> None:
    fields = Status().to_json()
    assert set(fields) >= DESIGN
    assert set(fields["meetings"]) == {"completed", "solo", "refused", "failed"}
    assert set(fields["bytes"]) == {"sent", "received"}
    assert fields["version"] == VERSION
    assert json.loads(json.dumps(fields)) == fields


def test_the_status_of_a_session_follows_from_its_events() -> None:
    status = after(
        PeerStarted("12D3KooX", ts=50.0),
        RunKnown("ab", 800, name="tales"),
        ModelBuilt(1000, 4.125, coding="compiled"),
        PeersSeen(3),
        AddressesChanged(("/ip4/192.0.2.1/tcp/1",)),
        StateChanged("training", "why", "until when", ts=60.0),
        StepDone(5, 7, 90, 2.5, 1e-3, 18.0, 1.5, 0.5, 1.25, 0.125),
        NodeSpent(0.75),
        EvalDone(5, 2.25, 8),
        OutputsMoved(0, 0.01),
    )
    assert status == Status(
        "training", "why", 60.0, "until when", "ab", "12D3KooX", 7, 5, 800, 90, 2.5, 2.25, 18.0, 1.5, 0.5,
        processor_seconds={"training": 1.25, "coding": 0.125, "node": 0.75}, peers_seen=3,
        params=1000, bits_per_param=4.125, coding="compiled", addresses=["/ip4/192.0.2.1/tcp/1"], output_distance=0.01,
        run_name="tales", started=50.0, updated=status.updated, history=status.history,
    )  # fmt: skip
    idle = apply(status, StepDone(6, 8, 100, math.nan, math.nan, 0.0, 2.0, 1.0, 1.5, 0.25))
    assert (idle.own_steps, idle.step, idle.tokens, idle.train_seconds, idle.blocked_seconds) == (6, 8, 100, 2.0, 1.0)
    assert (idle.loss, idle.tokens_per_second) == (2.5, 0.0)  # the last loss stands
    between = apply(status, StepDone(5, 7, 90, math.nan, math.nan, 12.0, 2.5, 0.5, 1.5, 0.125))  # micro-batches of a stage, and no step
    assert (between.loss, between.tokens_per_second) == (2.5, 12.0)
    waiting = apply(apply(between, StateChanged("waiting", "nobody", "")), StepDone(5, 7, 90, math.nan, math.nan, 9.0, 2.5, 0.5, 1.5, 0.1))
    assert (waiting.loss, waiting.tokens_per_second) == (2.5, 0.0), "though its last ten seconds were not all without work"
    anew = apply(idle, PeerStarted("12D3KooX", ts=70.0))  # counts are of one session
    assert anew == Status(peer_id="12D3KooX", since=70.0, started=70.0, updated=70.0)


def test_since_moves_with_the_state_only() -> None:
    status = after(PeerStarted("", ts=100.0), StateChanged("starting", "building the model", ts=102.0))
    assert (status.reason, status.since) == ("building the model", 100.0)
    status = apply(status, StateChanged("training", "", ts=103.0))
    assert (status.state, status.reason, status.since) == ("training", "", 103.0)


@pytest.mark.parametrize(
    ("outcome", "counted"),
    [
        ("completed", "completed"), ("busy", "refused"), ("refused", "refused"), ("gated", "failed"), ("misbehaved", "failed"),
        ("failed", "failed"), ("abandoned", "failed"),
    ],
)  # fmt: skip
def test_each_meeting_counts_under_its_outcome(outcome: str, counted: str) -> None:
    status = after(met(outcome), met(outcome, "relayed"))
    assert status.meetings == Status().meetings | {counted: 2}
    assert status.bytes == {"sent": 20, "received": 40}


@pytest.mark.parametrize("seed", range(20))
def test_totals_add_up_over_the_lives_of_the_processes(seed: int) -> None:
    """However often node and trainer die, what they count from zero again comes on top, and nothing that was shown is taken back."""
    rng = random.Random(seed)
    status, counted, train_s, life_s, node_s, node_life_s = Status(), {"completed": 0, "solo": 0}, 0.0, 0.0, 0.0, 0.0
    for _ in range(200):
        event: Event
        match rng.randrange(6):
            case 0:
                event, counted["completed"] = met("completed"), counted["completed"] + 1
            case 1:
                event, counted["solo"] = SoloStep(0, ""), counted["solo"] + 1
            case 2:
                event, node_life_s = NodeRestarted("killed", 1), 0.0
            case 3:
                event, life_s = TrainerRestarted("killed", 1), 0.0
            case 4:
                node_s, node_life_s = node_s + 0.25, node_life_s + 0.25
                event = NodeSpent(node_life_s)
            case _:
                train_s, life_s = train_s + 0.5, life_s + 0.5
                event = StepDone(1, 1, 1, 2.0, 0.1, 1.0, life_s, life_s / 2, 3 * life_s, life_s / 4)
        happened = from_line(to_line(event))
        assert happened is not None
        shown, status = status, apply(status, happened)
        assert status.train_seconds >= shown.train_seconds
    assert (status.train_seconds, status.blocked_seconds) == (train_s, train_s / 2)
    assert status.processor_seconds == {"training": 3 * train_s, "coding": train_s / 4, "node": node_s}
    assert status.meetings == Status().meetings | counted


def hops(answered: int, sent: int) -> HopsCarried:
    return HopsCarried({"answered": answered, "declined": 1}, answered // 2, 1, 1, sent, 2 * sent, 2.5, late=1)


def test_hops_add_up_over_the_lives_of_the_node_and_count_in_the_lifetime() -> None:
    first = after(PeerStarted("", {"joined": 5.0, "sent": 1000}), StageHeld(2, 3), hops(4, 100), met("completed"))
    assert (first.stage, first.hops["outcomes"], first.lifetime["sent"]) == ("2 of 3", {"answered": 4, "declined": 1}, 1110)
    again = reduce(apply, (NodeStopped(), hops(6, 50), hops(8, 70)), first)
    assert again.hops["outcomes"] == {"answered": 12, "declined": 2}
    assert [again.hops[name] for name in ("repeated", "late", "sent", "received", "loss")] == [6, 2, 170, 340, 2.5]
    assert (again.lifetime["sent"], again.lifetime["received"]) == (1180, 360)


def test_lanes_are_those_of_the_node_that_runs() -> None:
    lane = LaneSeen("12D3KooX", 3, 9, 2, 4, 1.5)
    there = after(PipelineSeen((lane,), (1, 1, 0), (0, 2, 0)))
    assert there.lanes == [{"partner": "12D3KooX", "stage": 3, "hops": 9, "unanswered": 2, "window": 4, "usual_s": 1.5}]
    assert (there.stage_holders, there.stage_unheard) == ([1, 1, 0], [0, 2, 0])
    gone = apply(there, NodeStopped())
    assert not gone.lanes and not gone.stage_holders and not gone.stage_unheard


def test_moves_between_stages_and_steps_of_an_only_copy_are_counted() -> None:
    status = after(StageMoved(2, 1, "nobody holds it"), StepsLost(480, 500), StepsLost(510, 513))
    assert (status.stage, status.stage_move, status.lost_steps) == ("", "from stage 2 to stage 1: nobody holds it", 23)


def test_a_peer_that_moves_holds_the_new_stage_at_once() -> None:
    status = after(StageHeld(2, 3), StageMoved(2, 1, "nobody holds it"))
    assert (status.stage, status.stage_move) == ("1 of 3", "from stage 2 to stage 1: nobody holds it")


def test_time_without_work_is_apart_and_adds_up_over_trainers() -> None:
    step = StepDone(5, 7, 90, 2.5, 1e-3, 18.0, 4.0, 0.5, 1.25, 0.125, starved_s=6.0)
    status = after(step, TrainerRestarted("killed", 1), step)
    assert (status.train_seconds, status.starved_seconds) == (8.0, 12.0)


def test_a_share_that_is_not_known_is_null() -> None:
    expected = after(TrafficExpected(10.0, 4, 1.0, True, 9.0, 8.0)).to_json()["expected_traffic"]
    assert (expected["day_bytes"], expected["day_received"], expected["day_hops"], expected["use"]) == (10.0, 9.0, 8.0, None)
    assert after(TrafficExpected(10.0, 4, 1.0, True, 9.0, 8.0, 0.25)).expected_traffic["use"] == 0.25


def test_warnings_stand_until_it_is_over() -> None:
    status = after(met("failed"), met("gated"), met("busy"))
    assert not status.warnings
    status = apply(status, met("failed"))
    assert status.warnings == ["the last 3 meetings failed, the last one: "]
    status = reduce(apply, (met("completed"), CheckpointFailed(8, "no room"), Warned("disk", "it is full")), status)
    assert status.warnings == ["no checkpoint could be saved at step 8: no room", "it is full"]
    assert not reduce(apply, (CheckpointSaved(9, "x", 1, 0.1), Warned("disk", "")), status).warnings


def test_a_figure_that_is_not_finite_is_shown_as_none() -> None:
    status = after(StepDone(1, 1, 1, math.nan, 0.1, 1.0, 1.0, 0.0, 1.0, 0.0), EvalDone(1, math.inf, 8))
    shown = status.to_json()
    assert (shown["loss"], shown["eval_loss"]) == (None, None)
    json.dumps(shown, allow_nan=False)


def test_lifetime_totals_cover_all_starts() -> None:
    earlier = {"joined": 10.0, "seconds": 5.0, "train_seconds": 4.0, "meetings": 3.0, "sent": 100.0, "received": 200.0, "watt_hours": 1.5}
    status = after(PeerStarted("x", earlier, ts=100.0), met("completed"), EnergyUsed(0.5, "measured"), StateChanged("left", "", ts=130.0))
    assert status.lifetime == earlier | {"seconds": 35.0, "meetings": 4, "sent": 110, "received": 220, "watt_hours": 2.0}
    assert after(PeerStarted("x", ts=100.0), StateChanged("left", "", ts=130.0)).lifetime["joined"] == 100.0


def test_progress_ends_with_the_work_or_with_the_state() -> None:
    status = after(StateChanged("joining", ""), ProgressMade("downloading weights", 0.5), StateChanged("joining", "more"))
    assert status.progress == {"work": "downloading weights", "share": 0.5}
    assert apply(status, ProgressMade("downloading weights", 1.0)).progress is None
    assert apply(status, StateChanged("training", "")).progress is None


def test_the_limits_in_force_are_those_set_last() -> None:
    assert after(LimitsSet({"threads": "2"}), LimitsSet({"max_upload": "1 Mbit/s"})).to_json()["limits"] == {"max_upload": "1 Mbit/s"}


def test_a_failed_process_is_a_warning_until_it_works_again() -> None:
    status = after(
        TrainerRestarted("killed", 1), NodeRestarted("killed", 2), StepDone(1, 1, 1, math.nan, math.nan, 0.0, 1.0, 0.0, 1.0, 0.0)
    )
    assert len(status.warnings) == 2
    assert not reduce(apply, (met("completed"), CheckpointSaved(9, "x", 1, 0.1)), status).warnings
    assert not after(TrainerRestarted("stopped because of a settings change or a pause", 0)).warnings
