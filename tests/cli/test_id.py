"""`peer id`: one key, made once, private."""

from __future__ import annotations

import json
import stat

from tests.cli.shell import Shell


def test_key_is_made_once_and_kept_private(shell: Shell) -> None:
    first, second = shell("id"), shell("id")
    assert (first.code, second.code) == (0, 0)
    assert first.out == second.out
    assert first.out.startswith("12D3Koo")
    assert "created a new key" in first.err
    assert second.err == ""
    assert stat.S_IMODE((shell.home / "identity.key").stat().st_mode) == 0o600


def test_json_is_one_object(shell: Shell) -> None:
    answer = json.loads(shell("id", "--json").out)
    assert answer == {"peer_id": shell("id").out.strip(), "home": str(shell.home)}


def test_a_home_that_is_a_file_is_refused(shell: Shell) -> None:
    shell.home.write_text("no folder")
    result = shell("id")
    assert result.code == 2
    assert str(shell.home) in result.complaint[0]
    assert "--home" in result.complaint[1]


def test_a_key_that_others_can_read_is_refused(shell: Shell) -> None:
    shell("id")
    (shell.home / "identity.key").chmod(0o644)
    result = shell("id")
    assert result.code == 2
    assert "chmod 600" in result.complaint[1]


def test_a_damaged_key_is_not_replaced(shell: Shell) -> None:
    shell("id")
    key = shell.home / "identity.key"
    key.write_bytes(key.read_bytes()[:-1])
    assert shell("id").code == 2
    assert len(key.read_bytes()) == 67
