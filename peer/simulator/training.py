"""Simulations: build the swarm, train it in virtual time and measure it, once or for each combination of swept settings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from gossamer.peer.model.accelerator import choose_device, forked_generators
from gossamer.peer.model.computing import Computing, output_distance, predictions
from gossamer.peer.model.evaluation import NUM_TOKENS, EvalSize, held_out_loss, held_out_rows, measured_size, part_rows
from gossamer.peer.simulator.choices import SimulationRequest
from gossamer.peer.simulator.kept_runs import KeptRuns
from gossamer.peer.simulator.methods import Method, method
from gossamer.peer.simulator.population import Diverged, Population, SimulatedReplica, need_memory, populate
from gossamer.peer.simulator.results import Point, Result, Row
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.texts import load_texts
from gossamer.peer.text.corpus import Corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadManifest

NUM_POINTS: Final = 24  # of a curve
EVAL_SHARE: Final = 0.12  # of the computation of training, for the measurement of a trained swarm
TRAIN_PASSES: Final = 3  # a token that trains costs as much as so many that are measured
LEAST_EVAL_TOKENS: Final = 4096
PROBE_BATCHES: Final = 8  # on which the replicas' outputs are compared


Watch = Callable[[int, int, float], None]  # called with the tokens so far and in total, and the newest mean loss, nats per token


@dataclass(frozen=True, slots=True)
class Venue:
    """Where a simulation runs, and on how much text it is measured."""

    cache: Path  # folder for the tokens of the operator's text
    data: Path | None = None
    device: str = "auto"
    num_eval_batches: int | None = None
    num_eval_tokens: int | None = None  # without either: EVAL_SHARE of what training computes
    num_curve_batches: int = 0  # held-out batches at each point of the curve; 0: no held-out loss in the curve
    averages_curve: bool = False  # the held-out loss of the curve is that of the mean weights, not the mean over the peers


def run(
    request: SimulationRequest, venue: Venue, follow: Callable[[str, int, int, float], None], say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Run all simulations of a request and report progress to `follow`.

    Raises as `simulate`, and BadSettings for a setting without effect; in a sweep a divergence is a row.

    A sweep keeps each finished run until its end, so the same request after an interruption runs only what is missing; `say` gets a line.
    """
    points = request.scenarios()
    request.need_effects(points)
    if not points[0][0]:
        made = points[0][1]
        return [Row({}, simulate(made, venue, partial(follow, made.manifest.outer.method)))]
    sizes = venue.num_eval_batches, venue.num_eval_tokens, venue.num_curve_batches, venue.device, torch.get_num_threads()
    kept = KeptRuns(venue.cache, [made for _, made in points], venue.data, *sizes)
    finished, rows = kept.read(), []
    if finished:
        say(f"{len(finished)} of {len(points)} runs are kept from an interrupted sweep; the others follow")
    for number, (point, made) in enumerate(points, 1):
        if number in finished:
            rows.append(Row(point, *finished[number]))
            continue
        name = f"{number}/{len(points)} {Row(point, None).name}"
        try:
            rows.append(Row(point, simulate(made, venue, partial(follow, name))))
        except Diverged as error:
            rows.append(Row(point, None, str(error)))
        except KeyboardInterrupt:
            say(f"interrupted: {len(rows)} of {len(points)} runs are kept; the same command runs the others")
            raise
        try:
            kept.add(number, rows[-1])
        except OSError as error:
            say(f"run {number} is not kept in {venue.cache}: {error.strerror}; an interruption would lose it")
    kept.remove()
    return rows


def simulate(scenario: Scenario, venue: Venue, watch: Watch) -> Result:
    """Train the scenario's swarm and measure it.

    The figures depend on the run's seed, the text, torch, and its number of threads; torch's generator is restored. Raises BadSettings or
    BadManifest for impossible scenarios, Diverged when the training diverges.
    """
    started_s = time.monotonic()
    if scenario.manifest.is_fine_tuning:
        raise BadManifest("`peer simulate` trains no fine-tuning run", hint="`peer host` and `peer join` do; --network estimates one")
    chosen = method(scenario.manifest.outer.method)
    device, _ = choose_device(venue.device)
    need_memory(scenario, device, chosen.size(scenario))
    tokenizer = load_tokenizer(scenario.manifest.tokenizer)
    texts = load_texts(scenario, tokenizer, venue.data, venue.cache)
    try:
        with forked_generators(device):
            torch.manual_seed(scenario.seed)
            population = populate(scenario, tokenizer, texts, device, chosen.schedules(scenario))
            recorder = Recorder(population, venue, watch, total_steps(chosen, scenario))
            train = chosen.train(scenario, len(population.layout.codecs))
            trained_s = time.monotonic()
            for now in train(population):
                recorder.after(now)
            train_seconds = time.monotonic() - trained_s - recorder.measured_s
            return recorder.result(started_s, train_seconds)
    finally:
        texts.close()


def total_steps(chosen: Method, scenario: Scenario) -> int:
    """Return the number of inner steps that all peers will take together; absences are known beforehand."""
    steps = scenario.steps_at_own_rates() if chosen.at_own_rate else scenario.steps_together()
    return sum(len(peers) for _, peers in steps)


class Recorder:
    """Records the curve of a population in training. `measured_s` is the total duration of the measurements so far."""

    def __init__(self, population: Population, venue: Venue, watch: Watch, total_steps: int) -> None:
        self._population = population
        self.measured_s = 0.0
        self._venue = venue
        self._watch = watch
        self._num_steps = 0  # inner steps, over all peers
        self._total_steps = total_steps
        self._losses: list[float] = []  # since the last point
        self._curve: list[Point] = []
        self._now = Fraction(0)

    def after(self, now: Fraction) -> None:
        """Record the inner steps up to an instant."""
        self._now = now
        newest = [loss for replica in self._population.replicas for loss in replica.taken_losses()]
        self._num_steps += len(newest)
        self._losses += newest
        if newest:
            self._watch(self._tokens, self._total_steps * self._population.scenario.step_tokens, _mean(newest))
        if self._num_steps * NUM_POINTS >= self._total_steps * (len(self._curve) + 1) and self._losses:
            self._curve.append(self._point())

    @property
    def _tokens(self) -> int:
        return self._num_steps * self._population.scenario.step_tokens

    @property
    def _sent_bytes(self) -> float:
        return self._population.traffic.sent_bytes / self._population.scenario.num_peers

    def _point(self) -> Point:
        started_s = time.monotonic()
        eval_loss = self._curve_loss(self._venue.num_curve_batches) if self._venue.num_curve_batches else None
        train_loss, self._losses = _mean(self._losses), []
        spread = weight_std(self._population.replicas)
        self.measured_s += time.monotonic() - started_s
        return Point(float(self._now), self._tokens, self._sent_bytes, train_loss, spread, eval_loss)

    def _curve_loss(self, num_batches: int) -> float:
        replicas, held_out = self._population.replicas, self._population.texts.held_out
        if self._venue.averages_curve:
            return averaged_loss(replicas, held_out, num_batches)
        return _mean(held_out_losses(replicas, held_out, num_batches))

    def result(self, started_s: float, train_seconds: float) -> Result:
        """Measure the trained replicas."""
        population, scenario, traffic = self._population, self._population.scenario, self._population.traffic
        held_out, began_s = population.texts.held_out, time.monotonic()
        size = eval_size(scenario, held_out, self._venue)
        honest = population.replicas[: scenario.num_honest]
        losses = held_out_losses(honest, held_out, *size)
        averaged = averaged_loss(honest, held_out, *size) if len(losses) > 1 else losses[0]
        distance = sum(map(self._output_distance, held_out.held_out_batches(PROBE_BATCHES))) / PROBE_BATCHES
        self.measured_s += time.monotonic() - began_s
        return Result(
            method=scenario.manifest.outer.method,
            codec=scenario.manifest.codec.name,
            peers=scenario.num_peers,
            steps=scenario.num_steps,
            tokens=self._tokens,
            eval_loss=tuple(losses * scenario.num_peers)[: scenario.num_honest],
            eval_loss_averaged=averaged,
            weight_std=weight_std(honest),
            output_distance=distance,
            eval_tokens=held_out_rows(held_out, size.num_batches, size.most_tokens).shape[0] * scenario.manifest.inner.sequence_length,
            eval_seconds=self.measured_s,
            meetings=traffic.completed,
            bits_per_param=population.layout.bits_per_value if traffic.sent_bytes else 0.0,
            wall_seconds=time.monotonic() - started_s,
            refused=traffic.refused,
            attackers=scenario.attackers,
            hostile=traffic.hostile,
            hostile_merged=traffic.hostile_merged,
            dropped=traffic.dropped,
            solo=traffic.solo,
            sent_bytes=self._sent_bytes,
            bits_per_step=8.0 * self._sent_bytes / (population.layout.numel * scenario.num_steps),
            virtual_steps=float(self._now),
            train_seconds=train_seconds,
            curve=tuple(self._curve),
        )

    def _output_distance(self, batch: Tensor) -> float:
        return output_distance([predictions(replica.model, batch[:1]) for replica in self._population.replicas])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def mean_weights(replicas: Sequence[SimulatedReplica]) -> Tensor:
    """Return the mean of the replicas' fast weights: a new flat vector, exact when all are equal."""
    first = replicas[0].weights
    away = torch.zeros_like(first)
    for replica in replicas[1:]:
        away.add_(replica.weights - first)
    return away.div_(len(replicas)).add_(first)


def weight_std(replicas: Sequence[SimulatedReplica]) -> float:
    """Return the root mean square distance of the replicas' fast weights from their mean (NoLoCo, Figure 3B, not normalized)."""
    mean = mean_weights(replicas)
    squares = [float((replica.weights - mean).square_().mean()) for replica in replicas]
    return math.sqrt(math.fsum(squares) / len(squares))


def eval_size(scenario: Scenario, held_out: Corpus, venue: Venue) -> EvalSize:
    """Return on how much held-out text each replica, and their average, is measured: as asked, else a share of the training."""
    if venue.num_eval_batches is not None:
        return EvalSize(venue.num_eval_batches)
    trained = TRAIN_PASSES * scenario.num_steps * scenario.num_peers * scenario.step_tokens
    share = int(EVAL_SHARE * trained / (scenario.num_peers + 1))
    return measured_size(scenario.manifest, held_out, venue.num_eval_tokens or min(NUM_TOKENS, max(LEAST_EVAL_TOKENS, share)))


def held_out_losses(
    replicas: Sequence[SimulatedReplica], held_out: Corpus, num_batches: int, most_tokens: int | None = None
) -> list[float]:
    """Return each replica's held-out loss, nats per token."""
    return [_loss(replica, held_out, num_batches, most_tokens) for replica in replicas]


def averaged_loss(replicas: Sequence[SimulatedReplica], held_out: Corpus, num_batches: int, most_tokens: int | None = None) -> float:
    """Return the held-out loss of the replicas' mean weights, nats per token."""
    first = replicas[0]
    own = first.weights.clone()
    first.weights.copy_(mean_weights(replicas))
    try:
        return _loss(first, held_out, num_batches, most_tokens)
    finally:
        first.weights.copy_(own)


def _loss(replica: SimulatedReplica, held_out: Corpus, num_batches: int, most_tokens: int | None) -> float:
    computing = Computing(micro_batch=part_rows(held_out.held_out_batches(1)[0].shape[1] - 1))
    return held_out_loss(replica.model, held_out, num_batches, computing=computing, most_tokens=most_tokens)
