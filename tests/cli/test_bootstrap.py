"""`peer bootstrap` where it must refuse; what it answers newcomers is tested with peer/node/dispatcher.py."""

from __future__ import annotations

from tests.cli.shell import Shell


def test_a_bootstrap_node_needs_a_run(shell: Shell) -> None:
    result = shell("bootstrap")
    assert result.code == 2
    assert "holds no run" in result.complaint[0]
    assert "peer bootstrap gossamer1" in result.complaint[1]


def test_a_bad_invite_is_refused(shell: Shell) -> None:
    result = shell("bootstrap", "hello")
    assert result.code == 2
    assert "starts with gossamer1" in result.complaint[0]
