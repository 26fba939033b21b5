"""`peer logs`, of a peer that runs no more: what there is, filtered; and a report with nobody's names in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import CheckpointFailed, SoloStep, StateChanged, StepDone
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.states import changed
from gossamer.peer.machine.status import Status, apply
from tests.cli.shell import Shell

LOGGER = "gossamer.peer.node.node:"
WORDS = f"2026-11-22 12:00:00,500 WARNING {LOGGER} a stream to /ip4/203.0.113.9/tcp/4001/p2p/12D3KooWMUkXeJ7opGyyab broke"


@pytest.fixture
def home(shell: Shell) -> Home:
    home = Home(shell.home)
    home.create()
    log = EventLog(home.events)
    for event in (
        StateChanged("training", "meeting others", ts=1.0),
        StepDone(1, 1, 1, 2.0, 0.1, 1.0, 1.0, 0.0, 1.0, 0.0, ts=2.0),
        SoloStep(0, "no partner", ts=3.0),
        CheckpointFailed(8, "no room", ts=4.0),
        StateChanged("failed", "out of cheese", "buy some", ts=5.0),
    ):
        log.append(event)
    home.log.write_text(f"{WORDS}\nTraceback: x gossamer1abcdef {home.path}/key\n")
    return home


@pytest.mark.parametrize(("options", "names"), [
    ((), ["StateChanged", "SoloStep", "CheckpointFailed", "StateChanged", LOGGER, "Traceback:"]),
    (("--level", "debug", "--lines", "6"), ["StepDone", "SoloStep", "CheckpointFailed", "StateChanged", LOGGER, "Traceback:"]),
    (("--level", "error"), ["StateChanged"]),
    (("--grep", "no (room|partner)"), ["SoloStep", "CheckpointFailed"]),
])  # fmt: skip
def test_lines_are_in_order_and_filtered(shell: Shell, home: Home, options: tuple[str, ...], names: list[str]) -> None:
    result = shell("logs", *options)
    assert result.code == 0
    assert [line.split()[3] for line in result.out.splitlines()] == names


def test_a_report_holds_no_identifying_data(shell: Shell, home: Home) -> None:
    status = apply(Status(peer_id="12D3KooWMUkXeJ7opGyyab", addresses=["/ip4/203.0.113.7/tcp/1"]), changed("failed", f"no {home.path}"))
    home.status.write_text(json.dumps(status.to_json()))
    with home.log.open("a") as log:
        log.write("dial tcp6 [::]:4001->[2001:db8::5:1]:4001, 2001:DB8:0:0:1:2:3:4 and fe80::1%eth0: timeout at 12:34:56 of std::cout\n")
    result = shell("logs", "--report")
    assert "[::]:4001->[ADDRESS]:4001, ADDRESS and ADDRESS%eth0: timeout at 12:34:56 of std::cout" in result.out
    assert "failed for" in result.out
    assert f"{LOGGER} a stream to /ip4/ADDRESS/tcp/4001/p2p/12D3Koo...pGyyab broke" in result.out
    for secret in ("2001:", "gossamer1", "203.0.113", "12D3KooWMUk", str(home.path), str(Path.home())):
        assert secret not in result.out


def test_an_invalid_pattern_is_refused(shell: Shell, home: Home) -> None:
    result = shell("logs", "--grep", "(")
    assert result.code == 2
    assert "is not a regular expression" in result.complaint[0]


def test_a_reader_that_has_read_enough_ends_it_as_it_ends_other_programs(home: Home) -> None:
    log = EventLog(home.events)
    for number in range(2000):  # more than a pipe holds
        log.append(SoloStep(number, "no partner in sight"))
    asked = [sys.executable, "-m", "gossamer.cli.main", "logs", "--home", str(home.path), "--lines", "2000"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as printing:
        assert printing.stdout is not None and printing.stderr is not None
        assert printing.stdout.readline()
        printing.stdout.close()
        assert printing.stderr.read() == b""
    assert printing.returncode == -signal.SIGPIPE


def test_letters_that_the_terminal_lacks_are_escaped(home: Home) -> None:
    EventLog(home.events).append(SoloStep(0, "no \u8bad\u7ec3"))
    asked = [sys.executable, "-m", "gossamer.cli.main", "logs", "--home", str(home.path), "--grep", "SoloStep"]
    done = subprocess.run(asked, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, text=True, check=True)
    assert "\\u8bad" in done.stdout and not done.stderr
