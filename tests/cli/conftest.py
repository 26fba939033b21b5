from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.shell import Shell


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.delenv("GOSSAMER_HOME", raising=False)
    monkeypatch.delenv("GOSSAMER_INVITE", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(tmp_path / "home", capsys)
