"""Run a simulation: build the swarm, train it in virtual time, measure it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import torch

from peer.model.evaluation import NUM_BATCHES
from peer.model.model import choose_device
from peer.simulator import measure
from peer.simulator.history import Point, Result
from peer.simulator.lockstep import steps_together
from peer.simulator.methods import Method, method
from peer.simulator.population import Population, need_memory, populate
from peer.simulator.replicas import SimulatedReplica
from peer.simulator.scenario import Scenario
from peer.simulator.texts import load_texts
from peer.simulator.timeline import step_ends
from peer.text.tokenizer import load_tokenizer

NUM_POINTS: Final = 24  # of a curve


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a simulation has come."""

    num_tokens: int
    total_tokens: int
    train_loss: float  # nats per token, mean over the newest inner steps


Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a simulation runs, and how closely it is measured."""

    cache: Path  # where tokens of the operator's text may be kept
    data: Path | None = None
    device: str = "auto"
    num_eval_batches: int = NUM_BATCHES
    num_curve_batches: int = 0  # held-out batches at each point of the curve; 0: no held-out loss there


def simulate(scenario: Scenario, place: Place, watch: Watch) -> Result:
    """Train the scenario's swarm and measure it.

    Everything random follows from the run's seed; the figures follow from it, the text (the default one is this Python's own sources),
    torch and its number of threads. torch's generator is left as it was. Raises BadSettings or BadManifest for what cannot be (too much
    for the memory, a text that is too small), Diverged when the training breaks.
    """
    started_s = time.monotonic()
    chosen = method(scenario.manifest.outer.method)
    device, _ = choose_device(place.device)
    need_memory(scenario, device, chosen.size(scenario))
    tokenizer = load_tokenizer(scenario.manifest.tokenizer.name)
    texts = load_texts(scenario, tokenizer, place.data, place.cache)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(scenario.seed)
            population = populate(scenario, tokenizer, texts, device, chosen.schedules(scenario))
            recorder = Recorder(population, place, watch, _total_steps(chosen, population))
            train = chosen.train(scenario, len(population.layout.codecs))
            trained_s = time.monotonic()
            for now in train(population):
                recorder.after(now)
            train_seconds = time.monotonic() - trained_s - recorder.measured_s
            return recorder.result(started_s, train_seconds)
    finally:
        texts.close()


def _total_steps(chosen: Method, population: Population) -> int:
    """Return how many inner steps all peers will take together; who is away when is known beforehand."""
    scenario, presence = population.scenario, population.presence
    if not scenario.drop_out:
        return chosen.num_steps(scenario)
    if chosen.at_own_rate:
        return sum(len(peers) for _, peers in step_ends(scenario.rates, scenario.num_steps, presence))
    return sum(len(present) for _, present in steps_together(population))


class Recorder:
    """Follows a population in training and measures it now and then. `measured_s` is how long the measurements took so far."""

    def __init__(self, population: Population, place: Place, watch: Watch, total_steps: int) -> None:
        self._population = population
        self.measured_s = 0.0
        self._place = place
        self._watch = watch
        self._num_steps = 0  # inner steps, over all peers
        self._total_steps = total_steps
        self._losses: list[float] = []  # since the point before
        self._curve: list[Point] = []
        self._now = Fraction(0)

    def after(self, now: Fraction) -> None:
        """Take note of an instant."""
        self._now = now
        newest = [loss for replica in self._population.replicas for loss in _taken(replica)]
        self._num_steps += len(newest)
        self._losses += newest
        if newest:
            self._watch(Progress(self._tokens, self._total_steps * self._population.scenario.step_tokens, _mean(newest)))
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
        replicas, num_batches = self._population.replicas, self._place.num_curve_batches
        losses = measure.losses(replicas, self._population.texts.held_out, num_batches) if num_batches else []
        train_loss, self._losses = _mean(self._losses), []
        spread = measure.weight_std(replicas)
        self.measured_s += time.monotonic() - started_s
        return Point(float(self._now), self._tokens, self._sent_bytes, train_loss, spread, _mean(losses) if losses else None)

    def result(self, started_s: float, train_seconds: float) -> Result:
        """Measure the trained replicas."""
        population, scenario, traffic = self._population, self._population.scenario, self._population.traffic
        held_out, num_batches = population.texts.held_out, self._place.num_eval_batches
        losses = measure.losses(population.replicas, held_out, num_batches)
        averaged = measure.averaged_loss(population.replicas, held_out, num_batches) if len(losses) > 1 else losses[0]
        return Result(
            method=scenario.manifest.outer.method,
            codec=scenario.manifest.codec.name,
            peers=scenario.num_peers,
            steps=scenario.num_steps,
            tokens=self._tokens,
            eval_loss=tuple(losses * scenario.num_peers)[: scenario.num_peers],
            eval_loss_averaged=averaged,
            weight_std=measure.weight_std(population.replicas),
            meetings=traffic.completed,
            bits_per_param=population.layout.bits_per_value if traffic.sent_bytes else 0.0,
            wall_seconds=time.monotonic() - started_s,
            solo=traffic.solo,
            dropped=traffic.dropped,
            refused=traffic.refused,
            sent_bytes=self._sent_bytes,
            bits_per_step=8.0 * self._sent_bytes / (population.layout.numel * scenario.num_steps),
            virtual_steps=float(self._now),
            train_seconds=train_seconds,
            curve=tuple(self._curve),
        )


def _taken(replica: SimulatedReplica) -> list[float]:
    losses, replica.losses = replica.losses, []
    return losses


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
