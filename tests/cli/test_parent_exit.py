"""A child follows the parent that asked for it, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gossamer.cli.parent_exit import VARIABLE, exits_with_this_process, follow_parent

ON_LINUX = sys.platform == "linux"
FOLLOW = [sys.executable, "-c", "from gossamer.cli.parent_exit import follow_parent; follow_parent(); print('lives')"]


def test_without_the_variable_the_process_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    follow_parent()


def test_a_child_of_a_living_parent_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(FOLLOW, env=os.environ | exits_with_this_process(), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "lives\n")


def test_a_child_whose_parent_is_gone_leaves_at_once() -> None:
    done = subprocess.run(FOLLOW, env=os.environ | {VARIABLE: "1"}, capture_output=True, text=True, timeout=30)
    assert done.returncode == (-signal.SIGTERM if ON_LINUX else 0)
