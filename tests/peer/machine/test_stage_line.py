"""What hops take of a line, against figures that were computed by hand."""

from __future__ import annotations

import math

import pytest

from gossamer.peer.machine.stage_line import StageLine, least_stages, tokens_computed_per_s
from gossamer.protocol.messages.terms import StageTerms

MBIT = 125_000.0


@pytest.mark.parametrize(
    ("stage", "sent", "received"),
    [(0, 136 * 7, 132 * 7), (1, (136 + 132) * 7, (136 + 132) * 7), (2, 132 * 7, 136 * 7)],
    ids=["first", "middle", "last"],
)
def test_a_stage_sends_and_receives_by_its_place(stage: int, sent: int, received: int) -> None:
    """The demo's hops: 128 values in int8 with two scales are 132 bytes, the token 4 more on its way up."""
    assert StageTerms(stage, 3, 4 * 7, 132 * 7, 4).hop_bytes == (sent, received)


def test_the_bandwidth_of_full_use_is_the_designs() -> None:
    """C = 2 b F / P: 2 * 2112 * 16e12 / 0.4e9 = 169 Mbit/s; a line of 20 feeds 0.118 of it, which is 592 tokens a second."""
    line = StageLine(2 * 2112, 2 * 2112, tokens_computed_per_s(16e12, 0.4e9), 20 * MBIT)
    assert line.tokens_per_s == pytest.approx(5000)
    assert line.full_use_bytes_per_s / MBIT == pytest.approx(2 * 2112 * 16e12 / 0.4e9 / 1e6) == pytest.approx(168.96)
    assert line.use == pytest.approx(20 / 168.96)
    assert line.carried_tokens_per_s == pytest.approx(20e6 / (2 * 2112 * 8)) == pytest.approx(591.9, abs=0.1)
    assert line.day_sent == pytest.approx(20 * MBIT * 86_400) == pytest.approx(216e9)


def test_a_wide_line_and_one_that_is_not_known_limit_nothing() -> None:
    for line_bytes_per_s in (1000 * MBIT, math.inf):
        line = StageLine(2 * 2112, 2 * 2112, 5000.0, line_bytes_per_s)
        assert (line.use, line.carried_tokens_per_s) == (1.0, 5000.0)


def test_the_busier_direction_counts() -> None:
    assert StageLine(136.0, 132.0, 100.0, 6800.0).use == StageLine(132.0, 136.0, 100.0, 6800.0).use == 0.5


def test_the_last_stage_computes_nothing_twice() -> None:
    assert tokens_computed_per_s(8e9, 1e9) == 1.0
    assert tokens_computed_per_s(6e9, 1e9, is_last=True) == 1.0


def test_stages_are_as_many_as_the_device_needs() -> None:
    assert [least_stages(8e9, most) for most in (9e9, 8e9, 4e9, 1.34e9)] == [1, 1, 2, 6]
