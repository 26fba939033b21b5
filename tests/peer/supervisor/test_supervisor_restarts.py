"""Children that die, and which deaths end the peer."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gossamer.peer.machine.events import NodeRestarted, TrainerRestarted
from gossamer.peer.supervisor import children as module
from gossamer.peer.supervisor.child_process import ChildExit
from gossamer.peer.supervisor.children import ChildFailed
from gossamer.protocol.errors import ExitCode
from tests.peer.supervised import Running, peer, run, until_training
from tests.peer.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_PAUSE_S", (0.01, 0.05))


def test_a_killed_trainer_is_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            os.kill(running.lives("trainer")[0], signal.SIGKILL)
            await eventually(lambda: len(running.lives("trainer")) == 2, "second life")
            await eventually(lambda: running.status.state == "training", "training")
            assert running.num(TrainerRestarted) == 1
            assert running.num(NodeRestarted) == 0
            assert len(running.lives("node")) == 1
            assert (
                "starting",
                "the trainer ended (killed by SIGKILL); it is started again at once, it goes on from its last checkpoint",
            ) in (running.states())
            await eventually(lambda: running.status.meetings["solo"] == 4, "counts of both lives")
            assert (running.status.train_seconds, running.status.blocked_seconds) == (3.0, 1.0)

    run(test())


def test_a_trainer_for_which_the_machine_has_no_process_left_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refusals = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, "Resource temporarily unavailable")]

    async def refused_once(*arguments: Any, **named: Any) -> asyncio.subprocess.Process:
        if refusals:
            raise refusals.pop()
        return await start(*arguments, **named)

    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            monkeypatch.setattr(asyncio, "create_subprocess_exec", refused_once)
            os.kill(running.lives("trainer")[0], signal.SIGKILL)
            await eventually(lambda: len(running.lives("trainer")) == 2, "second life")
            await until_training(running)
            assert not work.done() and running.num(TrainerRestarted) == 2
            reasons = [reason for state, reason in running.states() if state == "starting"]
            assert any("it could not be started: Resource temporarily unavailable" in reason for reason in reasons)

    run(test())


def test_a_killed_node_is_started_again_and_training_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            os.kill(running.lives("node")[0], signal.SIGKILL)
            await eventually(lambda: running.status.meetings["completed"] == 6, "second life")
            assert running.num(NodeRestarted) == 1
            assert len(running.lives("trainer")) == 1
            since = [reason for state, reason in running.states() if state == "training"]
            assert any("the node ended (killed by SIGKILL)" in reason for reason in since)
            await eventually(lambda: running.status.reason == "meeting others", "peers in the status of the second life")
            await eventually(lambda: running.status.bytes == {"sent": 60, "received": 120}, "bytes of both lives")

    run(test())


@pytest.mark.parametrize("trouble", ["die", "operator"])
def test_no_trouble_of_the_node_ends_a_trainer_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 2)

    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            running.does("node", trouble)
            os.kill(running.lives("node")[0], signal.SIGKILL)
            await eventually(lambda: len(running.lives("node")) >= 3, "several lives")
            assert not work.done()
            assert running.status.state == "training"
            running.does("node", "serve")
            await eventually(lambda: running.status.reason == "meeting others", "a node that is well again")

    run(test())


def test_a_holder_that_moves_to_another_stage_starts_both_again_and_waits_for_its_weights(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            running.home.stage.write_text("2\n")
            running.does("node", "moves")
            os.kill(running.lives("node")[0], signal.SIGKILL)
            await eventually(lambda: (len(running.lives("node")), len(running.lives("trainer"))) == (3, 2), "both again")
            await eventually(lambda: (running.home.path / "node.rests").read_text() == "False", "the node at work")
            await eventually(lambda: running.status.reason == "opening the network", "a trainer that waits for the node")
            assert not work.done() and running.stopped_ns("trainer")

    run(test())


def test_being_refused_ends_the_peer(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            running.does("node", "refused")
            os.kill(running.lives("node")[0], signal.SIGKILL)
            with pytest.raises(ChildFailed, match="not invited") as caught:
                await work
            assert caught.value.exit_code is ExitCode.REFUSED_BY_RUN
            assert caught.value.hint == "ask for an invite"
            assert (running.status.state, running.status.reason) == ("failed", "not invited")
            assert running.stopped_ns("trainer")  # it had its chance to save

    run(test())


@pytest.mark.parametrize(("who", "trouble", "code"), [("trainer", "operator", 2), ("node", "operator", 2), ("node", "refused", 4)])
def test_an_operator_error_ends_the_peer_at_once(tmp_path: Path, who: str, trouble: str, code: int) -> None:
    async def test() -> None:
        async with peer(tmp_path, wait_for_peers=1, **{who: trouble}) as (running, work):
            with pytest.raises(ChildFailed) as caught:
                await work
            assert caught.value.exit_code == code
            assert running.status.state == "failed"
            assert len(running.lives(who)) == 1

    run(test())


@pytest.mark.parametrize(("trouble", "hint"), [("die", "ran out of memory"), ("bug", "peer.log")])
def test_a_trainer_that_always_fails_ends_the_peer(tmp_path: Path, trouble: str, hint: str) -> None:
    async def test() -> None:
        async with peer(tmp_path, trainer=trouble) as (running, work):
            with pytest.raises(ChildFailed, match="the trainer failed 3 times in a row") as caught:
                await work
            assert caught.value.exit_code is ExitCode.OUR_FAULT
            assert hint in caught.value.hint
            assert (running.status.state, running.status.reason) == ("failed", str(caught.value))
            assert len(running.lives("trainer")) == 3
            assert running.num(TrainerRestarted) == 2

    run(test())


def test_a_trainer_without_its_data_set_is_started_again_until_the_network_is_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            running.does("trainer", "network")
            os.kill(running.lives("trainer")[0], signal.SIGKILL)
            await eventually(lambda: len(running.lives("trainer")) > module.MAX_FAILURES + 1, "more lives than it has failures")
            assert not work.done()
            running.does("trainer", "train")
            await until_training(running)

    run(test())


def test_a_child_that_has_failed_for_days_is_started_again_after_the_longest_pause(tmp_path: Path) -> None:
    supervisor = Running(tmp_path, {}, "train", "nobody", True, lambda status: None).supervisor
    run(supervisor.children._back_off("node", ChildExit(3, "nobody answers", None), 2000))
    assert supervisor.status.state


def test_a_trainer_that_never_reaches_its_data_set_ends_the_peer_as_trouble_of_the_network(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, trainer="network") as (_, work):
            with pytest.raises(ChildFailed, match="3 times in a row: nobody there") as caught:
                await work
            assert (caught.value.exit_code, caught.value.hint) == (ExitCode.SWARM_UNREACHABLE, "wait")

    run(test())


@pytest.mark.parametrize("keep_trying", [True, False])
def test_an_unreachable_swarm_ends_the_peer_unless_it_keeps_trying(tmp_path: Path, keep_trying: bool) -> None:
    """The end of a joiner, unless it was told to keep trying: then it goes on as soon as somebody answers."""

    async def test() -> None:
        async with peer(tmp_path, node="nobody", manifest=False, keep_trying=keep_trying) as (running, work):
            if not keep_trying:
                with pytest.raises(ChildFailed) as caught:
                    await work
                assert caught.value.exit_code is ExitCode.SWARM_UNREACHABLE
                return
            await eventually(lambda: len(running.lives("node")) > module.MAX_FAILURES, "more lives than it has failures")
            assert running.states()[-1][0] == "joining"
            running.does("node", "serve")
            await until_training(running)

    run(test())
