"""`peer export` where it must refuse; what it writes is tested beside peer/model/export.py and in tests/e2e."""

from __future__ import annotations

from pathlib import Path

from tests.cli.shell import Shell


def test_without_a_checkpoint_there_is_nothing_to_export(shell: Shell, tmp_path: Path) -> None:
    shell("id")
    said = shell("export", tmp_path / "model")
    assert said.code == 2
    assert str(shell.home) in said.complaint[0]
    assert not (tmp_path / "model").exists()


def test_somebody_elses_folder_is_left_alone(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    assert shell("export", folder).code == 2
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
