from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optim.noloco import token_weight
from peer.trainer.meeting import MAX_TOKEN_RATIO, bounded_weight

TOKENS = st.integers(0, 2**53)


@given(TOKENS, TOKENS)
def test_weights_of_a_pair_sum_to_one_and_nobody_takes_it_all(own: int, partner: int) -> None:
    weight, other = bounded_weight(own, partner), bounded_weight(partner, own)
    assert abs(weight + other - 1.0) < 1e-12
    if max(own, partner) >= MAX_TOKEN_RATIO**2:  # below, whole tokens round
        assert weight > 0.9 / (1 + MAX_TOKEN_RATIO)


@given(st.integers(1, 10**6), st.integers(1, MAX_TOKEN_RATIO))
def test_honest_differences_in_speed_count_in_full(tokens: int, ratio: int) -> None:
    assert bounded_weight(tokens, ratio * tokens) == token_weight(tokens, ratio * tokens)


def test_two_that_have_not_trained_count_alike() -> None:
    assert bounded_weight(0, 0) == 0.5
