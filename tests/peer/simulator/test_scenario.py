from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from peer.simulator.scenario import Scenario
from protocol.errors import BadSettings
from tests.peer.small import small_manifest


def test_rates_have_mean_one_whatever_the_speeds() -> None:
    rates = Scenario(small_manifest(), 4, (Fraction(4), Fraction(1))).rates
    assert rates == (Fraction(8, 5), Fraction(2, 5), Fraction(8, 5), Fraction(2, 5))
    assert sum(rates) == 4


def test_a_schedule_lasts_as_long_as_its_rate() -> None:
    scenario = Scenario(small_manifest(), 2, (Fraction(3), Fraction(1)))
    assert scenario.inner(scenario.rates[0]).total_steps == 90
    assert scenario.inner(Fraction(1)).total_steps == scenario.num_steps == 60


@pytest.mark.parametrize(
    "values",
    [
        {"num_peers": 0},
        {"speeds": ()},
        {"speeds": (Fraction(0),)},
        {"speeds": (Fraction(1),) * 9},
        {"delay_steps": Fraction(-1)},
        {"matching": "sometimes"},
        {"drop_out": 1.0},
        {"drop_out": float("nan")},
        {"skew": 1.5},
        {"keep_local": -0.1},
        {"feedback": 2.0},
        {"clip": 0.0},
        {"staleness_penalty": 0.5},
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadSettings) as caught:
        Scenario(small_manifest(), **values)
    assert caught.value.hint
