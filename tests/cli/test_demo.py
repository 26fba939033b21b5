"""The demo's folder: its own and removed, or the operator's and kept. A whole demo runs in tests/e2e/test_demo.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.demo import demo_folder
from protocol.errors import BadSettings


def test_a_temporary_folder_is_removed_whatever_happens() -> None:
    seen: list[Path] = []
    with pytest.raises(KeyboardInterrupt), demo_folder(None) as folder:
        seen.append(folder)
        (folder / "peer-1").mkdir()
        raise KeyboardInterrupt
    assert not seen[0].exists()


def test_a_given_folder_is_kept(tmp_path: Path) -> None:
    with demo_folder(tmp_path / "kept") as folder:
        assert folder == tmp_path / "kept"
    assert folder.is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSettings, match="file"), demo_folder(tmp_path / "file"):
        pass
