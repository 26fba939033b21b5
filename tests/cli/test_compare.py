"""`peer compare`: the figures of homes that nobody runs from any more; the measuring is tested beside peer/model/evaluation.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.cli.compare import last_session
from gossamer.cli.main import run
from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import Event, ModelBuilt, PeerStarted, RunKnown, StepDone
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from tests.cli.shell import Shell
from tests.peer.trained_homes import tiny_manifest, trained_home


def ran(home: Home, began_s: float, steps: int) -> None:
    """Leave the events of one start of a peer that trained for a minute."""
    log = EventLog(home.events)
    events: list[Event] = [
        PeerStarted("12D3KooX", ts=began_s),
        RunKnown("ab", 100, ts=began_s),
        ModelBuilt(1000, 4.18, ts=began_s),
        StepDone(steps, steps, 80, 2.5, 0.1, 10.0, 1.5, 0.5, 1.25, 0.25, ts=began_s + 60.0),
    ]
    for event in events:
        log.append(event)


def test_only_the_last_start_is_compared(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ran(home, 1000.0, 7)
    ran(home, 2000.0, 9)
    status, began_s, ended_s = last_session(tmp_path)
    assert (status["own_steps"], began_s, ended_s) == (9, 2000.0, 2060.0)


def test_a_peer_that_never_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=str(tmp_path)):
        last_session(tmp_path)


def test_a_folder_without_homes_is_refused(shell: Shell) -> None:
    assert "no home folder" in shell("compare").complaint[0]


def test_the_closing_statement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    homes = [trained_home(tmp_path / name, tiny_manifest(), seed) for seed, name in enumerate(("one", "two", "alone"))]
    for number, home in enumerate(homes):
        ran(home, 1000.0 + number, 9)
    assert run(["compare", "--home", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["peers"], len(found["eval_loss"]), found["wall_seconds"]) == (2, 2, 61.0)
