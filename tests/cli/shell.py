"""A `peer` command line, run in this process as the console script would run it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gossamer.cli.main import run

ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]
"""Start `peer ARGUMENTS` as a process: the fixture `start`."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command left behind on the shell."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> tuple[str, str]:
        """The error and its hint; fails where the last two lines are anything else."""
        error, hint = self.err.splitlines()[-2:]
        assert error.startswith("error: "), self.err
        assert hint.startswith("hint: "), self.err
        return error.removeprefix("error: "), hint.removeprefix("hint: ")


class Shell:
    """Runs `peer ARGUMENTS --home HOME`."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> CommandResult:
        self._capsys.readouterr()
        code = run([*map(str, arguments), "--home", str(self.home)])
        captured = self._capsys.readouterr()
        return CommandResult(code, captured.out, captured.err)
