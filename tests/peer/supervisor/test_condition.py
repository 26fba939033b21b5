from __future__ import annotations

import pytest

from gossamer.peer.machine.config import NODE, TRAINER
from gossamer.peer.machine.events import PeersSeen, ProcessReported
from gossamer.peer.machine.states import BUILDING, CARRYING, IDLE, NO_HOLDER, REFUSED, STARVED, WITHOUT_WORK, changed
from gossamer.peer.supervisor.condition import HUNG_S, SILENT_S, Condition

BOTH = (TRAINER, NODE)


def report(condition: Condition, name: str, state: str, reason: str, now_s: float = 100.0) -> None:
    condition.take_event(name, ProcessReported(state, reason), now_s)


def read_of(condition: Condition, peers_seen: int, now_s: float) -> tuple[str, str]:
    event = condition.describe(peers_seen, now_s)
    return event.state, event.reason


def test_a_host_that_builds_its_model_waits_for_no_member() -> None:
    condition = Condition(BOTH)
    report(condition, NODE, "joining", BUILDING)
    assert "member" not in condition.describe(0, 101.0).way_out


def test_states_of_a_joining_peer() -> None:
    """The whole way of a peer that joins, in the order in which the words come."""
    condition = Condition(BOTH)
    read = [read_of(condition, 0, 0.0)]

    def now(peers_seen: int = 0) -> None:
        read.append(read_of(condition, peers_seen, 101.0))

    report(condition, NODE, "joining", "asking 10.0.0.1 for the run's manifest")
    now()
    report(condition, TRAINER, "ready", "")
    now()
    report(condition, NODE, "joining", "downloading weights from QmX: 40 %")
    now(2)
    report(condition, TRAINER, "training", "")
    now(2)
    now(0)
    report(condition, TRAINER, "finishing", "all steps of the run are made: averaging with the others")
    now(2)
    condition.ending = changed("done", "the run is over")
    now(2)
    assert read == [
        ("starting", "loading its programs"),
        ("joining", "asking 10.0.0.1 for the run's manifest"),
        ("joining", "asking 10.0.0.1 for the run's manifest"),
        ("joining", "downloading weights from QmX: 40 %"),
        ("training", "meeting others"),
        ("training", "no other peer in sight"),
        ("finishing", "all steps of the run are made: averaging with the others"),
        ("done", "the run is over"),
    ]


def training(**reported: str) -> Condition:
    condition = Condition(BOTH)
    report(condition, TRAINER, "training", reported.get("reason", ""))
    return condition


def test_before_the_network_is_up() -> None:
    condition = Condition(BOTH)
    report(condition, TRAINER, "ready", "")
    assert read_of(condition, 0, 0.0) == ("starting", "opening the network")


def test_tokenizing_is_reported_whatever_the_node_waits_for() -> None:
    condition = Condition(BOTH)
    report(condition, NODE, "joining", "asking 10.0.0.1 for the run's manifest")
    report(condition, TRAINER, "starting", "tokenizing the text: 40 % of 200 MB, 50 s left")
    assert read_of(condition, 0, 0.0) == ("starting", "tokenizing the text: 40 % of 200 MB, 50 s left")


def test_training_goes_on_without_the_node() -> None:
    condition = training()
    condition.note_exit(NODE, "killed by SIGKILL", 0.5)
    state, reason = read_of(condition, 3, 100.0)
    assert state == "training"
    assert "node ended (killed by SIGKILL)" in reason
    assert "training goes on" in reason
    condition.take_event(NODE, PeersSeen(3), 100.0)  # it is back
    assert read_of(condition, 3, 100.0) == ("training", "meeting others")


def test_a_training_trainer_takes_precedence_over_the_node() -> None:
    condition = training()
    report(condition, NODE, "joining", "downloading weights from QmX: 3 %")
    assert read_of(condition, 1, 100.0) == ("training", "meeting others")


def test_the_trainers_own_remark_is_shown() -> None:
    reason = "went back to checkpoint step-00000100: damaged are step-00000200 (header.json does not match its hash)"
    assert read_of(training(reason=reason), 1, 100.0) == ("training", reason)


def test_a_failed_trainer_is_reported() -> None:
    condition = training()
    assert condition.trains
    condition.note_exit(TRAINER, "killed by SIGKILL", 2.0)
    assert not condition.trains
    state, reason = read_of(condition, 1, 100.0)
    assert state == "starting"
    assert "it is started again after 2 s" in reason
    assert "from its last checkpoint" in reason
    report(condition, TRAINER, "training", "")
    assert read_of(condition, 1, 100.0) == ("training", "meeting others")


def test_a_node_that_is_down_before_anything_is_trained() -> None:
    condition = Condition(BOTH)
    condition.note_exit(NODE, "exit code 1", 0.5)
    state, reason = read_of(condition, 0, 0.0)
    assert state == "joining"
    assert reason.startswith("the node ended (exit code 1); it is started again at once")


def test_a_silent_trainer_is_reported() -> None:
    condition = training()
    assert read_of(condition, 1, 100.0 + SILENT_S - 1) == ("training", "meeting others")
    state, reason = read_of(condition, 1, 143.0)
    assert state == "training"
    assert "silent for 40 s" in reason


def test_a_peer_alone_reports_no_missing_partners() -> None:
    condition = Condition((TRAINER,))
    report(condition, TRAINER, "training", "")
    assert read_of(condition, 0, 100.0) == ("training", "training alone (--alone)")


def test_without_a_trainer_the_state_is_the_nodes() -> None:
    condition = Condition((NODE,))
    read = [read_of(condition, 0, 0.0)]
    report(condition, NODE, "serving", "3 connected")
    read.append(read_of(condition, 3, 1.0))
    condition.note_exit(NODE, "exit code 1", 0.5)
    read.append(read_of(condition, 3, 2.0))
    assert read == [
        ("starting", "opening the network"),
        ("serving", "3 connected"),
        ("joining", "the node ended (exit code 1); it is started again at once"),
    ]


def test_the_ending_state_is_final() -> None:
    condition = training()
    condition.ending = changed("leaving", "SIGTERM: saving")
    report(condition, TRAINER, "training", "")
    report(condition, NODE, "joining", "x")
    assert read_of(condition, 1, 500.0) == ("leaving", "SIGTERM: saving")


def test_health_of_a_peer_through_its_day() -> None:
    """What works, waits, or is on its way is healthy; what starts is not yet."""
    condition = Condition(BOTH)
    assert condition.trouble(0.0) == "starting: loading its programs"
    report(condition, NODE, "joining", "asking 10.0.0.1 for the run's manifest")
    assert not condition.trouble(101.0)
    report(condition, NODE, "waiting", "")
    assert not condition.trouble(101.0)
    condition.note_exit(NODE, "exit code 1", 4.0)
    assert "the node ended" in condition.trouble(101.0)
    report(condition, TRAINER, "training", "")
    assert not condition.trouble(101.0)
    assert not condition.trouble(100.0 + 2 * SILENT_S)
    assert "silent for 300 s" in condition.trouble(100.0 + HUNG_S)
    condition.note_exit(TRAINER, "killed by SIGKILL", 4.0)
    assert "killed by SIGKILL" in condition.trouble(101.0)
    condition.ending = changed("failed", "not invited")
    assert condition.trouble(101.0) == "failed: not invited"


def test_a_stage_that_nobody_holds_is_waited_for_with_a_way_out() -> None:
    condition = training()
    report(condition, NODE, STARVED, "nobody holds stage 2 of 2, last seen 10 s ago")
    described = condition.describe(1, 101.0)
    assert (described.state, described.reason) == ("waiting", "nobody holds stage 2 of 2, last seen 10 s ago")
    assert described.way_out == NO_HOLDER
    assert not condition.trouble(101.0), "nothing is wrong with this peer"
    report(condition, NODE, CARRYING, "")
    assert read_of(condition, 1, 101.0) == ("training", "meeting others")


@pytest.mark.parametrize(
    ("state", "words"), [(STARVED, "a peer that held it starts again"), (REFUSED, "opens a lane"), (IDLE, "next micro-batch")]
)
def test_each_reason_for_no_work_has_its_own_way_out(state: str, words: str) -> None:
    condition = training()
    report(condition, NODE, state, "why")
    described = condition.describe(1, 101.0)
    assert (described.state, described.reason) == ("waiting", "why")
    assert described.way_out == WITHOUT_WORK[state] and words in described.way_out


def test_trouble_of_a_trainer_comes_before_a_missing_stage() -> None:
    condition = training()
    report(condition, NODE, STARVED, "nobody holds stage 2 of 2")
    condition.note_exit(TRAINER, "killed", 1.0)
    assert condition.describe(1, 101.0).state == "starting"
