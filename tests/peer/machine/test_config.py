from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import (
    NODE,
    SETTINGS_PAGE,
    TRAINER,
    LocalSettings,
    PeerConfig,
    peer_config,
    save_settings,
    saved_settings,
    with_setting,
)
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings, ExitCode


def test_a_home_is_enough() -> None:
    config = peer_config({"home": "/somewhere"})
    assert config.home == Path("/somewhere")
    assert config.devices == "auto"


def test_an_unknown_setting_names_its_neighbour() -> None:
    with pytest.raises(BadSettings, match="'prot'") as caught:
        peer_config({"home": "h", "prot": 1})
    assert "port" in caught.value.hint
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_an_unknown_setting_without_a_near_name_hints_at_an_existing_page() -> None:
    with pytest.raises(BadSettings, match="'zzz'") as caught:
        peer_config({"home": "h", "zzz": 1})
    assert SETTINGS_PAGE in caught.value.hint
    assert (Path(__file__).parents[3] / SETTINGS_PAGE).is_file()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("devices", "coda"),
        ("devices", "xpu:x"),
        ("devices", "cpu:0"),
        ("devices", "0,1,0"),
        ("port", 70000),
        ("threads", -1),
        ("checkpoint_interval_s", 0),
        ("checkpoint_interval_steps", "often"),
        ("schedule", "22-7"),
    ],
)
def test_an_invalid_value_is_named(name: str, value: object) -> None:
    with pytest.raises(BadSettings, match=name) as caught:
        peer_config({"home": "h", name: value})
    assert caught.value.hint


def test_the_settings_decide_which_processes_a_peer_has() -> None:
    asked = [{}, {"alone": True}, {"trains": False}]
    assert [peer_config({"home": "h", **settings}).children for settings in asked] == [(TRAINER, NODE), (TRAINER,), (NODE,)]


def test_settings_cross_the_pipe_whole() -> None:
    config = PeerConfig(home=Path("/some home"), data=Path("text"), announce=("/ip4/1.2.3.4/tcp/5",), threads=3, alone=True)
    settings = ChildSettings(config=config, peer_id="12D3KooX", runtime=Path("/run/x"), waits_for_start=True)
    line = settings.to_line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert ChildSettings.model_validate_json(line) == settings


def test_a_folder_name_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(BadSettings, match="not UTF-8"):
        peer_config({"home": Path("h\udce9")})


# --------------------------------------------------------------------------- the file


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_home_without_a_file_has_the_defaults(home: Home) -> None:
    assert saved_settings(home) == {}


def test_the_settings_file_explains_every_setting(home: Home) -> None:
    given = with_setting(with_setting({}, "threads", "3"), "announce", "/ip4/203.0.113.7/tcp/1, /ip4/203.0.113.7/tcp/2")
    given = with_setting(given, "data", '/some \\ "text"')
    save_settings(home, given)
    assert saved_settings(home) == given
    assert peer_config({"home": "h", **given}).announce == ("/ip4/203.0.113.7/tcp/1", "/ip4/203.0.113.7/tcp/2")
    text = home.config.read_text()
    for key, field in LocalSettings.model_fields.items():
        assert f"# {field.description}\n" in text
        assert f"\n{key} = " in text or f"\n# {key} =" in text


def test_a_removed_setting_has_its_default(home: Home) -> None:
    save_settings(home, with_setting({"threads": 3, "devices": "cpu"}, "threads", None))
    assert saved_settings(home) == {"devices": "cpu"}


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("thread", "2", "did you mean 'threads'"),
        ("home", "/elsewhere", "`peer config` lists"),
        ("threads", "many", "Processor threads"),
        ("schedule", "mon-fry 22:00-07:00", "When to train"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_a_hint(key: str, text: str, reason: str) -> None:
    with pytest.raises(BadSettings) as caught:
        with_setting({}, key, text)
    assert reason in caught.value.hint


@pytest.mark.parametrize("content", ["threads = ", "thread = 2", "threads = -1", "\xff"])
def test_a_file_that_cannot_be_used_is_named(home: Home, content: str) -> None:
    home.config.write_text(content, encoding="latin-1")
    with pytest.raises(BadSettings, match=str(home.config)) as caught:
        saved_settings(home)
    assert caught.value.hint


def test_only_what_limits_is_a_limit_in_force(tmp_path: Path) -> None:
    assert not peer_config({"home": tmp_path, "devices": "cpu"}).limits_in_force
    config = peer_config({"home": tmp_path, "threads": 2, "schedule": "22:00-07:00", "max_upload": "1 Mbit/s"})
    assert config.limits_in_force == {"threads": "2", "schedule": "22:00-07:00", "max_upload": "1 Mbit/s"}
