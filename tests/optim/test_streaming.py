from __future__ import annotations

import pytest
import torch

from optim.diloco import DiLoCoSettings, mean_gradient, outer_step
from optim.merge import mix
from optim.streaming import StreamingSchedule


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
        assert {after - before for before, after in zip(steps, steps[1:], strict=False)} == {inner_steps}


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
