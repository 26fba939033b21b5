from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from gossamer.optim.diloco import (
    DiLoCoSettings,
    StreamingSchedule,
    learning_rate_for,
    mean_gradient,
    mix,
    outer_step,
)
from gossamer.optim.noloco import NoLoCo
from tests import reference
from tests.reference import Replica

NESTEROV = DiLoCoSettings()
HEAVY_BALL = DiLoCoSettings(momentum=0.3, nesterov=False)
PLAIN = DiLoCoSettings(learning_rate=1.0, momentum=0.0, nesterov=False)


def rounds(settings: DiLoCoSettings, count: int, peers: int, values: int = 40) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Train a group whose fast weights are noise about the slow ones; returns slow weights, momentum and every round's fast weights."""
    generator = torch.Generator().manual_seed(3)
    slow, momentum = torch.randn(values, generator=generator), torch.zeros(values)
    seen = [slow]
    for _ in range(count):
        fast = slow + 0.1 * torch.randn(peers, values, generator=generator)
        seen.append(fast - slow)
        slow, momentum = outer_step(slow, momentum, mean_gradient(list(slow - fast), [1.0] * peers), settings)
    return slow, momentum, seen


def test_nesterov_matches_the_oracle() -> None:
    slow, momentum, seen = rounds(NESTEROV, 10, peers=4)
    for column in range(40):
        phi, v = float(seen[0][column]), 0.0
        for moves in seen[1:]:
            phi, v = reference.diloco_nesterov(phi, v, [phi + float(move) for move in moves[:, column]], 0.7, 0.9)
        assert float(slow[column]) == pytest.approx(phi, abs=1e-5)
        assert float(momentum[column]) == pytest.approx(v, abs=1e-5)


def test_heavy_ball_matches_the_oracle() -> None:
    slow, momentum, seen = rounds(HEAVY_BALL, 10, peers=3)
    for column in range(40):
        r = Replica(float(seen[0][column]), 0.0, 0.0)
        for moves in seen[1:]:
            group = [Replica(r.phi, r.delta, r.phi + float(move)) for move in moves[:, column]]
            r = reference.diloco_heavy_ball(group, 0.7, 0.3)[0]
        assert float(slow[column]) == pytest.approx(r.phi, abs=1e-5)
        assert float(momentum[column]) == pytest.approx(-r.delta / 0.7, abs=1e-5)


@pytest.mark.parametrize(("settings", "nesterov", "momentum"), [(NESTEROV, True, 0.9), (HEAVY_BALL, False, 0.3)])
def test_it_is_torchs_sgd(settings: DiLoCoSettings, nesterov: bool, momentum: float) -> None:
    slow, buffer = torch.randn(100), torch.zeros(100)
    parameter = torch.nn.Parameter(slow.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=nesterov)
    for _ in range(8):
        gradient = torch.randn(100)
        parameter.grad = gradient.clone()
        sgd.step()
        slow, buffer = outer_step(slow, buffer, gradient, settings)
        torch.testing.assert_close(slow, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_two_noloco_peers_are_this_heavy_ball() -> None:
    """Heavy-ball DiLoCo of two is NoLoCo, between the two implementations."""
    generator = torch.Generator().manual_seed(0)
    pair = NoLoCo(alpha=0.5, beta=0.7, gamma=0.4)
    group = DiLoCoSettings(learning_rate=0.7, momentum=0.5, nesterov=False)
    start = torch.randn(200, generator=generator)
    slows, momenta = [start, start], [torch.zeros(200)] * 2
    slow, momentum = start, torch.zeros(200)
    for _ in range(15):
        moves = 0.1 * torch.randn(2, 200, generator=generator)
        fasts = [slows[k] + moves[k] for k in (0, 1)]
        u = [pair.message(slows[k], fasts[k], 0.5) for k in (0, 1)]
        steps = [pair.pair_step(slows[k], momenta[k], fasts[k], 0.5, u[1 - k] - u[k]) for k in (0, 1)]
        slows, momenta = [step[0] for step in steps], [step[1] for step in steps]
        slow, momentum = outer_step(slow, momentum, mean_gradient(list(-moves), [1, 1]), group)
        torch.testing.assert_close(slows[0], slow, rtol=0, atol=2e-6)
        torch.testing.assert_close(slows[1], slow, rtol=0, atol=2e-6)


def test_one_peer_with_a_plain_step_is_the_inner_optimizer_alone() -> None:
    slow, fast = torch.randn(2, 100)
    moved, _ = outer_step(slow, torch.zeros(100), slow - fast, PLAIN)
    torch.testing.assert_close(moved, fast, rtol=0, atol=5e-7)


def test_the_mean_is_weighted_and_in_order() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])
    assert mean_gradient([one, two], [300, 100]).tolist() == [1.5, 1.0]
    assert mean_gradient([one], [7]).tolist() == [1.0, 2.0]
    for decoded, weights in [([], []), ([one], [1, 2]), ([one], [0]), ([one, two], [2, -1])]:
        with pytest.raises(ValueError, match="weight"):
            mean_gradient(decoded, weights)


def test_the_clip_really_clips() -> None:
    gradient = torch.tensor([1.0, -1.0, 10.0, 0.0])
    rms = float(gradient.square().mean().sqrt())
    _, momentum = outer_step(torch.zeros(4), torch.full((4,), 50.0), gradient, DiLoCoSettings(clip=2.0))
    assert momentum.tolist() == pytest.approx([2 * rms] * 4)
    _, free = outer_step(torch.zeros(4), torch.full((4,), 50.0), gradient, NESTEROV)
    assert float(free.max()) > 50


def test_a_late_gradient_counts_less() -> None:
    gradient = torch.ones(3)
    slow, _ = outer_step(torch.zeros(3), torch.zeros(3), gradient, DiLoCoSettings(1.0, 0.0, False, staleness_penalty=4.0))
    assert slow.tolist() == [-0.25] * 3
    assert gradient.tolist() == [1.0] * 3


def test_learning_rates_of_the_scaling_study() -> None:
    assert [learning_rate_for(size) for size in (1, 2, 4, 7, 8, 100)] == [0.4, 0.6, 0.6, 0.6, 0.8, 0.8]
    with pytest.raises(ValueError, match="at least one"):
        learning_rate_for(0)


@pytest.mark.parametrize(
    "change", [{"learning_rate": 0.0}, {"momentum": 1.0}, {"clip": 0.0}, {"staleness_penalty": 0.5}, {"learning_rate": math.nan}]
)
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        DiLoCoSettings(**change)  # type: ignore[arg-type]


def test_mix_keeps_a_share_of_the_local_weights() -> None:
    slow, fast = torch.randn(2, 100)
    assert torch.equal(mix(slow, fast, 0.0), slow)
    assert torch.equal(mix(slow, fast, 1.0), fast)
    torch.testing.assert_close(mix(slow, fast, 0.25), 0.75 * slow + 0.25 * fast)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        mix(slow, fast, 1.5)


def test_the_papers_worked_example() -> None:
    """H 100, two fragments: the first at 100, 200, ..., the second at 150, 250, ..., and not at 50."""
    schedule = StreamingSchedule(2, 100, overlap_steps=5)
    sent = [(step, fragment) for step in range(1, 401) for fragment in schedule.sending(step)]
    assert sent == [(100, 0), (150, 1), (200, 0), (250, 1), (300, 0), (350, 1), (400, 0)]
    taken = [(step - 5, fragment) for step in range(1, 406) for fragment in schedule.arriving(step)]
    assert taken == sent


@pytest.mark.parametrize(("fragments", "inner_steps"), [(9, 100), (17, 100), (3, 10), (7, 5)])
def test_every_fragment_is_sent_every_h_steps_after_at_least_h(fragments: int, inner_steps: int) -> None:
    schedule = StreamingSchedule(fragments, inner_steps)
    for fragment in range(fragments):
        steps = [step for step in range(1, 10 * inner_steps) if fragment in schedule.sending(step)]
        assert inner_steps <= steps[0] < 2 * inner_steps
        assert {after - before for before, after in pairwise(steps)} == {inner_steps}


def train(schedule: StreamingSchedule, keep: float, steps: int, peers: int = 3, values: int = 30) -> torch.Tensor:
    """A toy group: inner steps pull each peer to its own target, fragments are equal cuts of one vector; returns the fast weights."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(peers, values, generator=generator)
    fast, slow, momentum = torch.zeros(peers, values), torch.zeros(values), torch.zeros(values)
    cuts = list(torch.arange(values).chunk(schedule.num_fragments))
    in_flight: dict[int, torch.Tensor] = {}
    for step in range(1, steps + 1):
        fast = fast + 0.05 * (targets - fast)
        for fragment in schedule.arriving(step) if schedule.overlap_steps else []:
            cut = cuts[fragment]
            slow[cut], momentum[cut] = outer_step(slow[cut], momentum[cut], in_flight.pop(fragment), DiLoCoSettings())
            fast[:, cut] = mix(slow[cut].expand(peers, -1), fast[:, cut], keep)
        for fragment in schedule.sending(step):
            in_flight[fragment] = mean_gradient(list(slow[cuts[fragment]] - fast[:, cuts[fragment]]), [1.0] * peers)
            if not schedule.overlap_steps:
                cut = cuts[fragment]
                slow[cut], momentum[cut] = outer_step(slow[cut], momentum[cut], in_flight.pop(fragment), DiLoCoSettings())
                fast[:, cut] = mix(slow[cut].expand(peers, -1), fast[:, cut], keep)
    return fast


def diloco(inner_steps: int, steps: int, peers: int = 3, values: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(peers, values, generator=generator)
    fast, slow, momentum = torch.zeros(peers, values), torch.zeros(values), torch.zeros(values)
    for step in range(1, steps + 1):
        fast = fast + 0.05 * (targets - fast)
        if step % inner_steps == 0:
            slow, momentum = outer_step(slow, momentum, mean_gradient(list(slow - fast), [1.0] * peers), DiLoCoSettings())
            fast = slow.expand(peers, -1).clone()
    return fast


def test_one_fragment_without_overlap_is_diloco_bit_for_bit() -> None:
    assert torch.equal(train(StreamingSchedule(1, 10, overlap_steps=0), 0.0, 57), diloco(10, 57))


def test_keeping_all_of_the_local_weights_never_lets_peers_interact() -> None:
    alone = train(StreamingSchedule(1, 1000, overlap_steps=0), 1.0, 57)
    assert torch.equal(train(StreamingSchedule(3, 10, overlap_steps=2), 1.0, 57), alone)


def test_fragments_with_overlap_still_agree_on_the_slow_weights() -> None:
    fast = train(StreamingSchedule(5, 10, overlap_steps=1), 0.0, 200)
    apart = float((fast - fast.mean(0)).abs().max())
    assert apart < 0.5 * float((diloco(1000, 200) - diloco(1000, 200).mean(0)).abs().max())


@pytest.mark.parametrize(("fragments", "inner_steps", "overlap"), [(0, 10, 1), (3, 0, 0), (3, 10, 10), (3, 10, -1)])
def test_impossible_schedules_are_refused(fragments: int, inner_steps: int, overlap: int) -> None:
    with pytest.raises(ValueError, match=r"schedule|overlap"):
        StreamingSchedule(fragments, inner_steps, overlap)
