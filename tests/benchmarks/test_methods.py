from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import methods
from benchmarks.methods import CONTESTANTS, PLAIN, RATES, Outcome, key, mean_and_error, parser, rows_of, run_all
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.protocol.run.manifest import Manifest

RUN = {"method": "noloco", "peers": "2", "steps": "4", "seed": "1"}


def outcome(loss: float, averaged: float | None = None) -> Outcome:
    return Outcome(loss, loss if averaged is None else averaged, 0.0, 0.0)


def test_a_best_rate_at_the_edge_adds_the_next_rate() -> None:
    first, end = 3, 6
    assert methods.rate_beyond(RATES[3], (first, end)) == RATES[2]
    assert methods.rate_beyond(RATES[4], (first, end)) == ""
    assert methods.rate_beyond(RATES[5], (first, end)) == RATES[6]
    assert methods.rate_beyond(RATES[0], (0, 3)) == "" and methods.rate_beyond(RATES[-1], (0, len(RATES))) == ""


def test_the_best_settings_have_the_lowest_loss_and_never_diverged() -> None:
    tried = [({"learning_rate": "1"}, outcome(math.nan)), ({"learning_rate": "2"}, outcome(2.0)), ({"learning_rate": "3"}, outcome(3.0))]
    assert methods.best_settings("noloco", tried) == {"learning_rate": "2"}
    assert methods.best_settings("noloco", tried[:1]) == {"learning_rate": "1"}


def test_peers_that_never_met_are_judged_by_their_own_losses() -> None:
    apart = outcome(2.1, averaged=9.0)
    assert (methods.shown_loss("local", apart), methods.shown_loss("local, Muon", apart), methods.shown_loss("noloco", apart)) == (
        2.1,
        2.1,
        9.0,
    )


def test_every_run_of_the_benchmark_can_be_simulated_and_names_its_optimizer() -> None:
    given = parser("").parse_args([])
    given.inner_steps = ["5", "25"]
    best = {name: {"learning_rate": "1e-3", **PLAIN} for name in CONTESTANTS}
    for name, settings in rows_of(best, given):
        run = methods.run_of(name, {"peers": "4", "steps": "10", "delay": "1", **settings})
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


# ---------------------------------------------------------------------- simulations, each in a process of its own


def test_the_error_is_that_of_the_mean() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1.0 / math.sqrt(3.0)))
    mean, error = mean_and_error([2.5])
    assert mean == 2.5 and math.isnan(error)


def test_one_run_that_diverged_makes_the_mean_unknown() -> None:
    assert all(math.isnan(value) for value in mean_and_error([1.0, math.nan, 3.0]))


def test_a_run_key_depends_on_all_settings_but_not_on_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(RUN) == key(dict(reversed(RUN.items())))
    assert key(RUN) != key({**RUN, "seed": "2"})
    settings, _, open_settings = key(RUN).partition(" #")
    monkeypatch.setattr(methods, "EVAL_BATCHES", 7)
    assert key(RUN).startswith(settings) and not key(RUN).endswith(open_settings)


def test_kept_runs_are_not_repeated_and_an_unfinished_line_is_skipped(tmp_path: Path) -> None:
    keep, outcome = tmp_path / "keep.jsonl", Outcome(2.0, 1.9, 1e-3, 4.18)
    methods.keep(keep, key(RUN), outcome)
    with keep.open("a") as file:
        file.write('\n{"run": "method=ddp pee')
    given = parser("").parse_args(["--keep", str(keep), "--workers", "1"])
    assert run_all([RUN, RUN], given) == [outcome, outcome]
    methods.keep(keep, "the run after the interrupted one", outcome)
    assert methods.kept(keep, Outcome) == {key(RUN): outcome, "the run after the interrupted one": outcome}


@pytest.mark.timeout(120)
def test_a_run_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parser("").parse_args(["--keep", str(tmp_path / "keep.jsonl"), "--workers", "1"])
    small = {**RUN, "batch_size": "1", "sequence_length": "16", "codec": "fp32"}
    (first, again), kept = run_all([small, small], given), methods.kept(given.keep, Outcome)
    assert first == again == kept[key(small)]
    assert 0.0 < first.averaged < 6.0 and first.weight_std > 0.0
    assert run_all([small], given) == [first]
