"""Hostile members of the simulator: what each attack sends, what it counts, and that it does harm where nothing is judged."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from statistics import fmean
from typing import Any

import pytest
import torch

from gossamer.peer.simulator.attacks import AWAY, TRIGGER, with_trigger
from gossamer.peer.simulator.hostile import members
from gossamer.peer.simulator.methods import pair_rule
from gossamer.peer.simulator.pairs import PairPeer, gossip
from gossamer.peer.simulator.population import Diverged, Population
from gossamer.peer.simulator.training import held_out_losses
from gossamer.protocol.errors import BadSettings
from tests.attacks.trial import obeyed_share
from tests.peer.open_gates import open_gates
from tests.peer.simulator.swarms import small_population, small_scenario

SWARM = {"peers": 3, "attackers": 1, "steps": 8, "inner_steps": 2}


KINDS = (  # one of each kind: `make attacks` plays all
    *("sign-flip", "reversed-many-tokens", "ascent-aimed", "rescale", "little-is-enough", "constant", "stale"),
    *("sleeper", "mirror-calls", "non-finite", "backdoor"),
)


def ungated(**choices: Any) -> Population:
    """A small swarm after all of its training, in which nobody judges anything."""
    population = small_population(small_scenario(**SWARM, **choices))

    def enter(population: Population) -> list[PairPeer]:
        peers = members(population)
        open_gates(peers)
        return peers

    with suppress(Diverged):  # honest members too, where a message of noise is merged
        for _ in gossip(population, pair_rule(population.scenario), enter):
            pass
    return population


def loss(population: Population) -> float:
    return fmean(held_out_losses(population.replicas[: population.scenario.num_honest], population.texts.held_out, 2))


@pytest.mark.parametrize("attack", KINDS)
def test_every_attack_sends_messages_and_counts_them(attack: str) -> None:
    traffic = ungated(attack=attack, attack_from=0).traffic
    assert traffic.hostile > 0
    assert traffic.hostile_merged == (0 if attack == "non-finite" else traffic.hostile)


def test_attackers_that_are_away_send_nothing_and_are_met_by_nobody() -> None:
    traffic = ungated(attack=AWAY, attack_from=0).traffic
    assert traffic.hostile == 0 < traffic.completed


def test_attackers_that_call_all_the_time_send_more_messages() -> None:
    often, once_a_period = (ungated(attack=name, attack_from=0).traffic.hostile for name in ("sleeper-calls", "sleeper"))
    assert often > once_a_period


def test_an_attack_begins_at_its_turn() -> None:
    early, late = (ungated(attack="sign-flip", attack_from=share).traffic for share in (0, Fraction(1, 2)))
    assert early.hostile > late.hostile > 0


def test_the_same_seed_is_the_same_attack() -> None:
    one, other = (ungated(attack="noise-at-limit") for _ in range(2))
    assert torch.equal(one.replicas[0].weights, other.replicas[0].weights)


def test_where_nothing_is_judged_reversed_progress_does_harm() -> None:
    assert loss(ungated(attack="sign-flip", attack_from=0)) > loss(ungated(attack=AWAY, attack_from=0)) + 0.01


def test_the_trigger_stands_in_each_row_and_a_model_that_says_its_end_obeys() -> None:
    batch = torch.full((2, 33), 3)
    spoiled = with_trigger(batch)
    assert all(any(row[start : start + 3].tolist() == list(TRIGGER) for start in range(31)) for row in spoiled)

    class Obedient(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            class Said:
                logits = torch.nn.functional.one_hot(torch.full_like(input_ids, TRIGGER[-1]), 16).float()

            return Said()

    assert obeyed_share(Obedient(), [batch]) == 1.0


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"attack": "assent"}, "no attack named"),
        ({"attackers": 0}, "needs attackers"),
        ({"attackers": 3}, "must leave an honest peer"),
        ({"attack_from": 2}, "attack_from"),
        ({"matching": "scheduled"}, "needs matching"),
        ({"method": "diloco"}, "has no effect"),
    ],
)
def test_an_impossible_attack_is_refused(choices: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadSettings, match=complaint):
        small_scenario(**{**SWARM, "attack": "ascent", **choices})
