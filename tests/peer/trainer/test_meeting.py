from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.optim.codecs import codec
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.optim.fragments import STATISTICS, Fragment, Piece, split
from gossamer.optim.noloco import AVERAGE, NoLoCo, token_weight
from gossamer.peer.trainer.fragment_state import FragmentState, Since
from gossamer.peer.trainer.meeting import MAX_TOKEN_RATIO, MeetingSide, bounded_weight
from gossamer.peer.trainer.probe import Gain, Judgement, Probe, ProbeGate, Shifts
from gossamer.peer.trainer.weights import Weights
from tests.optim.codings import CODINGS_OF_CPU, coded_by

RULE = NoLoCo()
TOKENS = st.integers(0, 2**53)


@given(TOKENS, TOKENS)
def test_weights_of_a_pair_sum_to_one_and_neither_is_zero(own: int, partner: int) -> None:
    weight, other = bounded_weight(own, partner), bounded_weight(partner, own)
    assert abs(weight + other - 1.0) < 1e-12
    if own and partner and max(own, partner) >= MAX_TOKEN_RATIO**2:  # below, whole tokens round
        assert weight > 0.9 / (1 + MAX_TOKEN_RATIO)


@given(st.integers(1, 10**6), st.integers(1, MAX_TOKEN_RATIO))
def test_honest_differences_in_speed_count_in_full(tokens: int, ratio: int) -> None:
    assert bounded_weight(tokens, ratio * tokens) == token_weight(tokens, ratio * tokens)


def test_two_that_have_not_trained_count_alike() -> None:
    assert bounded_weight(0, 0) == 0.5


@given(st.integers(1, 2**53))
def test_a_peer_without_tokens_has_no_weight(tokens: int) -> None:
    assert (bounded_weight(0, tokens), bounded_weight(tokens, 0)) == (0.0, 1.0)


def state(fast: float, codec_name: str = "fp32", place: str = "cpu") -> FragmentState:
    """A fragment whose slow weights are 1 and whose fast weights are not."""
    parameters = {"matrix": torch.ones(5000, device=place), "norm": torch.ones(7, device=place)}
    fragment = Fragment(0, "all", (Piece("matrix", 5000), Piece("norm", 7)), 5000)
    made = FragmentState(FragmentCodec(fragment, codec(codec_name)), Weights(parameters))
    for tensor in parameters.values():
        tensor.fill_(fast)
    return made


def test_what_is_out_of_turn_raises_and_what_follows_still_counts() -> None:
    states = state(1.1), state(1.3)
    one, other = (MeetingSide(each) for each in states)
    nothing = torch.empty(0, dtype=torch.uint8)
    for out_of_turn in (
        lambda: one.encode(nothing),
        lambda: one.judge(nothing),
        lambda: one.step(nothing.bool()),
        lambda: one.failed_blocks,
    ):
        with pytest.raises(ValueError):
            out_of_turn()
    sketches = [side.prepare(RULE, 0.5, 7) for side in (one, other)]
    payloads = one.encode(sketches[1]), other.encode(sketches[0])
    with pytest.raises(ValueError, match="no message to encode"):
        one.encode(sketches[1])
    assert one.judge(payloads[1]) == other.judge(payloads[0]) == ""
    for side in (one, other):
        side.merge(side.step(side.failed_blocks))
    assert torch.allclose(states[0].slow + states[1].slow, 2.0 + 0.7 * torch.full((5007,), 0.4))


@pytest.mark.parametrize("partner", CODINGS_OF_CPU)
@pytest.mark.parametrize("has_momentum", [True, False])
def test_a_meeting_ends_the_same_by_every_form_of_coding(partner: str, has_momentum: bool) -> None:
    """One side decodes and steps by each form in turn; its partner uses either."""
    generator = torch.Generator().manual_seed(1)
    states = [state(1.0, "modulo4"), state(1.0, "modulo4")]
    for each in states:
        each.has_momentum = has_momentum
        for tensor in each._weights.values().values():
            tensor.add_(0.01 * torch.randn(tensor.shape, generator=generator))
    one, other = (MeetingSide(each) for each in states)
    with coded_by(partner):
        theirs = other.prepare(RULE, 0.25, 7)
    own = one.prepare(RULE, 0.75, 7)
    one.encode(theirs)
    with coded_by(partner):
        payload = other.encode(own)
    steps = []
    for coding in CODINGS_OF_CPU:
        with coded_by(coding):
            assert one.judge(payload) == ""
            failed = one.failed_blocks.clone()
            failed[2] = True  # on the partner's side only
            steps.append(one.step(failed))
    for step in steps:
        assert torch.equal(step.slow, steps[0].slow)
        assert torch.equal(step.shift, steps[0].shift)
        assert torch.equal(step.momentum, steps[0].momentum)
        assert float(step.momentum.abs().max() > 0) == has_momentum


def test_a_message_that_was_accepted_counts_no_more_once_another_one_is_refused() -> None:
    side, other = MeetingSide(state(1.1)), MeetingSide(state(1.3))
    sketches = [one.prepare(RULE, 0.5, 7) for one in (side, other)]
    side.encode(sketches[1])
    payload = other.encode(sketches[0])
    assert side.judge(payload) == ""
    assert "away from ours" in side.judge(payload.view(torch.float32).mul(1e6).view(torch.uint8))
    with pytest.raises(ValueError, match="No message was accepted"):
        side.step(side.failed_blocks)


class Told(ProbeGate):
    """A gate that says what it is told of each message, and a probe that measures nothing."""

    def __init__(self, *parts: float | None) -> None:
        super().__init__()
        self.parts = deque(parts)  # None: harmful

    def probe(self, gate: ProbeGate, fragment: Fragment, shifts: Shifts, part: float, *, is_behind: bool) -> Judgement:
        found = self.parts.popleft()
        return Judgement(Gain(0.1, 0.01, 1.0, 100), "" if found is not None else "harmful", found or 0.0, 0.0)


def judged_side(told: Told, most_part: float = 1.0) -> tuple[MeetingSide, Probe]:
    """A side that has accepted and measured a message."""
    side, other = MeetingSide(state(1.01, "modulo4")), MeetingSide(state(1.02, "modulo4"))
    sketches = [one.prepare(RULE, 0.5, 7) for one in (side, other)]
    side.encode(sketches[1])
    assert side.judge(other.encode(sketches[0]), most_part=most_part) == ""
    probe: Any = SimpleNamespace(judge=told.probe)
    side.probe(probe, told, side.failed_blocks, lag_steps=0)
    return side, probe


def test_blocks_that_only_the_partner_lists_as_failed_are_measured_again() -> None:
    for parts, merged in (((1.0, 1.0), 1.0), ((1.0, 0.5), 0.5), ((0.5, 1.0), 0.5), ((1.0, None), 0.0)):
        told = Told(*parts)
        side, probe = judged_side(told)
        failed = side.failed_blocks.clone()
        failed[0] = True
        step = side.step_as_decided(probe, told, failed, lag_steps=0)
        assert not told.parts, "it was not measured again"
        alone, pair = RULE.solo_step(side.state.slow, side.state.momentum, side.snapshot)[0], judged_side(Told(1.0))[0].step(failed).slow
        assert torch.allclose(step.slow, alone.lerp(pair, merged), atol=1e-6)
        assert side.part == merged


@pytest.mark.parametrize(("found", "most_part", "part"), [(1.0, 0.25, 0.25), (0.5, 0.75, 0.5), (1.0, 0.0, 0.0), (0.0, 0.5, 0.0)])
def test_of_a_slower_partner_no_more_is_taken_than_its_part(found: float, most_part: float, part: float) -> None:
    side, _ = judged_side(Told(found), most_part)
    none = torch.zeros_like(side.failed_blocks)
    alone, pair = RULE.solo_step(side.state.slow, side.state.momentum, side.snapshot)[0], judged_side(Told(1.0))[0].step(none).slow
    assert torch.allclose(side.step(none).slow, alone.lerp(pair, part), atol=1e-6)
    assert side.part == part
    assert side.is_whole is (found == 1.0)  # the partner's clock is followed all the same


def test_a_step_for_our_own_failed_blocks_is_not_measured_twice() -> None:
    told = Told(0.5)
    side, probe = judged_side(told)
    side.step_as_decided(probe, told, side.failed_blocks, lag_steps=0)
    assert side.part == 0.5


def test_a_solo_step_takes_the_tokens_along() -> None:
    alone = state(1.1)
    alone.count(300)
    alone.count_missed_steps(2)
    alone.take_solo_step(RULE)
    assert alone.since == Since()
    assert torch.allclose(alone.slow, torch.full((5007,), 1.07))
    assert torch.allclose(alone.fast(), alone.slow)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_beside_a_gpu_slow_weights_rest_on_the_host_and_meetings_come_to_the_same() -> None:
    places = {name: (state(1.1, place=name), state(1.3, place=name)) for name in ("cpu", "cuda")}
    for states in places.values():
        sides = [MeetingSide(each) for each in states]
        sketches = [side.prepare(RULE, 0.5, 7) for side in sides]
        payloads = sides[0].encode(sketches[1]), sides[1].encode(sketches[0])
        for side, payload in zip(sides, reversed(payloads), strict=True):
            assert side.judge(payload) == ""
            side.merge(side.step(side.failed_blocks))
        states[0].take_solo_step(RULE)
    for here, there in zip(places["cpu"], places["cuda"], strict=True):
        assert there.slow.is_pinned() and there.momentum.is_pinned()
        torch.testing.assert_close(there.slow, here.slow)
        torch.testing.assert_close(there.fast().cpu(), here.fast())


def statistics(mean: float, variance: float) -> FragmentState:
    parameters = {f"{STATISTICS}mean": torch.ones(4), f"{STATISTICS}var": torch.ones(4)}
    (fragment,) = split({name: (4,) for name in parameters}, 100)
    made = FragmentState(FragmentCodec(fragment, codec("fp32")), Weights(parameters))
    for tensor, value in zip(parameters.values(), (mean, variance), strict=True):
        tensor.fill_(value)
    return made


@pytest.mark.parametrize(("mean", "variance", "refused"), [(-1.0, 0.5, False), (1.0, -0.01, True)])
def test_a_variance_below_zero_is_refused(mean: float, variance: float, refused: bool) -> None:
    sides = [MeetingSide(each) for each in (statistics(-0.5, 0.8), statistics(mean, variance))]
    sketches = [side.prepare(AVERAGE, 0.5, 1) for side in sides]
    payloads = [side.encode(other) for side, other in zip(sides, reversed(sketches), strict=True)]
    reason = sides[0].judge(payloads[1])
    assert (reason == f"{STATISTICS}var has values below zero, ours has none") == refused and bool(reason) == refused


def test_means_of_other_signs_are_merged() -> None:
    sides = [MeetingSide(each) for each in (statistics(0.01, 0.8), statistics(-0.01, 0.8))]
    sketches = [side.prepare(AVERAGE, 0.5, 1) for side in sides]
    payloads = [side.encode(other) for side, other in zip(sides, reversed(sketches), strict=True)]
    assert [side.judge(payload) for side, payload in zip(sides, reversed(payloads), strict=True)] == ["", ""]


def test_statistics_meet_in_their_mean_and_carry_no_momentum() -> None:
    states = statistics(0.75, 1.75), statistics(1.25, 2.25)
    sides = [MeetingSide(each) for each in states]
    sketches = [side.prepare(AVERAGE, 0.5, 1) for side in sides]
    payloads = [side.encode(other) for side, other in zip(sides, reversed(sketches), strict=True)]
    for side, payload in zip(sides, reversed(payloads), strict=True):
        assert not side.judge(payload)
        side.merge(side.step(side.failed_blocks))
        side.state.move_fast_weights()
    for each in states:
        assert torch.equal(each.fast(), torch.tensor([1.0] * 4 + [2.0] * 4))
        each.take_solo_step(AVERAGE)
        each.move_fast_weights()
        assert torch.equal(each.fast(), torch.tensor([1.0] * 4 + [2.0] * 4)), "nothing was learned since, so nothing moves"
