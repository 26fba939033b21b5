"""A pause, its end, and settings that change while the peer runs, over stand-ins; with real processes: tests/e2e/test_three_shells.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from gossamer.peer.machine.config import saved_settings
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.events import ClockSet, TrainerRestarted
from gossamer.peer.machine.home import Home
from gossamer.peer.supervisor import children
from gossamer.peer.supervisor import supervisor as module
from gossamer.peer.supervisor.pauses import Pauses
from gossamer.protocol.errors import BadSettings
from tests.peer.supervised import Running, peer, run, until_training
from tests.peer.waiting import eventually


async def control(running: Running, **request: Any) -> dict[str, Any]:
    return await asyncio.to_thread(ask, running.home.path, request)


def node_rests(running: Running) -> bool:
    return (running.home.path / "node.rests").read_text() == "True"


async def until_paused(running: Running) -> None:
    def is_paused() -> bool:
        is_gone = len(running.children()) == 1  # the supervisor hears of that a moment later, and then no longer says that it saves
        return is_gone and running.status.state == "paused" and "saving" not in running.status.reason

    await eventually(is_paused, "paused, the trainer gone")


def test_a_pause_ends_the_trainer_and_keeps_the_node(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            assert (await control(running, verb="pause", seconds=None))["state"] == "paused"
            await until_paused(running)
            assert node_rests(running)
            assert running.stopped_ns("trainer")
            assert not running.stopped_ns("node")
            assert running.status.reason == "paused by the operator"
            assert not work.done()
            assert (await control(running, verb="resume"))["was_paused"]
            await until_training(running)
            assert not (await control(running, verb="resume"))["was_paused"]
            await eventually(lambda: not node_rests(running), "the node awake")
            assert len(running.lives("trainer")) == 2
            assert len(running.lives("node")) == 1
            await eventually(lambda: running.status.train_seconds == 3.0, "what both trainers have told")

    run(test())


def test_a_leave_before_the_trainer_is_back_from_a_pause_loses_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LEAVE_S", {"node": 5.0, "trainer": 0.0})

    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            await control(running, verb="pause", seconds=None)
            await until_paused(running)
            running.does("trainer", "wait")
            before = running.supervisor.children.pid("trainer")
            await control(running, verb="resume")
            await eventually(lambda: running.supervisor.children.pid("trainer") not in (0, before), "the next trainer")
            running.supervisor.leave("asked to leave")
            await work
            assert running.status.reason == "stopped; the trainer had not started again, so the last checkpoint is the newest state"

    run(test())


def test_a_pause_of_some_length_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)

    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            assert "until" in (await control(running, verb="pause", seconds=3600))["reason"]
            await until_paused(running)
            pauses = running.supervisor._pauses
            assert pauses.asked is not None
            pauses.asked = replace(pauses.asked, until_s=time.time())  # the hour is over
            await eventually(lambda: len(running.lives("trainer")) == 2, "the trainer back")
            await until_training(running)

    run(test())


def test_a_pause_of_some_length_lasts_as_long_when_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, set_by_s = time.time, [0.0]
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    monkeypatch.setattr(time, "time", lambda: clock_s() + set_by_s[0])

    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            before = (await control(running, verb="pause", seconds=3600))["reason"]
            await until_paused(running)
            set_by_s[0] = 7200.0
            await eventually(lambda: running.num(ClockSet) and running.status.reason != before, "the end of the pause moved")
            assert running.status.state == "paused"
            asked = running.supervisor._pauses.asked
            assert asked is not None and asked.until_s is not None and 3500.0 < asked.until_s - time.time() <= 3600.0

    run(test())


def test_the_meeting_under_way_is_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, node="meets") as (running, _):
            await until_training(running)
            await control(running, verb="pause", seconds=None)
            await eventually(lambda: node_rests(running), "the node notified")
            await asyncio.sleep(0.1)
            assert len(running.children()) == 2
            assert running.status.reason == "paused by the operator (saving first)"
            await control(running, verb="resume")
            assert running.status.state == "training"
            os.kill(running.lives("node")[0], signal.SIGKILL)  # so that no meeting is in progress
            await eventually(lambda: running.status.meetings["completed"] == 6, "the next node")
            assert not running.stopped_ns("trainer") and running.num(TrainerRestarted) == 0

    run(test())


def test_outside_its_schedule_it_pauses_and_reports_what_ends_the_pause(tmp_path: Path) -> None:
    other_day = f"{datetime.now() + timedelta(days=3):%a} 00:00-00:01".lower()

    async def test() -> None:
        async with peer(tmp_path, schedule=other_day) as (running, _):
            await eventually(lambda: running.status.peers_seen, "the node")
            assert running.status.state == "paused"
            assert f"schedule {other_day}" in running.status.reason
            assert not running.lives("trainer")
            with pytest.raises(BadSettings, match="stays paused") as caught:
                await control(running, verb="resume")
            assert "peer config schedule always" in caught.value.hint
            await control(running, verb="set", key="schedule", value="always")
            await until_training(running)
            assert saved_settings(running.home) == {"schedule": "always"}

    run(test())


def niceness(pid: int) -> int | None:
    """Return a process's niceness; None for one that has just ended: the trainer is being started again."""
    try:
        return psutil.Process(pid).nice()
    except psutil.NoSuchProcess:
        return None


def test_a_setting_that_the_trainer_starts_with_starts_it_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            await control(running, verb="set", key="threads", value="2")
            await eventually(lambda: len(running.lives("trainer")) == 2 and not node_rests(running), "another trainer")
            await until_training(running)
            assert len(running.lives("node")) == 1
            assert (await control(running, verb="config"))["threads"] == 2
            nicer = os.nice(0) + 1
            await control(running, verb="set", key="niceness", value=str(nicer))
            await eventually(lambda: list(map(niceness, running.children())) == [nicer, nicer], "both giving way")
            await until_training(running)
            await eventually(lambda: not node_rests(running), "the node notified")

    run(test())


def test_an_invalid_setting_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            for key, value, complaint in (
                ("thread", "2", "no setting"),
                ("threads", "-2", "is not valid"),
                ("schedule", "nightly", "no window"),
            ):
                with pytest.raises(BadSettings, match=complaint):
                    await control(running, verb="set", key=key, value=value)
            assert not running.home.config.exists()
            assert len(running.lives("trainer")) == 1

    run(test())


def test_a_paused_peer_can_leave(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            await control(running, verb="pause", seconds=None)
            await until_paused(running)
            await control(running, verb="leave")
            await work
            assert (running.status.state, running.status.reason) == ("left", "saved and stopped")

    run(test())


def test_a_bootstrap_node_cannot_pause(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, node="seed", trains=False, schedule="mon 00:00-00:01") as (running, _):
            await eventually(lambda: running.status.state == "serving", "a bootstrap node")
            with pytest.raises(BadSettings, match="does not train"):
                await control(running, verb="pause", seconds=None)

    run(test())


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "an hour"])
def test_what_is_no_duration_does_not_pause(tmp_path: Path, seconds: object) -> None:
    pauses = Pauses(Home(tmp_path))
    with pytest.raises(BadSettings, match="is not a duration"):
        pauses.ask(seconds)
    assert pauses.asked is None


def test_a_pause_does_not_replace_a_leave_that_waits_for_its_meeting(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, node="meets") as (running, _):
            await until_training(running)
            await control(running, verb="leave", finish=True)
            with pytest.raises(BadSettings, match="leaves as soon as its meeting is over"):
                await control(running, verb="pause", seconds=60.0)
            assert running.status.state == "leaving"

    run(test())


def test_leaving_with_finish_waits_for_the_meeting(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, node="meets") as (running, work):
            await until_training(running)
            await control(running, verb="leave", finish=True)
            await eventually(lambda: node_rests(running), "the node notified")
            assert (running.status.state, running.status.reason) == ("leaving", "asked to leave; finishing the meeting in progress first")
            assert not work.done()
            running.does("node", "serve")
            running.ends("node")  # as good as a word that all is quiet
            await work
            assert (running.status.state, running.status.reason) == ("left", "saved and stopped")
            assert running.stopped_ns("trainer")

    run(test())


def test_leaving_with_finish_ends_when_the_trainer_dies_before_the_meeting_is_over(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path, node="meets") as (running, work):
            await until_training(running)
            await control(running, verb="leave", finish=True)
            await eventually(lambda: node_rests(running), "the node notified")
            os.kill(running.lives("trainer")[0], signal.SIGKILL)
            await work
            assert running.status.state == "left" and len(running.lives("trainer")) == 1

    run(test())


def test_a_peer_with_used_up_traffic_is_offline_until_the_limit_is_raised(tmp_path: Path) -> None:
    async def test() -> None:
        month = datetime.now().strftime("%Y-%m")
        home = Home(tmp_path / "home")
        home.create()
        home.traffic.write_text(json.dumps({"month": month, "bytes": 2_000_000_000}))  # by earlier starts
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            await control(running, verb="set", key="monthly_traffic", value="1 GB")
            await eventually(lambda: running.status.state == "paused" and not running.children(), "offline")
            assert 0 < running.stopped_ns("trainer") < running.stopped_ns("node")
            assert "1 GB, is used up until" in running.status.reason
            with pytest.raises(BadSettings, match="stays paused"):
                await control(running, verb="resume")
            await control(running, verb="set", key="monthly_traffic", value="3 GB")
            await eventually(lambda: (len(running.lives("trainer")), len(running.lives("node"))) == (2, 2), "both back")
            await until_training(running)

    run(test())


def test_a_trainer_that_cannot_start_with_other_settings_pauses_the_peer_instead_of_ending_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, work):
            await until_training(running)
            running.does("trainer", "operator")  # it will say that it cannot be
            await control(running, verb="set", key="devices", value="cuda")
            await eventually(lambda: "cannot start: the port is busy" in running.status.reason, "paused")
            assert running.status.state == "paused"
            assert not work.done()
            running.does("trainer", "train")
            await control(running, verb="set", key="devices", value="cpu")
            await control(running, verb="resume")
            await until_training(running)

    run(test())


def test_a_complaint_about_settings_that_have_changed_meanwhile_pauses_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            running.does("trainer", "complains late")
            await control(running, verb="set", key="devices", value="cpu")
            await eventually(lambda: len(running.lives("trainer")) == 2, "the trainer that will complain")
            running.does("trainer", "train")
            await control(running, verb="set", key="max_memory", value="900 GB")
            (running.home.path / "trainer.complains").touch()
            await until_training(running)
            assert "paused" not in dict(running.states())

    run(test())


def test_a_peer_beyond_its_memory_limit_pauses_until_the_operator_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)

    async def test() -> None:
        async with peer(tmp_path) as (running, _):
            await until_training(running)
            await control(running, verb="set", key="max_memory", value="1 MB")
            await until_paused(running)
            assert "may hold 1 MB" in running.status.reason
            await control(running, verb="set", key="max_memory", value="unlimited")
            assert running.status.state == "paused"
            await control(running, verb="resume")
            await until_training(running)

    run(test())
