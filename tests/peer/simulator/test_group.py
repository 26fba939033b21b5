from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from optim.diloco import DiLoCoSettings, StreamingSchedule, contributor_mean
from peer.simulator.group import Group, GroupRule, every_coordinate, train_group
from peer.simulator.population import Population
from tests import reference
from tests.peer.simulator.swarms import furthest, small_population, small_scenario, trained, weights

NUM_CHECKED = 40  # values compared with the oracle, one by one


class Watching:
    """A mean that remembers what it was given."""

    def __init__(self) -> None:
        self.decoded: list[list[Tensor]] = []
        self.weights: list[Sequence[float]] = []

    def __call__(self, decoded: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        self.decoded.append([tensor.clone() for tensor in decoded])
        self.weights.append(list(weights))
        return sum(decoded, torch.zeros_like(decoded[0])) / len(decoded)


def watched(population: Population, mean: Watching) -> GroupRule:
    """Everything is exchanged every 4 steps and remembered."""
    everything = tuple(range(len(population.layout.codecs)))
    return GroupRule(StreamingSchedule(1, 4, 0), (everything,), DiLoCoSettings(), mean=mean)


def together(population: Population, mean: Watching) -> Group:
    """A group that exchanges everything every 4 steps and remembers it."""
    return Group(population, watched(population, mean))


def test_diloco_is_the_oracles() -> None:
    population, mean = small_population(small_scenario(method="diloco")), Watching()
    group = together(population, mean)
    phi = population.replicas[0].weights[:NUM_CHECKED].tolist()
    v = [0.0] * NUM_CHECKED
    for step in range(1, 13):
        group.step(step, [0, 1, 2, 3])
        if step % 4 == 0:
            sent = [tensor[:NUM_CHECKED].tolist() for tensor in mean.decoded[-len(population.layout.codecs)]]
            thetas = [[phi[n] - peer[n] for peer in sent] for n in range(NUM_CHECKED)]
            stepped = [reference.diloco_nesterov(phi[n], v[n], thetas[n], 0.7, 0.9) for n in range(NUM_CHECKED)]
            phi, v = [one for one, _ in stepped], [other for _, other in stepped]
            for replica in population.replicas:
                assert furthest(replica.weights[:NUM_CHECKED], torch.tensor(phi, dtype=torch.float64)) < 1e-5


def test_one_peer_with_a_plain_outer_step_just_trains() -> None:
    plain = trained(method="diloco", peers=1, alpha=0.0, beta=1.0)
    assert furthest(plain.replicas[0].weights, trained(method="local", peers=1).replicas[0].weights) < 1e-6


def test_replicas_are_equal_after_an_exchange_and_differ_before() -> None:
    after, before = trained(method="diloco", steps=8), trained(method="diloco", steps=7)
    assert all(torch.equal(replica.weights, after.replicas[0].weights) for replica in after.replicas)
    assert not torch.equal(before.replicas[0].weights, before.replicas[1].weights)


def test_streaming_that_keeps_only_local_weights_never_interacts() -> None:
    streamed = trained(method="streaming", keep_local=1.0)
    assert streamed.traffic.completed > 0
    assert all(torch.equal(*both) for both in zip(weights(streamed), weights(trained(method="local")), strict=True))


def test_streaming_sends_fragments_in_turn_and_takes_them_later() -> None:
    population = small_population(small_scenario(method="streaming", inner_steps=6))
    parts = ((0,), (1,), (2,))
    group = Group(population, GroupRule(StreamingSchedule(3, 6, 2), parts, DiLoCoSettings(), keep=0.5))
    sent, taken = {}, {}
    for step in range(1, 19):
        before = [shared.slow for shared in group.shared], population.traffic.completed
        group.step(step, [0, 1, 2, 3])
        if population.traffic.completed > before[1]:
            sent[step] = population.traffic.completed - before[1]
        changed = [n for n, shared in enumerate(group.shared) if shared.slow is not before[0][n]]
        if changed:
            taken[step] = changed
    assert sent == {6: 1, 8: 1, 10: 1, 12: 1, 14: 1, 16: 1, 18: 1}
    assert taken == {8: [0], 10: [1], 12: [2], 14: [0], 16: [1], 18: [2]}


def test_a_merge_takes_a_share_of_both() -> None:
    population = small_population(small_scenario(method="streaming", inner_steps=4, delay=0))
    kept = Group(population, GroupRule(StreamingSchedule(1, 4, 0), ((0, 1, 2),), DiLoCoSettings(), keep=0.25))
    for step in range(1, 4):
        kept.step(step, [0, 1])
    population.replicas[0].inner_step()
    fast = population.replicas[0].weights.clone()
    kept._take((0, 1, 2), [0])  # nothing is on its way: nothing moves
    assert torch.equal(population.replicas[0].weights, fast)
    kept._send(4, (0, 1, 2), [0, 1])
    kept._take((0, 1, 2), [0])
    slow = torch.cat([shared.slow for shared in kept.shared])
    assert furthest(population.replicas[0].weights, 0.25 * fast + 0.75 * slow) < 1e-6


def test_who_comes_back_starts_from_the_groups_weights() -> None:
    population, mean = small_population(small_scenario(method="diloco", steps=30)), Watching()
    group = together(population, mean)
    for step in range(1, 5):
        group.step(step, [0, 1, 2])
    assert len(mean.decoded[0]) == 3
    assert population.replicas[3].own_steps == 0
    slow = torch.cat([shared.slow for shared in group.shared])
    population.replicas[3].inner_step = lambda: None  # type: ignore[method-assign] # to see what it starts from
    group.step(5, [0, 1, 2, 3])
    assert torch.equal(population.replicas[3].weights, slow)
    assert population.replicas[3].clock_steps == 4


def test_who_goes_away_after_an_exchange_loses_nothing() -> None:
    """Absences last for periods, and exchanges end them: all that anybody trained on is in some exchange."""
    population, mean = small_population(small_scenario(method="diloco", steps=40, drop_out=0.4)), Watching()
    assert list(train_group(population, watched(population, mean)))[-1] == 40
    own_steps = [replica.own_steps for replica in population.replicas]
    assert sum(own_steps) < 4 * 40  # somebody was away
    assert sum(map(sum, mean.weights)) == 32.0 * sum(own_steps) * len(population.layout.codecs)


def test_pseudo_gradients_count_by_their_tokens() -> None:
    population, mean = small_population(small_scenario(method="diloco")), Watching()
    group = together(population, mean)
    group.step(1, [0, 1])
    group.step(2, [0, 1])
    group.step(3, [0, 1, 2])
    group.step(4, [0, 1, 2])
    assert mean.weights[0] == [4 * 32.0, 4 * 32.0, 2 * 32.0]
    for step in range(5, 9):
        group.step(step, [0, 1, 2, 3])
    assert mean.weights[-1] == [4 * 32.0] * 4


def test_a_step_without_anybody_changes_nothing() -> None:
    population, mean = small_population(small_scenario(method="diloco")), Watching()
    group = together(population, mean)
    before = weights(population)
    for step in range(1, 9):
        group.step(step, [])
    assert all(torch.equal(*both) for both in zip(weights(population), before, strict=True))
    assert population.traffic.completed == 0


def test_sparse_values_are_averaged_over_those_who_sent_them() -> None:
    decoded = [torch.tensor([1.0, 0.0, 2.0]), torch.tensor([3.0, 0.0, 0.0])]
    assert torch.equal(every_coordinate(decoded, [1.0, 9.0]), contributor_mean(decoded))


@pytest.mark.parametrize("codec", ["nf4", "e3m0", "q2", "modulo4"])
def test_all_peers_end_with_the_same_bits_whatever_the_codec(codec: str) -> None:
    population = trained(method="diloco", steps=8, codec=codec)
    assert all(torch.equal(replica.weights, population.replicas[0].weights) for replica in population.replicas)
