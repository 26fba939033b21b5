from __future__ import annotations

import stat
from pathlib import Path

import pytest

from peer.machine.atomic_file import write_whole


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for content in (b"old and longer", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_its_owners_alone_even_after_a_crash_left_a_public_one(tmp_path: Path) -> None:
    path = tmp_path / "invite"
    (tmp_path / "invite.new").write_text("left by a crash")
    (tmp_path / "invite.new").chmod(0o644)
    write_whole(path, b"secret", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"secret"


def test_the_old_file_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    (tmp_path / "state.new").mkdir()
    with pytest.raises(OSError):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
