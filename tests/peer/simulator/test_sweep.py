from __future__ import annotations

from pathlib import Path

import pytest

from peer.simulator import sweep as module
from peer.simulator.history import Result
from peer.simulator.replicas import Diverged
from peer.simulator.scenario import Scenario
from peer.simulator.sweep import Request, run
from peer.simulator.training import Place, Progress, Watch
from protocol.errors import BadSettings
from protocol.run.manifest import Manifest
from tests.peer.simulator.results import result

PLACE = Place(Path("cache"))


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """What was simulated; a learning rate above 1 diverges."""
    seen: list[Scenario] = []

    def simulate(scenario: Scenario, place: Place, watch: Watch) -> Result:
        seen.append(scenario)
        watch(Progress(1, 2, 3.0))
        if scenario.manifest.inner.learning_rate > 1:
            raise Diverged("peer 0 diverged", hint="cooler")
        return result(method=scenario.manifest.outer.method)

    monkeypatch.setattr(module, "simulate", simulate)
    return seen


def test_one_simulation_is_a_row_without_a_point(simulated: list[Scenario]) -> None:
    rows = run(Request(Manifest(), {"method": "local"}, ["skew=0.5"]), PLACE, lambda name, progress: None)
    assert [(row.point, row.name) for row in rows] == [({}, "local")]
    assert simulated[0].skew == 0.5


def test_a_sweep_runs_every_point_and_says_which(simulated: list[Scenario]) -> None:
    names: list[str] = []
    request = Request(Manifest(), {"peers": 2}, axes=["learning_rate=1e-3,9", "inner_steps=5,25"])
    rows = run(request, PLACE, lambda name, progress: names.append(name))
    assert [row.point for row in rows] == [
        {"learning_rate": rate, "inner_steps": inner_steps} for rate in (1e-3, 9) for inner_steps in (5, 25)
    ]
    assert names[0] == "1/4 learning_rate 0.001, inner_steps 5"
    assert [bool(row.result) for row in rows] == [True, True, False, False]
    assert rows[2].failure == "peer 0 diverged"


def test_nothing_runs_when_one_point_cannot_be(simulated: list[Scenario]) -> None:
    with pytest.raises(BadSettings):
        run(Request(Manifest(), {}, axes=["codec=fp32,modul4"]), PLACE, lambda name, progress: None)
    assert simulated == []


def test_a_single_simulation_that_diverges_is_an_error(simulated: list[Scenario]) -> None:
    with pytest.raises(Diverged):
        run(Request(Manifest(), {"learning_rate": 2.0}), PLACE, lambda name, progress: None)
