"""The demo as a user runs it: in its own process, with real peers on loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.peer.waiting import wait_until

DEMO = [sys.executable, "-m", "gossamer.cli.main", "demo", "--peers", "2"]


@pytest.mark.timeout(180)
def test_a_short_demo_prints_one_object_with_every_figure(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--steps", "20", "--seed", "1", "--json", "--home", str(tmp_path)], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["peers"], figures["steps"]) == (2, 20)
    assert len(figures["eval_loss"]) == len(figures["blocked_seconds"]) == len(figures["train_seconds"]) == 2
    assert figures["meetings"]["completed"] > 0
    assert figures["bytes_sent"] > 0
    assert 4 < figures["bits_per_param"] < 4.3
    assert max(*figures["eval_loss"], figures["eval_loss_averaged"], figures["eval_loss_alone"]) < figures["eval_loss_start"] - 1
    assert "peer-1" in done.stderr
    assert "alone" in done.stderr


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_nothing_outlives_the_demo(tmp_path: Path) -> None:
    """The demo ends by Ctrl-C. tests/cli/test_local_swarm.py tests SIGKILL."""
    with (tmp_path / "stderr").open("wb") as log:
        demo = subprocess.Popen([*DEMO, "--steps", "100000", "--home", str(tmp_path / "peers")], stdout=subprocess.DEVNULL, stderr=log)
    try:
        wait_until(lambda: "alone: training" in (tmp_path / "stderr").read_text(), "training peer", 90)
        family = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        assert not psutil.wait_procs(family, timeout=60)[1]
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait()
    assert not list((tmp_path / "peers").glob("*/running.json"))
