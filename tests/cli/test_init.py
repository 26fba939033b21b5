"""`peer init`: what it writes can be hosted, and it overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.protocol.run.manifest import Manifest
from tests.cli.shell import Shell


@pytest.mark.usefixtures("tries_here")
def test_writes_the_default_run_with_what_options_change_and_this_peer_as_issuer(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert shell("init", file, "--steps", "77", "--seed", "5", "--codec", "bf16", "--method", "noloco").code == 0
    issuers = [shell("id").out.strip()]
    changes = {"run": {"issuers": issuers, "total_steps": 77, "seed": 5}, "codec": {"name": "bf16"}, "outer": {"method": "noloco"}}
    assert Manifest.from_toml(file.read_text()) == Manifest.checked(changes)


def test_a_manifest_is_never_overwritten(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mine")
    result = shell("init", file)
    assert result.code == 2
    assert str(file) in result.complaint[0]
    assert file.read_text() == "mine"


def test_an_unwritable_file_is_named(shell: Shell, tmp_path: Path) -> None:
    result = shell("init", tmp_path / "missing" / "run.toml")
    assert result.code == 2
    assert "missing" in result.complaint[0]


def test_an_unknown_name_is_refused_with_the_nearest_one(shell: Shell, tmp_path: Path) -> None:
    result = shell("init", tmp_path / "run.toml", "--codec", "modul4")
    assert result.code == 2
    assert 'codec.name = "modul4"' in result.complaint[0]
    assert "modulo4" in result.complaint[1]
    assert not (tmp_path / "run.toml").exists() and not shell.home.exists()
