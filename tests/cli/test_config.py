from __future__ import annotations

import json
from pathlib import Path

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.machine.home import Home
from tests.cli.shell import Shell


def test_every_setting_is_shown_with_its_meaning(shell: Shell) -> None:
    shown = shell("config").out
    for key, field in LocalSettings.model_fields.items():
        assert f"{key} = " in shown
        assert field.description is not None and field.description in shown


def test_a_setting_is_changed_shown_and_given_its_default_again(shell: Shell) -> None:
    assert shell("config", "threads", "3").code == 0
    assert shell("config", "threads").out == "3\n"
    assert "threads = 3   (default 0)" in shell("config").out
    assert json.loads(shell("config", "--json").out)["threads"] == 3
    assert shell("config", "threads", "--unset").out == "0\n"
    assert "\nthreads" not in Home(shell.home).config.read_text()


def test_a_negative_number_is_a_bad_value_and_no_option(shell: Shell) -> None:
    result = shell("config", "threads", "-1")
    assert result.code == 2 and "threads = '-1' is not valid" in result.complaint[0]
    assert "'-5h' is not a duration" in shell("pause", "-5h").complaint[0], "though -h is an option"
    assert "no such option: --unste" in shell("config", "threads", "--unste").complaint[0]


def test_a_key_may_be_written_like_its_option_and_a_path_from_here(shell: Shell) -> None:
    assert shell("config", "checkpoint-interval-s", "30").out == "30.0\n"
    for key in ("data", "model"):
        assert shell("config", key, "text").out == f"{Path.cwd() / 'text'}\n"


def test_an_invalid_setting_is_refused_with_a_hint(shell: Shell) -> None:
    assert "did you mean 'threads'" in shell("config", "thread").complaint[1]
    assert "not both" in shell("config", "threads", "2", "--unset").complaint[0]
    assert not Home(shell.home).config.exists()


def test_a_command_whose_program_is_missing_is_kept_with_a_warning(shell: Shell) -> None:
    for key, value, warns in (
        ("notify", "ntfy.example/topic", True),
        ("pause_when", "nosuchprogram -x", True),
        ("notify", "https://ntfy.example/topic", False),
        ("notify", "true", False),
    ):
        result = shell("config", key, value)
        assert result.code == 0 and result.out.strip() == value
        assert ("there is no program" in result.err) == warns, (value, result.err)
        assert ("a URL begins with" in result.err) == (warns and key == "notify")


def test_a_pause_needs_a_valid_duration(shell: Shell) -> None:
    assert "did you mean 2 days" in shell("pause", "2dys").complaint[0]
