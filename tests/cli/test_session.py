"""A session's settings, and how it ends in words: what was reached, and what can be done next."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.cli.session import farewell, settings
from gossamer.peer.machine.config import PeerConfig, save_settings, saved_settings
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.protocol.errors import BadSettings

LOCAL: dict[str, object] = {"listen": "127.0.0.1", "port": 0}
CONFIG = PeerConfig(home=Path("/home/somebody/peer"))


def test_options_become_settings(tmp_path: Path) -> None:
    given = {"data": tmp_path / "text", "devices": "cpu", "threads": 2, "listen": "127.0.0.1", "port": 4001}
    config = settings(tmp_path, given | {"announce": ["/ip4/203.0.113.7/tcp/4001"]})
    assert (config.home, config.data, config.threads, config.port) == (tmp_path, tmp_path / "text", 2, 4001)
    assert config.announce == ("/ip4/203.0.113.7/tcp/4001",)


def test_options_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    save_settings(Home(tmp_path), {"threads": 3, "devices": "cpu", "port": 0})
    config = settings(tmp_path, {"threads": 2})
    assert (config.threads, config.devices, config.checkpoint_interval_s) == (2, "cpu", 60.0)
    assert saved_settings(Home(tmp_path))["threads"] == 3


def test_a_given_checkpoint_interval_in_seconds_switches_steps_off(tmp_path: Path) -> None:
    config = settings(tmp_path, LOCAL | {"checkpoint_interval_s": 600.0})
    assert (config.checkpoint_interval_s, config.checkpoint_interval_steps) == (600.0, 0)
    config = settings(tmp_path, LOCAL)
    assert (config.checkpoint_interval_s, config.checkpoint_interval_steps) == (60.0, 100)


def test_home_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(Path("~/peer"), LOCAL).home == tmp_path / "peer"


def test_a_device_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="devices") as caught:
        settings(tmp_path, LOCAL | {"devices": "abacus"})
    assert caught.value.hint


def test_the_farewell_after_the_run_names_export() -> None:
    result = farewell(Status(state="done", step=800, total_steps=800, loss=2.04), CONFIG)
    assert result.startswith("the run is over: step 800 of 800, loss 2.040\nhint: ")
    assert "peer export FOLDER --home /home/somebody/peer" in result


def test_the_farewell_after_leaving_names_join() -> None:
    result = farewell(Status(state="left", step=12, total_steps=800), CONFIG)
    assert result.startswith("left the run: step 12 of 800, loss -\nhint: ")
    assert "peer join --home /home/somebody/peer" in result
