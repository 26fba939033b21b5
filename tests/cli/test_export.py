"""`peer export` where it must refuse; what it writes is tested beside peer/model/export.py and in tests/e2e."""

from __future__ import annotations

from pathlib import Path

from tests.cli.shell import Shell


def test_export_without_a_checkpoint_is_refused(shell: Shell, tmp_path: Path) -> None:
    shell("id")
    result = shell("export", tmp_path / "model")
    assert result.code == 2
    assert str(shell.home) in result.complaint[0]
    assert not (tmp_path / "model").exists()


def test_a_foreign_folder_is_not_overwritten(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    assert shell("export", folder).code == 2
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
