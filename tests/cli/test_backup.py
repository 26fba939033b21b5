"""`peer backup` and `peer restore`: what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.peer.machine.config import save_settings, saved_settings
from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity
from tests.cli.shell import Shell


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("correct horse battery\nand a second line\n")
    return tmp_path / "secret"


def test_a_peer_is_backed_up_and_restored_without_settings_that_act_on_the_machine(
    shell: Shell, host: Identity, secret: Path, tmp_path: Path
) -> None:
    """One backup for all, because a passphrase takes seconds of processor time by design."""
    file, powers = tmp_path / "peer.backup", {"notify": "curl \x1b[2J \x9b2J", "pause_when": "rm -rf important", "data": "/home"}
    save_settings(Home(shell.home), {"max_upload": "5 Mbit/s", **powers})
    found = json.loads(shell("backup", file, "--passphrase-file", secret, "--json").out)
    assert found == {"file": str(file), "bytes": file.stat().st_size, "peer_id": str(host.peer_id), "generation": 0}
    assert "is not empty" in shell("restore", file, "--passphrase-file", secret).complaint[0]
    elsewhere, again = (Shell(tmp_path / name, shell._capsys) for name in ("elsewhere", "again"))
    result = elsewhere("restore", file, "--passphrase-file", secret)
    assert result.code == 0 and f"restored {host.peer_id} into {elsewhere.home}" in result.err
    assert Identity.load_or_create(Home(elsewhere.home).identity).peer_id == host.peer_id
    assert Home(elsewhere.home).manifest.read_bytes() == Home(shell.home).manifest.read_bytes()
    (line,) = [line for line in result.err.splitlines() if "run commands" in line]
    assert 'pause_when = "rm -rf important"' in line and line.isascii() and line.isprintable()
    assert saved_settings(Home(elsewhere.home)) == {"max_upload": "5 Mbit/s"}
    assert json.loads(again("restore", file, "--passphrase-file", secret, "--json").out)["dropped"] == powers


def test_a_target_that_does_not_do_is_refused_before_the_passphrase_is_asked_for(shell: Shell, host: Identity, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for command, target, words in (
        ("backup", "there", "exists"),
        ("backup", "no/file", "cannot be written to"),
        ("restore", "there", "is not empty"),
    ):
        assert words in shell(command, tmp_path / target).complaint[0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != shell.home.name) == ["there"]


def test_an_empty_home_is_not_backed_up(shell: Shell, secret: Path, tmp_path: Path) -> None:
    result = shell("backup", tmp_path / "file", "--passphrase-file", secret)
    assert result.code == 2 and "holds no peer" in result.complaint[0]
    assert not (tmp_path / "file").exists() and not shell.home.exists()


def test_a_file_that_exists_is_refused_before_anything_is_asked(shell: Shell, host: Identity, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    assert "exists" in shell("backup", tmp_path / "taken").complaint[0]


def test_a_passphrase_must_be_given_and_be_long(shell: Shell, host: Identity, tmp_path: Path) -> None:
    assert "no terminal to ask" in shell("backup", tmp_path / "file").complaint[0]
    (tmp_path / "short").write_text("horse\n")
    assert "has 5 characters; it needs 8" in shell("backup", tmp_path / "file", "--passphrase-file", tmp_path / "short").complaint[0]
    assert "cannot be read" in shell("backup", tmp_path / "file", "--passphrase-file", tmp_path / "none").complaint[0]
    assert not (tmp_path / "file").exists()


def test_a_short_passphrase_is_refused_before_it_is_asked_for_again(
    shell: Shell, host: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["horse"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", lambda *arguments, **options: next(answers))
    assert "has 5 characters; it needs 8" in shell("backup", tmp_path / "file").err
