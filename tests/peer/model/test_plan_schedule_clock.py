from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.model.plan import CLOCK_FACTOR, follow_clock


@given(st.integers(0, 99), st.integers(0, 200), st.integers(1, 50), st.integers(0, 99))
def test_a_clock_never_goes_back_nor_past_the_end_nor_past_the_partners(own: int, partner: int, slack: int, trained: int) -> None:
    clock = follow_clock(own, partner, slack, trained, 100)
    assert own <= clock <= max(own, min(partner, 100, CLOCK_FACTOR * trained))
    if partner >= 100:
        assert clock == max(own, min(100, CLOCK_FACTOR * trained)), "at the end nobody is left behind"


def test_one_that_is_far_behind_follows_up_to_the_slack() -> None:
    assert follow_clock(40, 60, 25, 40, 1000) == 40
    assert follow_clock(40, 80, 25, 40, 1000) == 55
    assert follow_clock(40, 990, 25, 400, 1000) == 980, "the slack shrinks to what is left"
