"""The figures of staged runs, from logs of events."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stages import in_order, measured, over_count
from gossamer.peer.machine.event_log import EventLog
from gossamer.peer.machine.events import Event, HopsCarried, StageHeld, StepDone
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.messages.terms import StageTerms

TERMS = StageTerms(0, 2, token_bytes=100, value_bytes=200, in_batch=4)


def home_of(folder: Path, *events: Event) -> Path:
    home = Home(folder)
    home.create()
    log = EventLog(home.events)
    for event in events:
        log.append(event)
    return folder


def done(step: int, at_s: float) -> StepDone:
    return StepDone(step, step, 100 * step, 2.0, 1e-3, 0.0, at_s, 0.0, 0.5 * at_s, 0.1 * at_s, ts=at_s)


def hops(trained: int, num_bytes: int) -> HopsCarried:
    return HopsCarried({"trained": trained, "measured": 1}, 0, 0, 1, num_bytes, 0)


def test_the_steps_after_the_warm_up_are_measured(tmp_path: Path) -> None:
    found = measured("one", home_of(tmp_path, done(2, 1.0), done(20, 10.0), done(30, 20.0)))
    assert (found.tokens_per_s, found.training_s) == (100.0, pytest.approx(0.005))


def test_a_run_that_ends_in_its_warm_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="too soon"):
        measured("one", home_of(tmp_path, done(2, 1.0), done(12, 2.0)))


def test_bytes_are_compared_with_the_trained_hops_and_without_one_with_nothing(tmp_path: Path) -> None:
    assert over_count(home_of(tmp_path / "some", hops(0, 10), hops(3, 1800)), TERMS) == 1800 / (3 * 500 + 300)
    with pytest.raises(BadSettings, match="trained micro-batch"):
        over_count(home_of(tmp_path / "none", HopsCarried({}, 0, 0, 1, 0, 0)), TERMS)


def test_ten_stages_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    homes = [home_of(tmp_path / str(stage), StageHeld(stage, 10)) for stage in (10, *range(1, 10))]
    assert in_order(homes, 10) == [*homes[1:], homes[0]]


def test_a_peer_that_held_no_stage_is_no_holder(tmp_path: Path) -> None:
    homes = [home_of(tmp_path / "one", StageHeld(1, 2)), home_of(tmp_path / "other")]
    with pytest.raises(BadSettings, match="of 2 stages"):
        in_order(homes, 2)
