from __future__ import annotations

import pytest
import torch

from optim.codecs import PACKINGS
from optim.codecs.feedback import Feedback


@pytest.mark.parametrize("name", ["q2", "sign1", "topk", "topk12", "nf4"])
def test_nothing_is_lost_at_decay_1(name: str) -> None:
    """What was sent plus what is owed is the sum of what came in."""
    feedback = Feedback(PACKINGS[name], 1.0, 5000)
    generator = torch.Generator().manual_seed(0)
    came, sent = torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64)
    for _ in range(20):
        values = torch.randn(5000, generator=generator)
        payload, decoded = feedback.pack(values)
        assert torch.equal(decoded, PACKINGS[name].unpack(payload, 5000))
        came, sent = came + values, sent + decoded
    torch.testing.assert_close(sent + feedback.residual, came, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["q2", "sign1", "topk"])
def test_a_steady_gradient_gets_through(name: str) -> None:
    feedback = Feedback(PACKINGS[name], 1.0, 4096)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096, generator=generator)
    total = torch.zeros(4096)
    for _ in range(300):
        total += feedback.pack(values)[1]
    once = PACKINGS[name].unpack(PACKINGS[name].pack(values), 4096)
    assert float((total / 300 - values).norm()) < 0.5 * float((once - values).norm())


def test_decay_forgets() -> None:
    feedback = Feedback(PACKINGS["sign1"], 0.0, 256)
    values = torch.randn(256)
    first, second = feedback.pack(values)[1], feedback.pack(values)[1]
    assert torch.equal(first, second)


def test_a_decay_that_would_grow_what_is_owed_is_refused() -> None:
    with pytest.raises(ValueError, match="decay"):
        Feedback(PACKINGS["q2"], 1.5, 10)
