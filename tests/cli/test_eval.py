"""`peer eval` where there is nothing to measure yet; the measuring itself is tested beside peer/model/evaluation.py and in tests/e2e."""

from __future__ import annotations

from tests.cli.shell import Shell


def test_evaluation_without_a_checkpoint_is_refused(shell: Shell) -> None:
    shell("id")
    result = shell("eval")
    assert result.code == 2
    assert str(shell.home) in result.complaint[0]
    assert result.out == ""
