"""Options that are generated from a model: spelling, value, bounds, and what a command receives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from gossamer.cli.generated_options import EVERY, Given, takes
from gossamer.peer.machine.config import LocalSettings

Run = Callable[..., Given]


@pytest.fixture
def given() -> Run:
    """Runs a command with every option, and returns the settings that it received."""
    received: list[Given] = []
    app = typer.Typer()

    @app.command()
    @takes("given", LocalSettings, *EVERY)
    def command(first: str = "", *, given: Given, last: int = 0) -> None:
        received.append(given)

    def run(*arguments: str) -> Given:
        app(args=list(arguments), standalone_mode=False)
        return received.pop()

    return run


def test_a_command_receives_only_what_was_given(given: Run) -> None:
    assert given() == {}
    assert given("--threads", "3", "--max-upload", "5 Mbit/s") == {"threads": 3, "max_upload": "5 Mbit/s"}


def test_a_switch_is_given_only_if_it_is_on_the_command_line(given: Run) -> None:
    assert given("--only-idle", "--relay") == {"only_idle": True, "relay": True}
    assert given("--no-relay") == {"relay": False}


def test_an_address_may_repeat_and_an_option_may_have_a_name_of_its_own(given: Run) -> None:
    assert given("--announce", "/ip4/1.2.3.4/tcp/5", "--announce", "/ip4/1.2.3.4/tcp/6") == {
        "announce": ["/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/6"]
    }
    assert given("--checkpoint-every", "2") == {"checkpoint_interval_s": 2.0}


def test_a_number_keeps_the_bounds_of_its_setting_and_a_folder_must_be_there(given: Run, tmp_path: Path) -> None:
    for arguments in (["--niceness", "20"], ["--port", "-1"], ["--data", str(tmp_path / "absent")], ["--model", __file__]):
        with pytest.raises(typer.TyperException):
            given(*arguments)
    assert given("--model", str(tmp_path)) == {"model": tmp_path}


def test_every_setting_has_setting_metadata() -> None:
    for name in LocalSettings.model_fields:
        assert LocalSettings.setting(name)
    assert set(LocalSettings.model_fields) - set(EVERY) == {
        *("recompute", "optimizer_on_host", "compile", "checkpoint_interval_steps"),
        *("notify", "pause_when", "pause_above_temperature", "max_gpu_power"),  # of every start: only `peer config` sets them
    }
