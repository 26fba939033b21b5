"""The power of GPUs, from a real command that prints what the driver's tool prints."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from gossamer.cli.status import power_text
from gossamer.peer.machine.config import LocalSettings, PeerConfig
from gossamer.peer.machine.events import Event, GpuPowerRead
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor.gpu_driver import GPU_TOOL, GpuReading, gpus_in
from gossamer.peer.supervisor.pauses import Pauses, ruled_pause
from gossamer.peer.supervisor.surroundings import Lookout, Surroundings
from tests.peer.waiting import wait_until

NOON_S = datetime(2026, 11, 22, 12, 0).timestamp()
TWO = "54, 61.32, 300.00\n71, 250.00, 350.00\n"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the driver's tool on the path; it prints what the file `prints` holds, if it is asked as the real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / GPU_TOOL[0]
    program.write_text(f'#!/bin/sh\n[ "$*" = "{" ".join(GPU_TOOL[1:])}" ] || exit 2\ncat "{tmp_path}/prints"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (tmp_path / "prints").write_text(TWO)
    return tmp_path / "prints"


def looked(lookout: Lookout, settings: LocalSettings) -> Surroundings:
    """Look until the tool has ended."""
    wait_until(lambda: lookout.look(settings).gpus, "reading")
    return lookout.look(settings)


def test_what_the_tool_prints_is_read_and_what_it_does_not_know_is_nothing() -> None:
    assert gpus_in(TWO) == (GpuReading(54.0, 61.32, 300.0), GpuReading(71.0, 250.0, 350.0))
    assert gpus_in("40, [N/A], [Not Supported]\n\n") == (GpuReading(40.0, None, None),)
    assert gpus_in("40") == (GpuReading(40.0, None, None),)
    assert gpus_in("nan, inf, 5, 6") == (GpuReading(None, None, 5.0),)
    assert gpus_in("") == ()


def test_a_limit_above_the_setting_pauses_and_says_what_root_can_do(tool: Path, tmp_path: Path) -> None:
    settings, lookout = LocalSettings(max_gpu_power=300), Lookout(tmp_path)
    around = looked(lookout, settings)
    pause = ruled_pause(settings, NOON_S, around)
    assert pause is not None and pause.reason == "a GPU may draw 350 W, more than 300 W"
    assert "`nvidia-smi -pl 300`" in pause.way_out and "as root" in pause.way_out
    assert ruled_pause(LocalSettings(max_gpu_power=350), NOON_S, around) is None
    assert ruled_pause(LocalSettings(), NOON_S, around) is None
    assert lookout.warnings["max_gpu_power"] == ""


def test_a_driver_that_tells_no_limit_is_a_warning(tool: Path, tmp_path: Path) -> None:
    tool.write_text("54, 61.32, [N/A]\n")
    settings, lookout = LocalSettings(max_gpu_power=300), Lookout(tmp_path)
    assert ruled_pause(settings, NOON_S, looked(lookout, settings)) is None
    assert "no GPU's driver tells its power limit" in lookout.warnings["max_gpu_power"]


def test_the_status_shows_what_each_gpu_draws_and_may(tool: Path, tmp_path: Path) -> None:
    pauses = Pauses(Home(tmp_path / "home"))
    config = PeerConfig(home=tmp_path / "home")

    def look() -> list[Event]:
        pauses.current_pause(config)
        return list(pauses.look(Status()))

    (event,) = wait_until(look, "reading")
    assert event == GpuPowerRead(((61.32, 300.0), (250.0, 350.0)))
    status = apply(Status(), event)
    assert status.to_json()["gpu_power"][0] == {"draw_watts": 61.32, "limit_watts": 300.0}
    assert power_text(status.gpu_power) == "61 of 300 W, 250 of 350 W"
    assert not list(pauses.look(status)), "it is told once"
    pauses.close()
