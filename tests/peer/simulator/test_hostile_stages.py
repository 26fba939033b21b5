"""Staged runs in the simulator with a hostile holder: routes, checks, and what becomes of an attack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gossamer.peer.simulator import staged_steps
from gossamer.peer.simulator.hop_attacks import DRIVER_ATTACKS, HONEST, HOP_ATTACKS
from gossamer.peer.simulator.hostile_stages import HostileStages
from gossamer.peer.simulator.population import Population
from gossamer.protocol.errors import BadSettings
from tests.peer.simulator.swarms import small_population, training
from tests.peer.simulator.test_stages import parameters, same, staged, trained

torch.set_num_threads(1)
SWARM = {"peers": 4, "method": "noloco", "stages": 2, "micro_batch": 1, "attackers": 1, "inner_steps": 4}
PAIR = {**SWARM, "peers": 2}


def played(
    monkeypatch: pytest.MonkeyPatch, every: int = 1, is_over: Callable[[HostileStages], bool] = lambda _: False, **choices: object
) -> tuple[Population, HostileStages]:
    """Train a swarm in which one hop in `every` is doubled, until `is_over` at the latest; return its stages too."""
    monkeypatch.setattr("gossamer.peer.pipeline.doubling.EVERY", every)
    population = small_population(staged(**{**SWARM, "steps": 12, **choices}))
    made = HostileStages(population)
    monkeypatch.setattr(staged_steps, "stages_of", lambda _: made)
    for _ in training(population):
        if is_over(made):
            break
    return population, made


@pytest.mark.parametrize("count", [2, 3])
def test_without_checks_and_with_honest_answers_it_is_the_same_training_bit_for_bit(count: int) -> None:
    choices = SWARM | {"stages": count, "steps": 6}
    usual = trained(staged(**{**choices, "attackers": 0}))
    attacked = trained(staged(**choices, attack=HONEST, hop_checks="none"))
    assert same(parameters(usual), parameters(attacked))


def test_honest_holders_are_never_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = played(monkeypatch, attack=HONEST, hop_checks="all")
    assert len(found.likenesses) > 50 and not found.odd and not found.num_unlike


@pytest.mark.parametrize(
    ("attack", "count"),  # the last stage and one in the middle: each attack at one of them
    [("zero-gradients", 2), ("flipped-gradients", 3), ("replayed-gradients", 2), ("noise-long", 2), ("noise-huge", 3)],
)
def test_a_hostile_holder_is_found_and_rests(monkeypatch: pytest.MonkeyPatch, attack: str, count: int) -> None:

    def all_let_it_rest(stages: HostileStages) -> bool:
        """Every holder of the stage below does, one that is hostile elsewhere included."""
        return sum(3 in sender.rests_until for (_, below), sender in stages._senders.items() if below == 0) == 4

    _, found = played(
        monkeypatch, is_over=all_let_it_rest, attack=attack, hop_checks="all", stages=count, attack_stage=2, steps=10 * (count - 1)
    )
    assert set(found.odd) == {3} and len(found.odd) >= 3
    assert all_let_it_rest(found)


def test_of_two_holders_nobody_is_blamed_and_nothing_unlike_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = played(monkeypatch, peers=2, attack="flipped-gradients", hop_checks="all", steps=4)
    assert found.num_unlike and not found.odd


def test_every_attack_changes_what_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = parameters(trained(staged(**PAIR, steps=2, attack=HONEST, hop_checks="none")))
    for attack in HOP_ATTACKS:
        attacked = trained(staged(**PAIR, steps=2, attack=attack, hop_checks="none"))
        assert same(usual, parameters(attacked)) is (attack == HONEST), attack


@pytest.mark.parametrize("count", [2, 3])
def test_a_driver_that_is_opposed_sends_nothing_to_that_holder_any_more(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Which sources are opposed: tests/peer/trainer/test_opposition.py. Here the last driver's are, from the first micro-batch on."""
    monkeypatch.setattr("gossamer.peer.trainer.opposition.Opposition.note", lambda self, source, sample: "wrong" if source == "3" else "")
    _, found = played(monkeypatch, every=64, attack="random-labels", attack_stage=1, stages=count, steps=6)
    assert found.opposed == [3] * 4 * (count - 1), "each holder of each later stage finds it once"


def test_every_attack_of_a_driver_changes_what_others_learn() -> None:
    usual = parameters(trained(staged(**PAIR, steps=2, attack=HONEST, attack_stage=1, hop_checks="none")))
    for attack in DRIVER_ATTACKS:
        attacked = trained(staged(**PAIR, steps=2, attack=attack, attack_stage=1, hop_checks="none"))
        assert same(usual, parameters(attacked)) is (attack == HONEST), attack


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"attack": "ascent"}, "no attack on a staged run named 'ascent'"),
        ({"attack": HONEST, "hop_delay": 1}, "hop_delay 0"),
        ({"attack": "flipped-gradients", "attack_stage": 1}, "no attack of a driver named 'flipped-gradients'"),
        ({"attack": HONEST, "attack_stage": 3}, "attack_stage must be 1 to 2"),
        ({"attack": HONEST, "hop_checks": "some"}, "hop_checks is 'some'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(choices: dict[str, object], says: str) -> None:
    with pytest.raises(BadSettings, match=says):
        staged(**{**SWARM, **choices})
