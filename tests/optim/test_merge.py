from __future__ import annotations

import pytest
import torch

from optim.merge import additive, mix, shift


def test_nothing_in_flight_gives_the_slow_weights() -> None:
    slow, fast = torch.randn(2, 100)
    torch.testing.assert_close(additive(slow, fast, fast), slow)


def test_the_shift_is_known_before_the_fast_weights_are() -> None:
    slow, snapshot, fast = torch.randn(3, 100)
    assert torch.equal(fast + shift(slow, snapshot), additive(slow, fast, snapshot))


def test_steps_made_in_flight_are_kept() -> None:
    slow, snapshot, steps = torch.randn(3, 100)
    torch.testing.assert_close(additive(slow, snapshot + steps, snapshot), slow + steps)


def test_mix_keeps_a_share_of_the_local_weights() -> None:
    slow, fast = torch.randn(2, 100)
    assert torch.equal(mix(slow, fast, 0.0), slow)
    assert torch.equal(mix(slow, fast, 1.0), fast)
    torch.testing.assert_close(mix(slow, fast, 0.25), 0.75 * slow + 0.25 * fast)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        mix(slow, fast, 1.5)
