from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gossamer.optim.codecs import CODECS, codec
from gossamer.optim.diloco import DiLoCoSettings, StreamingSchedule
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import Fragment, Piece
from gossamer.peer.simulator import groups
from gossamer.peer.simulator.groups import FEEDBACK_DECAY, Channel, Group, GroupRule, train_group
from gossamer.peer.simulator.population import Diverged, Population, SimulatedReplica
from tests import reference
from tests.peer.simulator.swarms import furthest, small_population, small_scenario, trained, training, weights

CODED, SMALL = 6000, 100
FRAGMENT = Fragment(0, "blocks", (Piece("matrix", CODED), Piece("norm", SMALL)), CODED)
CPU = torch.device("cpu")
# Mean square error over mean square, on normal values. A modulo codec's window spans the values: two thirds of a step, with dither.
NMSE = {"fp32": 0.0, "bf16": 1e-5, "int8": 1e-4, "nf4": 1e-2, "e3m0": 4e-2, "modulo8": 2e-3, "modulo6": 1e-2, "modulo4": 0.1}


def channel(name: str, decay: float | None = None) -> Channel:
    return Channel(FragmentCodec(FRAGMENT, codec(name)), decay, CPU)


def values(seed: int = 0) -> Tensor:
    return torch.randn(CODED + SMALL, generator=torch.Generator().manual_seed(seed)) * 1e-3


def nmse(decoded: Tensor, wanted: Tensor) -> float:
    return float((decoded - wanted).square().mean() / wanted.square().mean())


@pytest.mark.parametrize("name", NMSE)
def test_a_decoded_tensor_is_near_the_sent_one(name: str) -> None:
    sent = values()
    decoded = channel(name).send(sent, seed=5)
    assert nmse(decoded, sent) <= NMSE[name]
    assert torch.equal(decoded[CODED:], sent[CODED:])  # small tensors travel in fp32


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("name", CODECS)
def test_all_peers_decode_the_same(name: str, decay: float | None) -> None:
    """Bytes alone decide: one receiver is new, the other has sent something of its own; both count what the sender counts."""
    sender, twin, fresh, busy = (channel(name, decay) for _ in range(4))
    busy.send(values(seed=9), seed=4)
    for seed in (5, 6):
        counted, sent = sender.send(values(seed), seed), twin.encode(values(seed), seed)
        sketch, payload = map(copied, sent)
        assert len(sketch) + len(payload) == sender.num_bytes
        assert torch.equal(fresh.decode(sketch, payload, seed), counted)
        assert torch.equal(busy.decode(sketch, payload, seed), counted)
    assert not torch.equal(counted, torch.zeros_like(counted))


def copied(received: Tensor) -> Tensor:
    """The same bytes somewhere else."""
    return torch.tensor(list(received.numpy().tobytes()), dtype=torch.uint8)


@pytest.mark.parametrize("name", CODECS)
def test_nothing_arrives_as_nothing(name: str) -> None:
    assert not channel(name).send(torch.zeros(CODED + SMALL), seed=5).any()


@pytest.mark.parametrize("name", FEEDBACK_DECAY)
def test_error_feedback_recovers_what_few_bits_lose(name: str) -> None:
    """Error feedback at decay 1: all that was sent arrives in the end, up to what is still owed."""
    given, sent = channel(name, decay=1.0), values()
    arrived = sum((given.send(sent, seed) for seed in range(60)), torch.zeros_like(sent))
    assert nmse(arrived / 60, sent) < 0.2
    without = channel(name, decay=0.0)
    lost = sum((without.send(sent, seed) for seed in range(60)), torch.zeros_like(sent))
    assert nmse(lost / 60, sent) > 2 * nmse(arrived / 60, sent)


@pytest.mark.parametrize("name", ["q2", "sign1", "nf4"])
def test_nothing_is_lost_at_decay_1(name: str) -> None:
    """What was sent plus what is owed is the sum of what came in."""
    given = channel(name, decay=1.0)
    came, sent = (torch.zeros(CODED + SMALL, dtype=torch.float64) for _ in range(2))
    for seed in range(20):
        came, sent = came + values(seed), sent + given.send(values(seed), seed)
    assert given.residual is not None
    torch.testing.assert_close(sent + given.residual, came, atol=1e-7, rtol=0)


def test_decay_0_forgets() -> None:
    given = channel("sign1", decay=0.0)
    assert torch.equal(given.send(values(), seed=1), given.send(values(), seed=1))


def test_the_sketch_is_counted() -> None:
    codec4 = FragmentCodec(FRAGMENT, codec("modulo4"))
    assert channel("modulo4").num_bytes == codec4.sketch_bytes + codec4.payload_bytes > codec4.payload_bytes


def test_values_that_are_no_weights_mean_divergence() -> None:
    for name in ("fp32", "modulo4", "q2"):
        with pytest.raises(Diverged):
            channel(name).send(values() * float("inf"), seed=5)


# ---------------------------------------------------------------------- gradients


def test_all_take_the_same_steps_and_wait_for_the_slowest() -> None:
    population = small_population(small_scenario(method="ddp", steps=3, speeds=(Fraction(4), Fraction(1))))
    assert list(population.scenario.steps_together()) == [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])]
    assert population.scenario.slowest_step == Fraction(5, 2)
    assert list(training(population)) == [Fraction(5, 2), 5, Fraction(15, 2)]


def test_each_step_of_data_parallel_training_waits_for_its_exchange() -> None:
    population = small_population(small_scenario(method="ddp", steps=3, speeds=(Fraction(4), Fraction(1)), delay=Fraction(1, 2)))
    assert list(training(population)) == [3, 6, 9]


def test_an_absent_peer_does_not_step() -> None:
    population = small_population(small_scenario(method="ddp", steps=40, drop_out=0.4))
    present = [len(peers) for _, peers in population.scenario.steps_together()]
    assert min(present) < 4
    assert present[:4] == [4, 4, 4, 4]  # step 4 begins in the first period, which is everybody's


def test_absences_are_those_of_pairs() -> None:
    """Peers of equal speed take the same steps in a group and in pairs: an absence begins after the exchange that ends a period."""
    population = small_population(small_scenario(method="ddp", steps=80, drop_out=0.5))
    together = [(Fraction(step), peers) for step, peers in population.scenario.steps_together() if peers]
    in_pairs = [(now, sorted(peers)) for now, peers in population.scenario.steps_at_own_rates()]
    assert together == in_pairs
    assert len({tuple(peers) for _, peers in together}) > 4


def test_data_parallel_training_of_one_peer_is_plain_training() -> None:
    one, lone = trained(method="ddp", peers=1), trained(method="local", peers=1)
    assert torch.equal(one.replicas[0].weights, lone.replicas[0].weights)


def test_data_parallel_training_is_one_peer_with_all_batches() -> None:
    """Four peers' mean gradient against one backward pass over the four batches together."""
    population = small_population(small_scenario(method="ddp", steps=5))
    together = small_population(small_scenario(method="local", peers=1, steps=5)).replicas[0]
    for step, _ in enumerate(training(population)):
        batches = [batches.batch(step) for batches in population.texts.batches]
        together.add_gradient(Whole(torch.cat(batches)), 0)
        together.apply_gradient()
    assert len(population.replicas) == 1
    assert furthest(population.replicas[0].weights, together.weights) < 1e-5


class Whole:
    def __init__(self, batch: torch.Tensor) -> None:
        self._batch = batch

    def batch(self, step: int) -> torch.Tensor:
        return self._batch


@pytest.fixture(scope="module")
def exact() -> Population:
    return trained(method="ddp", steps=4)


@pytest.mark.parametrize("codec", ["int8", "q2", "modulo4"])
def test_gradients_can_be_coded(codec: str, exact: Population) -> None:
    coded = trained(method="ddp", codec=codec, steps=4)
    assert not torch.equal(coded.replicas[0].weights, exact.replicas[0].weights)
    assert coded.traffic.sent_bytes < 0.6 * exact.traffic.sent_bytes
    assert exact.traffic.sent_bytes == 4 * 4 * 4 * exact.layout.numel
    assert coded.traffic.completed == 4


# ---------------------------------------------------------------------- pseudo-gradients


NUM_CHECKED = 40  # values compared with the oracle, one by one


class Watching:
    """A mean that records its arguments."""

    def __init__(self) -> None:
        self.decoded: list[list[Tensor]] = []
        self.weights: list[Sequence[float]] = []

    def __call__(self, decoded: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        self.decoded.append([tensor.clone() for tensor in decoded])
        self.weights.append(list(weights))
        return sum(decoded, torch.zeros_like(decoded[0])) / len(decoded)


WHOLE = GroupRule(StreamingSchedule(1, 4, 0), DiLoCoSettings())  # everything is exchanged every 4 steps


@pytest.fixture
def mean(monkeypatch: pytest.MonkeyPatch) -> Watching:
    """The groups' mean, recorded."""
    watching = Watching()
    monkeypatch.setattr(groups, "mean_gradient", watching)
    return watching


def test_diloco_is_the_oracles(mean: Watching) -> None:
    population = small_population(small_scenario(method="diloco"))
    group = Group(population, WHOLE)
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


def test_one_peer_with_a_plain_outer_step_trains_as_without_it() -> None:
    plain = trained(method="diloco", peers=1, alpha=0.0, beta=1.0)
    assert furthest(plain.replicas[0].weights, trained(method="local", peers=1).replicas[0].weights) < 1e-6


def test_replicas_are_equal_after_an_exchange_and_differ_before() -> None:
    after, before = trained(method="diloco", steps=8), trained(method="diloco", steps=7)
    assert all(torch.equal(replica.weights, after.replicas[0].weights) for replica in after.replicas)
    assert not torch.equal(before.replicas[0].weights, before.replicas[1].weights)


def test_streaming_that_keeps_only_local_weights_never_interacts() -> None:
    streamed = trained(method="streaming", keep_local=1.0, peers=2)
    assert streamed.traffic.completed > 0
    assert all(torch.equal(*both) for both in zip(weights(streamed), weights(trained(method="local", peers=2)), strict=True))


def test_streaming_sends_fragments_in_turn_and_takes_them_later() -> None:
    population = small_population(small_scenario(method="streaming", inner_steps=6))
    group = Group(population, GroupRule(StreamingSchedule(3, 6, 2), DiLoCoSettings(), keep=0.5))
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


def watch_fast(monkeypatch: pytest.MonkeyPatch, replica: SimulatedReplica) -> list[Tensor]:
    """Keep what the weights are after each inner step, before anything is taken from the group."""
    kept, step = [], replica.inner_step

    def watched_step() -> None:
        step()
        kept.append(replica.weights.clone())

    monkeypatch.setattr(replica, "inner_step", watched_step)
    return kept


def test_a_merge_takes_a_share_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    population = small_population(small_scenario(method="streaming", inner_steps=4, delay=0))
    group = Group(population, GroupRule(StreamingSchedule(1, 4, 0), DiLoCoSettings(), keep=0.25))
    fast = watch_fast(monkeypatch, population.replicas[0])
    for step in range(1, 5):
        group.step(step, [0, 1])
    slow = torch.cat([shared.slow for shared in group.shared])
    assert furthest(population.replicas[0].weights, 0.25 * fast[-1] + 0.75 * slow) < 1e-6
    assert not torch.equal(population.replicas[0].weights, fast[-1])


def test_nothing_arrives_if_no_peer_was_present_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    population = small_population(small_scenario(method="streaming", inner_steps=4))
    group = Group(population, GroupRule(StreamingSchedule(1, 4, 1), DiLoCoSettings(), keep=0.25))
    fast = watch_fast(monkeypatch, population.replicas[0])
    for step, present in enumerate(([0, 1], [0, 1], [0, 1], [], [0]), 1):
        group.step(step, present)
    assert torch.equal(population.replicas[0].weights, fast[-1])


def test_a_returning_peer_starts_from_the_groups_weights(mean: Watching) -> None:
    population = small_population(small_scenario(method="diloco", steps=30))
    group = Group(population, WHOLE)
    for step in range(1, 5):
        group.step(step, [0, 1, 2])
    assert len(mean.decoded[0]) == 3
    assert population.replicas[3].own_steps == 0
    slow = torch.cat([shared.slow for shared in group.shared])
    population.replicas[3].inner_step = lambda: None  # type: ignore[method-assign] # to see what it starts from
    group.step(5, [0, 1, 2, 3])
    assert torch.equal(population.replicas[3].weights, slow)
    assert population.replicas[3].global_step == 4


def test_a_peer_that_leaves_after_an_exchange_loses_nothing(mean: Watching) -> None:
    """Absences last for periods, and exchanges end them: all that anybody trained on is in some exchange."""
    population = small_population(small_scenario(method="diloco", steps=40, drop_out=0.4))
    assert list(train_group(population, WHOLE))[-1] == 40
    own_steps = [replica.own_steps for replica in population.replicas]
    assert sum(own_steps) < 4 * 40  # somebody was away
    assert sum(map(sum, mean.weights)) == 32.0 * sum(own_steps) * len(population.layout.codecs)


def test_pseudo_gradients_count_by_their_tokens(mean: Watching) -> None:
    population = small_population(small_scenario(method="diloco"))
    group = Group(population, WHOLE)
    group.step(1, [0, 1])
    group.step(2, [0, 1])
    group.step(3, [0, 1, 2])
    group.step(4, [0, 1, 2])
    assert mean.weights[0] == [4 * 32.0, 4 * 32.0, 2 * 32.0]
    for step in range(5, 9):
        group.step(step, [0, 1, 2, 3])
    assert mean.weights[-1] == [4 * 32.0] * 4


def test_a_step_without_anybody_changes_nothing() -> None:
    population = small_population(small_scenario(method="diloco"))
    group = Group(population, WHOLE)
    before = weights(population)
    for step in range(1, 9):
        group.step(step, [])
    assert all(torch.equal(*both) for both in zip(weights(population), before, strict=True))
    assert population.traffic.completed == 0


@pytest.mark.parametrize("codec", ["nf4", "e3m0", "q2", "modulo4"])
def test_all_peers_end_with_the_same_bits_with_every_codec(codec: str) -> None:
    population = trained(method="diloco", steps=8, codec=codec)
    assert all(torch.equal(replica.weights, population.replicas[0].weights) for replica in population.replicas)
