from __future__ import annotations

import math

from benchmarks import methods
from benchmarks.methods import CONTESTANTS, PLAIN, RATES, rows_of
from benchmarks.runs import Outcome, parser
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.protocol.run.manifest import Manifest


def outcome(loss: float, averaged: float | None = None) -> Outcome:
    return Outcome(loss, loss if averaged is None else averaged, 0.0, 0.0)


def test_a_rate_that_wins_at_the_edge_brings_in_the_next_one_beyond_it() -> None:
    first, end = 3, 6
    assert methods._beyond(RATES[3], (first, end)) == RATES[2]
    assert methods._beyond(RATES[4], (first, end)) == ""
    assert methods._beyond(RATES[5], (first, end)) == RATES[6]
    assert methods._beyond(RATES[0], (0, 3)) == "" and methods._beyond(RATES[-1], (0, len(RATES))) == ""


def test_the_best_is_the_lowest_and_never_one_that_diverged() -> None:
    tried = [({"learning_rate": "1"}, outcome(math.nan)), ({"learning_rate": "2"}, outcome(2.0)), ({"learning_rate": "3"}, outcome(3.0))]
    assert methods._best("noloco", tried) == {"learning_rate": "2"}
    assert methods._best("noloco", tried[:1]) == {"learning_rate": "1"}


def test_peers_that_never_met_are_judged_by_their_own_losses() -> None:
    apart = outcome(2.1, averaged=9.0)
    assert (methods._shown("local", apart), methods._shown("local, Muon", apart), methods._shown("noloco", apart)) == (2.1, 2.1, 9.0)


def test_every_run_of_the_benchmark_can_be_simulated_and_names_its_optimizer() -> None:
    given = parser("").parse_args([])
    given.inner_steps = ["5", "25"]
    best = {name: {"learning_rate": "1e-3", **PLAIN} for name in CONTESTANTS}
    for name, settings in rows_of(best, given):
        run = methods._run(name, {"peers": "4", "steps": "10", "delay": "1", **settings})
        made = scenario(Manifest(), dict(setting(f"{key}={value}") for key, value in run.items()))
        assert made.manifest.inner.optimizer == ("muon" if "Muon" in name else "adamw")
    for one in CONTESTANTS.values():
        for step in one.outer_steps:
            scenario(Manifest(), dict(setting(f"{key}={value}") for key, value in {**one.settings, **step}.items()))


def test_groups_exchange_as_often_as_pairs_on_demand_meet() -> None:
    given = parser("").parse_args([])
    given.inner_steps = ["10"]
    rows = rows_of({name: PLAIN for name in CONTESTANTS}, given)
    assert {settings["inner_steps"] for name, settings in rows if name == "diloco"} == {"7"}
    assert {settings["inner_steps"] for name, settings in rows if name == "noloco"} == {"10"}
