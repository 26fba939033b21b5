"""`peer bootstrap` where it must refuse; what it answers newcomers is tested with peer/node/dispatcher.py."""

from __future__ import annotations

from tests.cli.shell import Shell


def test_a_bad_invite_is_refused(shell: Shell) -> None:
    result = shell("bootstrap", "hello")
    assert result.code == 2
    assert "starts with gossamer1" in result.complaint[0]
