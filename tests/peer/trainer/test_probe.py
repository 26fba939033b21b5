"""The probe: what it measures, that it leaves the model as it is, and which gains its gate accepts."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.optim.fragments import Fragment, add
from gossamer.peer.model.computing import next_token_loss, token_losses
from gossamer.peer.trainer.probe import (
    FIRST_TOKENS,
    LEAST_SHARE,
    MORE_TOKENS,
    MOST_SPREAD,
    REMEMBERED,
    SIGMAS,
    SLACK,
    Closer,
    Gain,
    Judgement,
    ProbeCost,
    ProbeGate,
    Shifts,
    TokenProbe,
)
from gossamer.peer.trainer.text_training import probe_pool
from tests.peer.small import AskedReplica, small_manifest, small_replica

SCALE, NOISE, NUM_TOKENS = 2.0, 0.01, 128
TYPICAL = 0.01
WORST = (SLACK + SIGMAS * MOST_SPREAD) * SCALE  # that honest messages cost at most, whatever is known of them


def gain(value: float) -> Gain:
    return Gain(value, NOISE, SCALE, NUM_TOKENS)


def judged(gate: ProbeGate, value: float, part: float | None = None, own: float = 0.0, *, is_behind: bool = False) -> Judgement:
    """Judge a gain; half of the merge gains `part`, by default as much."""
    return gate.judge(gain(value), Closer(0.5, gain(value if part is None else part), own), is_behind=is_behind)


def experienced() -> ProbeGate:
    gate = ProbeGate()
    for number in range(REMEMBERED):
        gate.accept(judged(gate, TYPICAL + 0.01 * math.sin(number)))
    return gate


# ---------------------------------------------------------------------- what is measured


class Watched(ProbeGate):
    """A gate that keeps what it judges, and finds gains low if told so: the first ones, or all."""

    def __init__(self, *, suspects: bool, num_low: int = 1000) -> None:
        super().__init__()
        self.num_low = num_low if suspects else 0
        self.seen: list[tuple[Gain, Closer | None]] = []

    def is_low(self, gain: Gain, own: float = 0.0) -> bool:
        self.num_low -= 1
        return self.num_low >= 0

    def judge(self, gain: Gain, closer: Closer | None, *, is_behind: bool) -> Judgement:
        self.seen.append((gain, closer))
        return super().judge(gain, closer, is_behind=is_behind)


@pytest.fixture
def replica(tmp_path: Path) -> AskedReplica:
    return small_replica(tmp_path, small_manifest())


def judge(probe: TokenProbe, gate: ProbeGate, replica: AskedReplica, size: float) -> Judgement:
    """Judge a merge that shifts a fragment at random; nothing else would."""
    fragment, shift = shift_of(replica, size)
    return probe.judge(gate, fragment, Shifts(shift, 0.0 * shift, 0.0 * shift), 0.5, is_behind=False)


def probe_of(replica: AskedReplica, pool: Tensor) -> TokenProbe:
    return TokenProbe(replica.program.model, torch.float32, pool, random.Random(1))


def pool_of(replica: AskedReplica) -> Tensor:
    return probe_pool(replica.program.corpus).to(replica.program.device)


def shift_of(replica: AskedReplica, size: float) -> tuple[Fragment, Tensor]:
    state = replica.fragments[1]
    return state.codec.fragment, state.on_device(size * torch.randn(state.slow.shape, generator=torch.Generator().manual_seed(3)))


def mean_loss(replica: AskedReplica, sequences: Tensor) -> float:
    with torch.no_grad():
        return float(token_losses(replica.program.model, sequences).double().mean())


def test_a_gain_is_what_the_shift_takes_from_the_loss_of_the_same_text(replica: AskedReplica) -> None:
    pool = pool_of(replica)[: MORE_TOKENS // 64]
    fragment, shift = shift_of(replica, 0.05)
    own, solo = 0.3 * shift.roll(7), 0.2 * shift.roll(70)
    gate = Watched(suspects=True)
    probe_of(replica, pool[:1].expand(200, -1)).judge(gate, fragment, Shifts(shift, solo, own), 0.25, is_behind=False)
    ((whole, closer),) = gate.seen
    assert closer is not None and closer.part == 0.125, "of what is still low the half is measured"
    add(fragment, solo, replica.parameters)
    before = mean_loss(replica, pool[:1])
    add(fragment, -solo, replica.parameters)
    for moved, found in ((shift, whole.value), (0.125 * shift + 0.875 * solo, closer.gain.value), (-own, -closer.own)):
        add(fragment, moved, replica.parameters)
        assert found == pytest.approx(before - mean_loss(replica, pool[:1]), abs=2e-5)
        add(fragment, -moved, replica.parameters)


def test_more_is_measured_only_where_the_first_gain_is_low(replica: AskedReplica) -> None:
    pool = pool_of(replica)
    for suspects, num_tokens in ((False, FIRST_TOKENS), (True, FIRST_TOKENS + MORE_TOKENS)):
        gate = Watched(suspects=suspects)
        judge(probe_of(replica, pool), gate, replica, 0.01)
        ((whole, closer),) = gate.seen
        assert (closer is not None) == suspects
        assert whole.num_tokens == pytest.approx(num_tokens, rel=0.25), "in whole sequences"


def test_the_smaller_of_two_parts_is_measured_only_where_the_larger_is_low(replica: AskedReplica) -> None:
    for num_low, part in ((2, 0.5), (3, 0.25)):
        gate = Watched(suspects=True, num_low=num_low)  # the whole on little text, on more, and so on
        judge(probe_of(replica, pool_of(replica)), gate, replica, 0.01)
        ((_, closer),) = gate.seen
        assert closer is not None and closer.part == part


def test_each_meeting_has_its_own_draw(replica: AskedReplica) -> None:
    probe, gate = probe_of(replica, pool_of(replica)), Watched(suspects=False)
    for _ in range(5):
        judge(probe, gate, replica, 0.05)
    assert len({whole.value for whole, _ in gate.seen}) == 5


def test_a_probe_changes_neither_the_model_nor_a_gradient_that_is_being_computed(replica: AskedReplica) -> None:
    pool = pool_of(replica)
    probe, batch = probe_of(replica, pool), pool[:4]
    next_token_loss(replica.program.model, batch).backward()  # type: ignore[no-untyped-call]
    wanted = [parameter.grad for parameter in replica.program.model.parameters()]
    before = [tensor.clone() for tensor in replica.parameters.values()]
    replica.program.model.zero_grad()
    loss = next_token_loss(replica.program.model, batch)
    judge(probe, Watched(suspects=True), replica, 0.05)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(one, other) for one, other in zip(before, replica.parameters.values(), strict=True))
    for parameter, gradient in zip(replica.program.model.parameters(), wanted, strict=True):
        assert parameter.grad is not None and gradient is not None and torch.equal(parameter.grad, gradient)


def test_a_shift_that_breaks_the_model_is_refused(replica: AskedReplica) -> None:
    judgement = judge(probe_of(replica, pool_of(replica)), ProbeGate(), replica, 1e30)
    assert "would not be finite" in judgement.reason and judgement.part == 0.0


# ---------------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("gate", [ProbeGate(), experienced()], ids=["new", "experienced"])
def test_usual_gains_are_merged_whole_and_clear_harm_is_refused(gate: ProbeGate) -> None:
    assert judged(gate, TYPICAL).part == 1.0 and judged(gate, 0.5).part == 1.0
    harmful = judged(gate, -1.01 * WORST)
    assert harmful.part == 0.0 and harmful.deviation < -SIGMAS
    assert "it would raise the loss on our data by" in harmful.reason


def test_an_experienced_gate_knows_less_harm() -> None:
    assert not judged(ProbeGate(), -0.9 * WORST).reason
    assert judged(experienced(), -0.9 * WORST).reason


def test_of_a_low_gain_only_the_part_that_is_of_use_is_merged() -> None:
    gate = experienced()
    low = -0.03
    assert [judged(gate, low, part).part for part in (TYPICAL, low)] == [0.5, 0.0]
    assert not judged(gate, low).reason


def test_a_message_of_which_a_part_does_no_harm_is_not_harmful() -> None:
    """Right after a merge, the whole of an honest message may lead too far."""
    judgement = judged(experienced(), -3 * WORST, part=TYPICAL)
    assert not judgement.reason and judgement.part == 0.5 and judgement.deviation > -1.0


def test_a_partner_that_is_behind_is_not_to_blame_and_changes_little() -> None:
    judgement = judged(experienced(), -2 * WORST, is_behind=True)
    assert not judgement.reason and judgement.part == 0.0 and judgement.deviation == 0.0


def test_while_we_learn_fast_a_merge_may_cost_a_part_of_what_we_have_learned() -> None:
    gate = experienced()
    assert judged(gate, -0.9 * WORST, own=0.0).reason
    assert not judged(gate, -0.9 * WORST, own=2 * WORST).reason
    assert judged(gate, -2 * WORST, own=2 * WORST).reason, "all that we have learned"
    assert judged(gate, -0.9 * WORST, own=-5.0).reason


def test_many_small_harms_do_not_shift_what_is_typical_without_end() -> None:
    gate, cost = experienced(), 0.0
    for _ in range(200):
        value = -cost - 0.01
        while not judged(gate, value - 0.005).reason:
            value -= 0.005
        if judged(gate, value).reason:
            break
        cost = -value
        gate.accept(judged(gate, value))
    assert cost < WORST + MOST_SPREAD * SCALE


def test_gains_of_a_time_of_fast_progress_do_not_make_usual_ones_low() -> None:
    gate = ProbeGate()
    for _ in range(REMEMBERED):
        gate.accept(judged(gate, 0.8))
    assert judged(gate, TYPICAL).part == 1.0


def test_judging_changes_nothing_and_a_restored_gate_judges_alike() -> None:
    gate, again = experienced(), ProbeGate()
    before = gate.state()
    again.restore(json.loads(json.dumps(before)))
    for value in (0.1, 0.0, -0.02, -0.05, -0.1, -1.0, math.nan, -math.inf):
        assert repr(judged(again, value)) == repr(judged(gate, value))
    assert gate.state() == before == again.state()


# ---------------------------------------------------------------------- what it costs


def test_probes_take_their_share_of_the_time_of_training_but_never_none() -> None:
    cost, rng = ProbeCost(), random.Random(0)

    def drawn(computing_s: float, *, must_probe: bool = False) -> int:
        return sum(cost.is_drawn(must_probe=must_probe, computing_s=computing_s, rng=rng) for _ in range(1000))

    assert drawn(0.0) == 1000, "nothing is known yet"
    with cost.counted():
        sum(range(100_000))
    assert drawn(0.0) == pytest.approx(1000 * LEAST_SHARE, abs=40)
    assert drawn(1e9) == 1000
    assert drawn(0.0, must_probe=True) == 1000


def test_a_probe_that_stops_the_program_waits_until_it_is_affordable() -> None:
    now_s = 0.0
    cost = ProbeCost(0.005, lambda: now_s, expected_s=0.3)
    assert not cost.is_affordable(59.0, is_needed=False) and not cost.is_affordable(29.0, is_needed=True)
    assert cost.is_affordable(61.0, is_needed=False) and cost.is_affordable(31.0, is_needed=True)
    with cost.counted():
        now_s = 0.5
    assert not cost.is_affordable(199.0, is_needed=False), "another of half a second would make it more than 1 of 200 s"
    assert cost.is_affordable(201.0, is_needed=False)
