from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from gossamer.peer.simulator.scenario import Scenario, known
from gossamer.protocol.errors import BadSettings
from tests.peer.small import small_manifest


def test_rates_have_mean_one_whatever_the_speeds() -> None:
    rates = Scenario(small_manifest(), 4, (Fraction(4), Fraction(1))).rates
    assert rates == (Fraction(8, 5), Fraction(2, 5), Fraction(8, 5), Fraction(2, 5))
    assert sum(rates) == 4


def test_a_schedule_lasts_as_long_as_its_rate() -> None:
    scenario = Scenario(small_manifest(), 2, (Fraction(3), Fraction(1)))
    assert scenario.inner_settings_at(scenario.rates[0]).total_steps == 90
    assert scenario.inner_settings_at(Fraction(1)).total_steps == scenario.num_steps == 60


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


# ---------------------------------------------------------------------- who steps when


def timed(steps: int, num_peers: int, *, inner_steps: int = 5, seed: int = 0, **fields: Any) -> Scenario:
    manifest = small_manifest(run={"total_steps": steps, "seed": seed}, outer={"inner_steps": inner_steps})
    return Scenario(manifest, num_peers, **fields)


def test_equal_peers_arrive_together() -> None:
    assert list(timed(2, 3).steps_at_own_rates()) == [(1, [0, 1, 2]), (2, [0, 1, 2])]


def test_each_peer_keeps_its_own_rate_exactly() -> None:
    times = list(timed(50, 2, speeds=(Fraction(4), Fraction(1))).steps_at_own_rates())
    assert [sum(peer in peers for _, peers in times) for peer in range(2)] == [80, 20]
    assert [now for now, peers in times if peers == [0, 1]] == [Fraction(5, 2) * n for n in range(1, 21)]  # no rounding in between


def test_absences_follow_from_the_seed_and_spare_the_first_period() -> None:
    scenario = timed(100, 1, seed=3, drop_out=0.5)
    away = [scenario.is_away(0, now) for now in range(100)]
    assert not any(away[:5])
    assert away == [timed(100, 1, seed=3, drop_out=0.5).is_away(0, now) for now in range(100)]
    assert all(len(set(away[start : start + 5])) == 1 for start in range(0, 100, 5))
    assert 20 < sum(away) < 75


def test_absent_peers_do_not_step() -> None:
    scenario = timed(60, 3, inner_steps=4, seed=1, drop_out=0.4)
    for now, peers in scenario.steps_at_own_rates():
        assert not any(scenario.is_away(peer, now - 1) for peer in peers)  # unit steps begin one unit earlier


def test_a_peer_returns_when_a_period_begins() -> None:
    """A step of 3/2 from a time when its peer is there ends at the next multiple; after an absence, that much after a period's begin."""
    scenario = timed(60, 20, inner_steps=4, seed=1, drop_out=0.6)
    ended = [[now for now, peers in scenario.steps_at_own_rates() if peer in peers] for peer in range(20)]
    gaps = [(before, after) for times in ended for before, after in pairwise(times) if after - before != 1]
    assert gaps and all((after - 1) % 4 == 0 for _, after in gaps)


# ---------------------------------------------------------------------- names


def test_a_known_name_is_returned() -> None:
    assert known("noloco", ["noloco", "local"], "method") == "noloco"


def test_an_unknown_name_is_answered_with_suggestions() -> None:
    with pytest.raises(BadSettings, match="no method named 'nolco'") as caught:
        known("nolco", ["diloco", "noloco", "streaming"], "method")
    assert caught.value.hint == "did you mean noloco or diloco? choose from diloco, noloco, streaming"


def test_an_unlike_name_is_answered_with_all_names() -> None:
    with pytest.raises(BadSettings) as caught:
        known("xyz", ["local", "ddp"], "method")
    assert caught.value.hint == "choose from local, ddp"
