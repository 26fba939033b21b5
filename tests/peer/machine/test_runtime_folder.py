from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gossamer.peer.machine import runtime_folder as runtime
from gossamer.peer.machine.runtime_folder import ORPHAN_AGE_S, PREFIX, runtime_folder
from gossamer.protocol.errors import BadSettings


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MEMORY_FOLDER", tmp_path)
    monkeypatch.setattr(runtime, "MAX_PATH_BYTES", 4096)


def age(folder: Path) -> None:
    old = folder.stat().st_mtime - 2 * ORPHAN_AGE_S
    os.utime(folder, (old, old))


def test_it_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    with runtime_folder(1000) as folder:
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "payload").write_bytes(b"x")
    assert not list(tmp_path.iterdir())


def test_too_small_a_memory_folder_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0 if place == tmp_path else 1 << 40))
    with runtime_folder(1 << 20) as folder:
        assert folder.parent != tmp_path


def test_a_system_without_a_memory_folder_uses_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MEMORY_FOLDER", tmp_path / "missing")
    with runtime_folder(1) as folder:
        assert folder.is_dir()


def test_where_nothing_else_can_be_written_to_it_lies_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(runtime, "MEMORY_FOLDER", tmp_path / "missing")
    monkeypatch.setattr(runtime, "_free_bytes", lambda place: 1 << 40 if place == home else -1)
    with runtime_folder(1 << 20, home) as folder:
        assert folder.parent == home


def test_no_temporary_folder_is_no_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(runtime, "MEMORY_FOLDER", tmp_path / "missing")
    with runtime_folder(1, tmp_path) as folder:
        assert folder.parent == tmp_path


def test_a_long_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(runtime, "MEMORY_FOLDER", deep)
    monkeypatch.setattr(runtime, "MAX_PATH_BYTES", 80)
    with runtime_folder(1) as folder:
        assert len(os.fsencode(folder / "control.sock")) < 104


def test_no_room_anywhere_is_reported_with_the_need() -> None:
    with pytest.raises(BadSettings, match=str(2 << 60)) as caught, runtime_folder(1 << 60):
        raise AssertionError("made")
    assert "TMPDIR" in caught.value.hint


def test_orphans_are_removed_and_live_folders_stay(tmp_path: Path) -> None:
    orphan = tmp_path / f"{PREFIX}{os.getuid()}-orphan"
    unlocked = tmp_path / f"{PREFIX}{os.getuid()}-unlocked"  # its owner died before it could lock it
    unlocked.mkdir()
    age(unlocked)
    fresh = tmp_path / f"{PREFIX}{os.getuid()}-fresh"
    other = tmp_path / f"{PREFIX}{os.getuid() + 1}-other"
    for folder in (orphan, fresh, other):
        folder.mkdir()
        (folder / "lock").touch()
    age(orphan)
    age(other)
    with runtime_folder(1) as live:
        age(live)
        with runtime_folder(1):
            assert live.is_dir()
            assert fresh.is_dir()
            assert other.is_dir()
            assert not orphan.exists()
            assert not unlocked.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").touch()
    link = tmp_path / f"{PREFIX}{os.getuid()}-link"
    link.symlink_to(target)
    os.utime(link, (0, 0), follow_symlinks=False)
    with runtime_folder(1):
        assert (target / "file").exists()
