from __future__ import annotations

from pathlib import Path

import pytest

from peer.machine.child import ChildSettings
from peer.machine.config import NODE, OPTIONS_PAGE, TRAINER, PeerConfig, peer_config
from protocol.errors import BadSettings, ExitCode


def test_a_home_is_enough() -> None:
    config = peer_config({"home": "/somewhere"})
    assert config.home == Path("/somewhere")
    assert config.device == "auto"


def test_settings_cannot_be_changed_afterwards() -> None:
    config = peer_config({"home": "h"})
    with pytest.raises(ValueError, match="frozen"):
        config.device = "cpu"  # type: ignore[misc]


def test_an_unknown_setting_names_its_neighbour() -> None:
    with pytest.raises(BadSettings, match="'listen_prot'") as caught:
        peer_config({"home": "h", "listen_prot": 1})
    assert "listen_port" in caught.value.hint
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_a_setting_like_no_other_leads_to_a_page_that_exists() -> None:
    with pytest.raises(BadSettings, match="'zzz'") as caught:
        peer_config({"home": "h", "zzz": 1})
    assert OPTIONS_PAGE in caught.value.hint
    assert (Path(__file__).parents[3] / OPTIONS_PAGE).is_file()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "gpu"),
        ("listen_port", 70000),
        ("num_threads", -1),
        ("checkpoint_interval_s", 0),
        ("checkpoint_interval_steps", "often"),
    ],
)
def test_a_value_that_cannot_work_is_named(name: str, value: object) -> None:
    with pytest.raises(BadSettings, match=name) as caught:
        peer_config({"home": "h", name: value})
    assert caught.value.hint


def test_a_peer_is_made_of_what_its_settings_ask_for() -> None:
    asked = [{}, {"alone": True}, {"trains": False}]
    assert [peer_config({"home": "h", **settings}).children for settings in asked] == [(TRAINER, NODE), (TRAINER,), (NODE,)]


def test_settings_cross_the_pipe_whole() -> None:
    config = PeerConfig(home=Path("/some home"), data=Path("text"), announce=("/ip4/1.2.3.4/tcp/5",), num_threads=3, alone=True)
    settings = ChildSettings(config=config, peer_id="12D3KooX", runtime=Path("/run/x"), told_to_start=True)
    line = settings.to_line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert ChildSettings.model_validate_json(line) == settings


def test_a_folder_whose_name_cannot_be_told_is_refused() -> None:
    with pytest.raises(BadSettings, match="not utf-8"):
        peer_config({"home": Path("h\udce9")})
