"""The manual page says what `--help` says."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import typer

from gossamer.cli.main import command_line, run
from gossamer.cli.man import MEANINGS, manual_page
from gossamer.protocol.errors import ExitCode


def test_the_page_describes_every_verb_option_and_exit_code() -> None:
    page = manual_page().replace("\\-", "-")
    group = typer.main.get_command(command_line())
    for verb, command in group.commands.items():  # type: ignore[attr-defined]
        part = page.partition(f'.SS "peer {verb} ')[2].partition(".SS ")[0]
        for parameter in command.params:
            names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar.strip("[]")]
            assert all(name in part for name in names), f"peer {verb} {names}"
    assert set(MEANINGS) == set(ExitCode)


def test_a_pipe_gets_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man"]) == ExitCode.DONE
    assert capsys.readouterr().out == manual_page()


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_has_nothing_to_complain_about() -> None:
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8"], input=manual_page(), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "held-out" in done.stdout
