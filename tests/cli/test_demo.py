"""The demo's folder: its own and removed, or the operator's and kept. A whole demo runs in tests/e2e/test_demo.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.demo import demo_folder
from cli.local_swarm import PeerDied
from protocol.errors import BadSettings, ExitCode


def test_a_temporary_folder_is_removed_whatever_happens() -> None:
    seen: list[Path] = []
    with pytest.raises(KeyboardInterrupt), demo_folder(None) as folder:
        seen.append(folder)
        (folder / "peer-1").mkdir()
        raise KeyboardInterrupt
    assert not seen[0].exists()


@pytest.mark.parametrize(("code", "is_kept"), [(ExitCode.OUR_FAULT, True), (ExitCode.BAD_INPUT, False)])
def test_what_a_bug_left_behind_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode, is_kept: bool) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(PeerDied), demo_folder(None) as folder:
        raise PeerDied("peer-1 stopped", hint=f"its folder is {folder}", exit_code=code)
    assert folder.exists() == is_kept


def test_a_given_folder_is_kept(tmp_path: Path) -> None:
    with demo_folder(tmp_path / "kept") as folder:
        assert folder == tmp_path / "kept"
    assert folder.is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSettings, match="file"), demo_folder(tmp_path / "file"):
        pass
