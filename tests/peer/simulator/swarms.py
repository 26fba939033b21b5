"""Simulated swarms small enough to train in a test."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from gossamer.peer.simulator.choices import scenario
from gossamer.peer.simulator.methods import method
from gossamer.peer.simulator.population import Population, populate
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.texts import Texts
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.run.sections import TokenizerSection
from tests.peer.small import small_corpus, small_manifest


def small_scenario(**choices: Any) -> Scenario:
    """The small job for a swarm of 4, fp32, a meeting every 4 steps."""
    given = {"peers": 4, "steps": 12, "inner_steps": 4, "codec": "fp32", **choices}
    return scenario(small_manifest(), given)


def small_population(made: Scenario) -> Population:
    manifest = made.manifest
    corpora = tuple(small_corpus(manifest, b"peer-%d" % peer) for peer in range(made.num_peers))
    schedules = method(manifest.outer.method).schedules(made)
    return populate(made, load_tokenizer(TokenizerSection()), Texts(corpora, corpora), torch.device("cpu"), schedules)


def training(population: Population) -> Iterator[Fraction]:
    made = population.scenario
    return method(made.manifest.outer.method).train(made, len(population.layout.codecs))(population)


def trained(**choices: Any) -> Population:
    """A small swarm after all of its training."""
    population = small_population(small_scenario(**choices))
    for _ in training(population):
        pass
    return population


def weights(population: Population) -> list[Tensor]:
    return [replica.weights.clone() for replica in population.replicas]


def furthest(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
