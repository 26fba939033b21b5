from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.simulator import training
from gossamer.peer.simulator.choices import SimulationRequest, scenario
from gossamer.peer.simulator.population import Diverged
from gossamer.peer.simulator.results import Result
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.training import (
    NUM_POINTS,
    Venue,
    Watch,
    averaged_loss,
    eval_size,
    held_out_losses,
    mean_weights,
    simulate,
    weight_std,
)
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest
from tests.peer.simulator.results import result as made_up
from tests.peer.simulator.swarms import small_population, small_scenario
from tests.peer.small import DEVICE, small_manifest

TEXT = "".join(f"line {n} of a text that repeats itself, more or less; " for n in range(3000))


Progress = tuple[int, int, float]


@pytest.fixture(scope="module")
def venue(tmp_path_factory: pytest.TempPathFactory) -> Venue:
    folder = tmp_path_factory.mktemp("venue")
    (folder / "text.txt").write_text(TEXT)
    return Venue(folder / "cache", folder / "text.txt", DEVICE, num_eval_batches=2, num_curve_batches=1)


def run(venue: Venue, seen: list[Progress] | None = None, **choices: Any) -> Result:
    manifest = small_manifest(data={"source": "text"})
    made = scenario(manifest, {"peers": 3, "steps": 30, "inner_steps": 5, "codec": "modulo4", **choices})
    return simulate(made, venue, lambda *progress: (seen if seen is not None else []).append(progress))


@pytest.fixture(scope="module")
def usual(venue: Venue) -> tuple[Result, list[Progress]]:
    """A simulation and what was seen of it."""
    seen: list[Progress] = []
    return run(venue, seen), seen


def test_a_simulation_returns_its_counts(usual: tuple[Result, list[Progress]]) -> None:
    result, seen = usual
    assert (result.method, result.codec, result.peers, result.steps) == ("noloco", "modulo4", 3, 30)
    assert result.tokens == 3 * 30 * 32 == seen[-1][0] == seen[-1][1]
    assert len(result.eval_loss) == 3
    assert 0.0 < result.eval_loss_averaged < 5.6
    assert max(result.eval_loss) < 5.5  # it began at log 256
    assert result.meetings > 5
    assert result.weight_std > 0.0
    assert 0.0 < result.output_distance < 1.0
    assert result.virtual_steps == 30
    assert 0.0 < result.train_seconds <= result.wall_seconds


def test_the_curve_goes_from_start_to_end(usual: tuple[Result, list[Progress]]) -> None:
    curve = usual[0].curve
    assert len(curve) == NUM_POINTS
    assert curve[-1].tokens == 3 * 30 * 32
    assert [point.tokens for point in curve] == sorted({point.tokens for point in curve})
    assert all(point.eval_loss is not None for point in curve)
    assert curve[-1].eval_loss is not None
    assert curve[0].eval_loss is not None
    assert curve[-1].eval_loss < curve[0].eval_loss


@pytest.mark.parametrize("method", ["noloco", "local", "diloco", "ddp"])
def test_with_drop_outs_the_curve_and_the_meter_end_where_the_training_does(venue: Venue, method: str) -> None:
    seen: list[Progress] = []
    result = run(venue, seen, method=method, codec="fp32", drop_out=0.4, speeds=(Fraction(2), Fraction(1)))
    assert result.tokens < 3 * 30 * 32 * 0.95
    assert seen[-1][0] == seen[-1][1] == result.tokens
    assert NUM_POINTS / 2 < len(result.curve) <= NUM_POINTS
    assert result.curve[-1].tokens == result.tokens
    assert result.curve[-1].sent_bytes == result.sent_bytes


def test_measurements_are_no_training_time(venue: Venue, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def measured(*_: object) -> list[float]:
        clock.now_s += 1000.0
        return [1.0]

    monkeypatch.setattr(training, "time", clock)
    monkeypatch.setattr(training, "held_out_losses", measured)
    monkeypatch.setattr(training, "weight_std", lambda _: measured()[0])
    result = run(venue, peers=2, steps=NUM_POINTS)
    assert result.wall_seconds > NUM_POINTS * 2000.0
    assert 0.0 < result.train_seconds < 1000.0


class Clock:
    """Stands in for the module `time`, with its own time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s


def test_equal_seeds_give_equal_results(venue: Venue) -> None:
    torch.manual_seed(5)
    first = run(venue, drop_out=0.2, steps=6)
    drawn = torch.rand(1)
    second = run(venue, drop_out=0.2, steps=6)
    assert first.meetings
    assert (first.eval_loss, first.weight_std, first.meetings) == (second.eval_loss, second.weight_std, second.meetings)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)  # the generator is left as it was
    assert run(venue, drop_out=0.2, steps=6, seed=1).eval_loss != first.eval_loss


def test_one_set_of_weights_stands_for_all_peers(venue: Venue) -> None:
    result = run(venue, method="ddp", codec="fp32", steps=6)
    assert result.eval_loss == (result.eval_loss_averaged,) * 3
    assert result.weight_std == result.output_distance == 0.0
    assert result.bits_per_param == 32.0
    assert result.meetings == 6


def test_lone_peers_send_nothing(venue: Venue) -> None:
    result = run(venue, method="local", steps=6)
    assert (result.meetings, result.bits_per_param, result.sent_bytes) == (0, 0.0, 0.0)


# ---------------------------------------------------------------------- what is measured


def test_the_mean_and_the_distance_from_it() -> None:
    replicas = small_population(small_scenario(peers=2)).replicas
    replicas[0].weights.fill_(1.0)
    replicas[1].weights.fill_(3.0)
    assert torch.equal(mean_weights(replicas), torch.full_like(replicas[0].weights, 2.0))
    assert weight_std(replicas) == pytest.approx(1.0)
    assert weight_std(replicas[:1]) == 0.0


def test_equal_replicas_are_their_mean_exactly() -> None:
    replicas = small_population(small_scenario(peers=3)).replicas
    assert weight_std(replicas) == 0.0
    assert torch.equal(mean_weights(replicas), replicas[1].weights)


def test_the_average_is_measured_without_touching_a_replica() -> None:
    population = small_population(small_scenario(peers=2))
    one, two = population.replicas
    one.inner_step()
    two.inner_step()
    held_out, before = population.texts.held_out, one.weights.clone()
    mean = mean_weights(population.replicas)
    averaged = averaged_loss(population.replicas, held_out, 2)
    assert torch.equal(one.weights, before)
    one.weights.copy_(mean)
    assert averaged == pytest.approx(held_out_loss(one.model, held_out, 2), rel=1e-6)


class Held:
    """A corpus with plenty of held-out text."""

    def num_held_out(self) -> int:
        return 10**9


@pytest.mark.parametrize(("steps", "tokens"), [(10, 4096), (1000, 0.12 * 3 * 4 * 1000 / 5), (10**6, 131_072)])
def test_a_measurement_is_a_share_of_the_training_within_bounds(steps: int, tokens: float) -> None:
    made = small_scenario(peers=4, steps=steps)
    found = eval_size(made, Held(), Venue(Path("cache")))
    wanted = tokens * made.step_tokens if steps == 1000 else tokens
    measured = found.num_batches * made.step_tokens if found.most_tokens is None else found.most_tokens
    assert measured == pytest.approx(wanted, rel=0.1)


def test_a_measurement_is_as_long_as_asked_for() -> None:
    made = small_scenario(peers=4)
    assert eval_size(made, Held(), Venue(Path("cache"), num_eval_batches=7)) == (7, None)
    assert eval_size(made, Held(), Venue(Path("cache"), num_eval_tokens=made.step_tokens * 3)) == (3, None)


def test_each_replica_is_measured() -> None:
    population = small_population(small_scenario(peers=2))
    population.replicas[1].inner_step()
    one, two = held_out_losses(population.replicas, population.texts.held_out, 2)
    assert one != two


def test_a_curve_can_be_that_of_the_mean_weights(venue: Venue) -> None:
    same = replace(venue, num_curve_batches=venue.num_eval_batches)
    averaged = run(replace(same, averages_curve=True), peers=2, method="local")
    apart = run(same, peers=2, method="local")
    assert averaged.curve[-1].eval_loss == pytest.approx(averaged.eval_loss_averaged)
    assert apart.curve[-1].eval_loss == pytest.approx(apart.eval_loss_mean)
    assert averaged.eval_loss == apart.eval_loss  # measuring changes no weight


# ---------------------------------------------------------------------- sweeps


VENUE = Venue(Path("cache"))


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """What was simulated; a learning rate above 1 diverges."""
    seen: list[Scenario] = []

    def simulate(scenario: Scenario, venue: Venue, watch: Watch) -> Result:
        seen.append(scenario)
        watch(1, 2, 3.0)
        if scenario.manifest.inner.learning_rate > 1:
            raise Diverged("peer 0 diverged", hint="cooler")
        return made_up(method=scenario.manifest.outer.method)

    monkeypatch.setattr(training, "simulate", simulate)
    return seen


def test_one_simulation_is_a_row_without_a_point(simulated: list[Scenario]) -> None:
    rows = training.run(SimulationRequest(Manifest(), {"method": "local"}, ["skew=0.5"]), VENUE, lambda *_: None)
    assert [(row.point, row.name) for row in rows] == [({}, "local")]
    assert simulated[0].skew == 0.5


def test_a_sweep_runs_and_names_every_point(simulated: list[Scenario]) -> None:
    names: list[str] = []
    request = SimulationRequest(Manifest(), {"peers": 2}, axes=["learning_rate=1e-3,9", "inner_steps=5,25"])
    rows = training.run(request, VENUE, lambda name, *_: names.append(name))
    assert [row.point for row in rows] == [
        {"learning_rate": rate, "inner_steps": inner_steps} for rate in (1e-3, 9) for inner_steps in (5, 25)
    ]
    assert names[0] == "1/4 learning_rate 0.001, inner_steps 5"
    assert [bool(row.result) for row in rows] == [True, True, False, False]
    assert rows[2].failure == "peer 0 diverged"


def test_a_sweep_ends_where_its_runs_cannot_be_kept(simulated: list[Scenario], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    request = SimulationRequest(Manifest(), {"peers": 2}, axes=["seed=1,2"])
    rows = training.run(request, Venue(tmp_path / "file" / "cache"), lambda *_: None, said.append)
    assert len(rows) == len(simulated) == 2
    assert [line.partition(": ")[2] for line in said] == ["Not a directory; an interruption would lose it"] * 2


def test_a_sweep_with_an_impossible_point_does_not_start(simulated: list[Scenario]) -> None:
    with pytest.raises(BadSettings):
        training.run(SimulationRequest(Manifest(), {}, axes=["codec=fp32,modul4"]), VENUE, lambda *_: None)
    assert simulated == []


def test_a_single_simulation_that_diverges_is_an_error(simulated: list[Scenario]) -> None:
    with pytest.raises(Diverged):
        training.run(SimulationRequest(Manifest(), {"learning_rate": 2.0}), VENUE, lambda *_: None)
