from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import Event, EventsLost, ProcessFailed, ProcessReported, SoloStep
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.log_lines import Log
from gossamer.peer.supervisor.child_process import ChildExit, ChildProcess
from tests.peer.child_program import NUM_CHATTER
from tests.peer.waiting import eventually

T = TypeVar("T")


class Started:
    """One started child and what it told."""

    def __init__(self, home: Path, module: str = "tests.peer.child_program") -> None:
        self.home = home
        self.events: list[Event] = []
        self.process = ChildProcess(module, home / "log", self.events.append)

    async def start(self, behaviour: str) -> None:
        await self.process.start()
        config = PeerConfig(home=self.home, data=Path(behaviour))
        self.process.notify(ChildSettings(config=config, peer_id="12D3KooX", runtime=self.home, waits_for_start=True).to_line())

    async def begun(self) -> tuple[int, asyncio.Task[ChildExit]]:
        """Wait until it runs; return its process id and what waits for its end."""
        waiting = asyncio.create_task(self.process.wait())
        await eventually(lambda: self.events, "first event")
        first = self.events[0]
        assert isinstance(first, ProcessReported)
        return int(first.state), waiting


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(40):
            return await work

    return asyncio.run(bounded())


def started_and_ended(home: Path, behaviour: str) -> tuple[ChildExit, Started]:
    async def inside() -> tuple[ChildExit, Started]:
        child = Started(home)
        await child.start(behaviour)
        return await child.process.wait(), child

    return run(inside())


def test_a_child_gets_its_settings_and_stops_when_asked(tmp_path: Path) -> None:
    async def test() -> None:
        child = Started(tmp_path)
        assert child.process.pid is None
        await child.start("obey")
        pid, waiting = await child.begun()
        assert pid == child.process.pid
        waiting.cancel()  # the child lives on
        await asyncio.wait([waiting])
        assert psutil.pid_exists(pid)
        assert await child.process.stop(10.0) == ChildExit(0, "exit code 0", None)
        assert child.events[-1] == ProcessReported("goodbye", "")
        assert not psutil.pid_exists(pid)

    run(test())


def test_a_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    async def test() -> None:
        child = Started(tmp_path)
        await child.start("deaf")
        pid, waiting = await child.begun()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await child.process.stop(0.1) is None
        assert not psutil.pid_exists(pid)
        child.process.kill()  # twice is harmless
        assert await child.process.stop(0.1) == ChildExit(-9, "killed by SIGKILL", None)

    run(test())


def test_stopping_what_never_ran(tmp_path: Path) -> None:
    assert run(Started(tmp_path).process.stop(1.0)) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_child_ignores_signals_to_its_group(tmp_path: Path, number: signal.Signals) -> None:
    async def test() -> None:
        child = Started(tmp_path)
        await child.start("obey")
        pid, waiting = await child.begun()
        os.kill(pid, number)
        waiting.cancel()
        await asyncio.wait([waiting])
        exit = await child.process.stop(10.0)
        assert exit is not None and exit.code == 0

    run(test())


def test_the_exit_of_a_killed_child_names_the_signal(tmp_path: Path) -> None:
    async def test() -> None:
        child = Started(tmp_path)
        await child.start("deaf")
        pid, waiting = await child.begun()
        os.kill(pid, signal.SIGKILL)
        assert await waiting == ChildExit(-9, "killed by SIGKILL", None)

    run(test())


@pytest.mark.parametrize(
    ("behaviour", "failure"),
    [
        ("operator", ProcessFailed("the port is busy", "choose another", 2, True)),
        ("network", ProcessFailed("nobody there", "wait", 3, False)),
        ("bug", ProcessFailed("ValueError: out of cheese", "", 1, False)),
    ],
)
def test_the_final_error_of_a_child_arrives(tmp_path: Path, behaviour: str, failure: ProcessFailed) -> None:
    end, child = started_and_ended(tmp_path, behaviour)
    assert end == ChildExit(failure.exit_code, failure.error, failure)
    assert len(child.events) == 1


def test_a_traceback_is_in_the_log_at_its_time(tmp_path: Path) -> None:
    """Without a time it would stand at the last line that has one, days ago: `peer logs` would not show it."""
    started_s = time.time()
    (home := Home(tmp_path)).create()
    home.log.write_text("2026-11-22 12:00:00,500 WARNING gossamer: long before\n")
    _, child = started_and_ended(tmp_path, "bug")
    with home.log.open("a") as log:
        log.write((child.home / "log").read_text())
    [thrown] = [line for line in Log(home).lines() if line.text == "ValueError: out of cheese"]
    assert thrown.ts >= int(started_s)


def test_a_truncated_event_is_skipped(tmp_path: Path) -> None:
    end, child = started_and_ended(tmp_path, "half")
    assert end.code == -9
    assert child.events[1:] == [SoloStep(1, "")]


def test_an_event_that_is_too_long_is_skipped_and_a_long_error_is_cut(tmp_path: Path) -> None:
    end, child = started_and_ended(tmp_path, "verbose")
    assert end.failure is not None and end.failure.final and end.failure.hint == "be brief"
    assert end.reason.startswith("yyy") and len(end.reason) < 20_000
    assert len(child.events) == 1


def test_what_a_child_prints_goes_to_the_log(tmp_path: Path) -> None:
    end, child = started_and_ended(tmp_path, "print")
    assert end.code == 0
    assert len(child.events) == 1
    assert (tmp_path / "log").read_text() == "printed\nwritten\n"


def test_a_child_with_unread_events_goes_on_and_counts_the_lost_ones(tmp_path: Path) -> None:
    async def test() -> None:
        child = Started(tmp_path)
        await child.start("chatter")
        await eventually((tmp_path / "done").exists, "end of the chatter")
        end = await child.process.stop(20.0)
        assert end is not None and end.code == 0
        numbers = [event.fragment for event in child.events if isinstance(event, SoloStep)]
        assert numbers == sorted(numbers)
        lost = [event.num_events for event in child.events if isinstance(event, EventsLost)]
        assert lost
        assert len(numbers) + sum(lost) == NUM_CHATTER

    run(test())


def test_a_child_without_settings_ends_without_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        child = Started(tmp_path)
        await child.process.start()
        assert await child.process.stop(20.0) == ChildExit(0, "exit code 0", None)
        assert (tmp_path / "log").read_text() == ""

    run(test())


def test_the_packages_are_ours_wherever_we_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "__init__.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    end, _ = started_and_ended(tmp_path, "print")
    assert end.code == 0
