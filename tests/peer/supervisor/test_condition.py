from __future__ import annotations

from peer.supervisor.condition import SILENT_S, Condition, Said, trouble


def test_a_joiner_as_a_person_reads_it() -> None:
    """The whole way of a peer that joins, in the order in which the words come."""
    condition = Condition(alone=False)
    read = [condition.describe(0, 0.0)]

    def now(peers_seen: int = 0) -> None:
        condition.heard_s = 1.0
        read.append(condition.describe(peers_seen, 1.0))

    condition.node_says("joining", "asking 10.0.0.1 for the run's manifest")
    now()
    condition.trainer_says("ready", "")
    now()
    condition.node_says("joining", "downloading weights from QmX: 40 %")
    now(2)
    condition.trainer_says("training", "")
    now(2)
    now(0)
    condition.trainer_says("finishing", "the schedule has run out: averaging with the others")
    now(2)
    condition.ending = ("done", "the run is over")
    now(2)
    assert read == [
        ("starting", "building the model"),
        ("joining", "asking 10.0.0.1 for the run's manifest"),
        ("joining", "asking 10.0.0.1 for the run's manifest"),
        ("joining", "downloading weights from QmX: 40 %"),
        ("training", ""),
        ("training", "no other peer in sight"),
        ("finishing", "the schedule has run out: averaging with the others"),
        ("done", "the run is over"),
    ]


def training(**said: str) -> Condition:
    condition = Condition(alone=False, heard_s=100.0)
    condition.trainer_says("training", said.get("reason", ""))
    return condition


def test_before_the_network_is_up() -> None:
    condition = Condition(alone=False)
    condition.trainer_says("ready", "")
    assert condition.describe(0, 0.0) == ("starting", "opening the network")


def test_training_goes_on_without_the_node() -> None:
    condition = training()
    condition.node = Said(trouble=trouble("node", "killed by SIGKILL", 0.5))
    state, reason = condition.describe(3, 100.0)
    assert state == "training"
    assert "node ended (killed by SIGKILL)" in reason
    assert "training goes on" in reason
    condition.node_says("", "")  # it is back
    assert condition.describe(3, 100.0) == ("training", "")


def test_what_the_node_says_does_not_hide_that_the_trainer_trains() -> None:
    condition = training()
    condition.node_says("joining", "downloading weights from QmX: 3 %")
    assert condition.describe(1, 100.0) == ("training", "")


def test_the_trainers_own_remark_is_shown() -> None:
    reason = "went back to checkpoint step-00000100: damaged are step-00000200 (header.json does not have its hash)"
    assert training(reason=reason).describe(1, 100.0) == ("training", reason)


def test_a_trainer_that_is_down_is_said_to_be() -> None:
    condition = training()
    assert condition.trains
    condition.trainer = Said(trouble=trouble("trainer", "killed by SIGKILL", 2.0))
    assert not condition.trains
    state, reason = condition.describe(1, 100.0)
    assert state == "starting"
    assert "starting it again in 2.0 s" in reason
    assert "from its last checkpoint" in reason
    condition.trainer_says("training", "")
    assert condition.describe(1, 100.0) == ("training", "")


def test_a_node_that_is_down_before_anything_is_trained() -> None:
    condition = Condition(alone=False)
    condition.node = Said(trouble="the node ended (exit code 1)")
    assert condition.describe(0, 0.0) == ("joining", "the node ended (exit code 1)")


def test_silence_is_told() -> None:
    condition = training()
    assert condition.describe(1, 100.0 + SILENT_S - 1) == ("training", "")
    state, reason = condition.describe(1, 143.0)
    assert state == "training"
    assert "silent for 40 s" in reason


def test_who_is_alone_misses_nobody() -> None:
    condition = Condition(alone=True)
    condition.trainer_says("training", "")
    assert condition.describe(0, 0.0) == ("training", "alone, as asked")


def test_nothing_overrides_the_end() -> None:
    condition = training()
    condition.ending = ("leaving", "SIGTERM: saving")
    condition.trainer_says("training", "")
    condition.node_says("joining", "x")
    assert condition.describe(1, 500.0) == ("leaving", "SIGTERM: saving")
