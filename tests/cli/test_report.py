"""Errors as the operator reads them."""

from __future__ import annotations

import pytest
import typer

from cli.report import report, report_failure
from protocol.errors import BadInvite, ExitCode


def test_error_then_hint(capsys: pytest.CaptureFixture[str]) -> None:
    report("the invite is cut", "copy the whole line")
    assert capsys.readouterr() == ("", "error: the invite is cut\nhint: copy the whole line\n")


def test_no_empty_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(BadInvite("the invite is cut")) is ExitCode.BAD_INPUT
    assert capsys.readouterr().err == "error: the invite is cut\n"


def test_usage_errors_read_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(typer.BadParameter("Must be a number.")) is ExitCode.BAD_INPUT
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: invalid value: Must be a number")
    assert not error.endswith(".")
    assert "--help" in hint
