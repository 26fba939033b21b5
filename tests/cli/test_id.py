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
