"""What the supervisor does in the usual course of things, over stand-ins; with real processes: test_supervisor_real.py."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import reduce
from pathlib import Path

import pytest

from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.events import TrainerRestarted, read_events
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor import children
from gossamer.peer.supervisor import supervisor as module
from gossamer.peer.supervisor.housekeeping import Housekeeping
from gossamer.protocol.errors import BadSettings
from tests.peer.supervised import peer, run, until_training
from tests.peer.waiting import eventually

# --------------------------------------------------------------------------- the usual way


def test_it_trains_until_the_run_is_over(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            assert running.status.since > 1e9
            running.ends("trainer")
            await work
            assert (running.status.state, running.status.reason) == ("done", "the run is over")
            assert running.stopped_ns("node")

    run(test())


def test_a_bug_in_the_regular_look_ends_the_peer_and_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)

    def broken(self: object, status: Status) -> None:
        raise ZeroDivisionError("a bug")

    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            monkeypatch.setattr(Housekeeping, "look", broken)  # without it, no limit would be kept and no status written
            await eventually(work.done, "its end")
            assert isinstance(work.exception(), ZeroDivisionError)
            assert (running.status.state, running.status.reason) == ("failed", "ZeroDivisionError: a bug")

    run(test())


def test_a_node_that_ends_first_does_not_end_the_trainer(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            running.ends("node")
            await eventually(lambda: len(running.children()) == 1, "end of the node")
            assert not work.done()
            running.ends("trainer")
            await work
            assert running.status.state == "done"
            assert len(running.lives("node")) == 1

    run(test())


def test_leaving_ends_the_node_first_and_then_the_trainer(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            reply = await asyncio.to_thread(ask, running.home.path, {"verb": "leave"})
            assert reply == {"leaving": True}
            await work
            assert 0 < running.stopped_ns("node") < running.stopped_ns("trainer")
            assert running.states()[-3:] == [
                ("leaving", "asked to leave: ending meetings"),
                ("leaving", "asked to leave: saving"),
                ("left", "saved and stopped"),
            ]

    run(test())


def test_a_joiner_gets_its_manifest_from_the_node(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, manifest=False) as (running, _):
            await until_training(running)

    run(test())


def test_a_trainer_waits_while_its_peer_waits_for_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, wait_for_peers=1) as (running, _):
            await eventually(lambda: running.status.step == 7, "the trainer's word")
            assert running.status.state == "starting"

    run(test())


def test_a_peer_alone_has_no_node(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, alone=True) as (running, _):
            await eventually(lambda: running.status.state == "training", "training")
            assert running.status.reason == "training alone (--alone)"
            assert not running.lives("node")

    run(test())


def test_the_control_socket_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 1000.0)  # a look between the answer and its check would update the status

    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            status = await asyncio.to_thread(ask, running.home.path, {"verb": "status"})
            assert status == running.status.to_json()
            assert (status["step"], status["meetings"]["completed"], status["meetings"]["solo"]) == (7, 3, 2)
            for request in ({"verb": "dance"}, {}):
                with pytest.raises(BadSettings, match="there is no verb"):
                    await asyncio.to_thread(ask, running.home.path, request)

    run(test())


# --------------------------------------------------------------------------- ends that are not orderly


def test_a_trainer_that_does_not_stop_is_killed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LEAVE_S", {"node": 0.2, "trainer": 0.2})

    async def test() -> None:
        async with peer(tmp_path, trainer="deaf", node="deaf") as (running, work):
            await until_training(running)
            started_s = time.monotonic()
            running.supervisor.leave("asked to leave")
            await work
            assert time.monotonic() - started_s < 10.0
            assert running.status.state == "left"
            assert "did not save in time" in running.status.reason

    run(test())


def test_leaving_while_the_children_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await eventually(lambda: running.lives("trainer"), "first child")
            running.supervisor.leave("changed my mind")
            await work
            assert running.status.state == "left"
            assert running.status.reason in ("stopped before training began", "saved and stopped")  # a quick trainer has begun by then

    run(test())


def test_leaving_while_a_child_rests_between_two_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "RESTART_PAUSE_S", (30.0, 30.0))

    async def test() -> None:
        async with peer(tmp_path, trainer="die") as (running, work):
            await eventually(lambda: running.num(TrainerRestarted), "first death")
            running.supervisor.leave("asked to leave")
            await work
            assert len(running.lives("trainer")) == 1

    run(test())


def test_a_closed_terminal_output_does_not_stop_the_peer(tmp_path: Path) -> None:
    async def test() -> None:
        drawn: list[int] = []

        def watch(_: object) -> None:
            drawn.append(1)
            raise BrokenPipeError

        async with peer(tmp_path, watch=watch) as (running, work):
            await until_training(running)
            assert not work.done()
            assert len(drawn) > 1, "a full disk that holds what is drawn may have room again"

    run(test())


def test_growing_figures_are_shown_but_not_logged_one_by_one(tmp_path: Path) -> None:
    async def test() -> None:
        seen: list[str] = []
        async with peer(tmp_path, node="count", wait_for_peers=1, watch=lambda status: seen.append(status.reason)) as (running, _):
            await eventually(lambda: running.status.reason == "downloading weights: 100 %", "the last word")
            assert [reason for reason in dict.fromkeys(seen) if "%" in reason] == [f"downloading weights: {n} %" for n in range(0, 101, 5)]
            assert [state for state in running.states() if state[0] == "joining"] == [("joining", "downloading weights: 0 %")]

    run(test())


def test_a_node_alone_is_a_peer_too(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, node="seed", trains=False) as (running, work):
            await eventually(lambda: running.status.state == "serving", "serving")
            assert running.status.reason == "2 connected"
            assert not running.lives("trainer")
            running.supervisor.leave("asked to leave")
            await work
            assert (running.status.state, running.status.reason) == ("left", "asked to leave")
            assert running.stopped_ns("node")

    run(test())


def test_the_file_holds_the_session_as_it_was_shown(tmp_path: Path) -> None:
    """The status follows from the events alone; what the file leaves out are the figures that grow within one state's reason."""

    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            running.ends("trainer")
            await work
            (running.home.path / "trainer.ends").unlink()
            logged = reduce(apply, read_events(running.home.events), Status())
            assert logged == running.status
            assert (logged.state, logged.run_id, logged.step, logged.meetings["solo"]) == ("done", "ab", 7, 2)

    run(test())


# --------------------------------------------------------------------------- signals


@pytest.mark.usefixtures("signals_of_a_terminal")
@pytest.mark.parametrize(("number", "reason"), module.ASKED.items())
def test_a_signal_asks_it_to_leave(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            os.kill(os.getpid(), number)
            await work
            assert ("leaving", f"{reason}: saving") in running.states()
            assert running.status.reason == "saved and stopped"
            assert running.supervisor.interrupted == (number == signal.SIGINT)

    before = signal.getsignal(number)
    run(test())
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)


def test_a_closed_terminal_means_nothing_under_nohup(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(test())
    finally:
        signal.signal(signal.SIGHUP, before)
