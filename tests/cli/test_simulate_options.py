from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from cli.main import command_line
from cli.simulate_options import ALWAYS, ONLY_NETWORK
from tests.cli.shell import Shell

TRAINING = {
    "method": ("--method", "ddp"),
    "steps": ("--steps", "5"),
    "speeds": ("--speeds", "4,1"),
    "delay": ("--delay", "2"),
    "matching": ("--matching", "scheduled"),
    "token_weights": ("--no-token-weights",),
    "drop_out": ("--drop-out", "0.1"),
    "skew": ("--skew", "0.5"),
    "sweep": ("--sweep", "codec=fp32,nf4"),
    "data": ("--data", "."),
    "device": ("--device", "cpu"),
    "threads": ("--threads", "1"),
    "eval_batches": ("--eval-batches", "8"),
    "plot": ("--plot", "x.png"),
}
NETWORK = {
    "latency": ("--latency", "0.05"),  # even where it is the default
    "variation": ("--variation", "0.5"),
    "bandwidth": ("--bandwidth", "100"),
    "params": ("--params", "1e8"),
    "layers": ("--layers", "12"),
    "step_seconds": ("--step-seconds", "1"),
}


def test_every_option_is_of_training_of_the_network_or_of_both() -> None:
    command = typer.main.get_command(command_line()).commands["simulate"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params} - {"help"}
    assert set(NETWORK) == ONLY_NETWORK
    assert names - ALWAYS == set(TRAINING) | set(NETWORK)
    assert ALWAYS.issubset(names)


@pytest.mark.parametrize("given", TRAINING.values(), ids=TRAINING)
def test_options_of_training_mean_nothing_with_the_network_alone(shell: Shell, given: tuple[str, ...]) -> None:
    said = shell("simulate", "--network", *given)
    assert said.code == 2
    assert said.complaint[0] == f"{given[0]} means nothing with --network"
    assert "leave it out" in said.complaint[1]
    assert not said.out


@pytest.mark.parametrize("given", NETWORK.values(), ids=NETWORK)
def test_options_of_the_network_mean_nothing_in_training(shell: Shell, given: tuple[str, ...]) -> None:
    said = shell("simulate", *given)
    assert said.code == 2
    assert said.complaint == (f"{given[0]} means nothing without --network", "leave it out, or add --network")
    assert not said.out


@pytest.mark.parametrize(
    ("setting", "says"),
    [("beta=0.5", "--set beta means nothing with --network"), ("skew=0.5", "--set skew means"), ("bata=1", "no setting named 'bata'")],
)
def test_settings_of_training_mean_nothing_with_the_network_alone(shell: Shell, setting: str, says: str) -> None:
    said = shell("simulate", "--network", "--set", setting)
    assert said.code == 2
    assert says in said.complaint[0]


def test_what_the_network_takes_reaches_it(shell: Shell) -> None:
    said = shell(
        "simulate", "--network", "--peers", "5", "--inner-steps", "7", "--set", "codec=nf4", "--seed", "3", "--json", *NETWORK["params"]
    )
    assert said.code == 0
    found = json.loads(said.out)
    assert (found["peers"], found["inner_steps"], found["codec"], found["params"]) == (5, 7, "nf4", 1e8)
    other = shell("simulate", "--network", "--peers", "5", "--inner-steps", "7", "--codec", "nf4", "--set", "seed=4", "--json")
    assert json.loads(other.out)["sync_seconds"] != found["sync_seconds"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--bandwidth", "nan"), "--bandwidth must be a number between"),
        (("--params", "inf"), "--params must be a number between"),
        (("--latency", "0"), "--latency must be a number between"),
        (("--variation", "nan"), "--variation must satisfy"),
        (("--peers", "1000000000000"), "--peers must lie between 2 and 10000000"),
    ],
)
def test_a_network_that_cannot_be_is_refused(shell: Shell, given: tuple[str, str], says: str) -> None:
    said = shell("simulate", "--network", "--json", *given)
    assert said.code == 2
    assert says in said.complaint[0]
    assert not said.out


def test_the_home_folder_may_come_from_the_environment(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    assert shell("simulate", "--network", "--json").code == 0
