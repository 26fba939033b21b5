from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.peer.machine.home import Home, write_whole
from gossamer.protocol.errors import BadSettings

HOLD = """
import sys
from pathlib import Path
from gossamer.peer.machine.home import Home
with Home(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_new_home_is_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "a" / "b")
    home.create()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    home.create()
    assert [path.name for path in home.path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_home_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(BadSettings, match="other users may enter the home") as caught:
        Home(tmp_path).create()
    assert f"chmod 700 {tmp_path}" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(BadSettings, match="belongs to another user"):
        Home(tmp_path).create()


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    home = Home(tmp_path / "home")
    home.create()
    (home.path / "lock").symlink_to(elsewhere)
    with pytest.raises(BadSettings, match="cannot be opened"), home.locked():
        raise AssertionError("locked")
    assert elsewhere.read_text() == "mine"


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is mounted on many clusters."""

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    (home := Home(tmp_path)).create()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BadSettings, match="cannot be opened and locked: Function not"), home.locked():
        pass


def test_a_file_is_no_home(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(BadSettings, match=r"not a folder|Not a directory") as caught:
        Home(path).create()
    assert "--home" in caught.value.hint
    assert path.read_text() == "mine"


def test_an_unwritable_home_is_refused() -> None:
    with pytest.raises(BadSettings, match="cannot be written to") as caught:
        Home(Path("/proc/gossamer-home")).create()
    assert "--home" in caught.value.hint


def test_the_same_home_cannot_run_twice(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.locked():
        with pytest.raises(BadSettings, match=f"process {os.getpid()}") as caught, Home(tmp_path).locked():
            raise AssertionError("locked twice")
        assert "leave" in caught.value.hint
    with home.locked():
        pass


def test_the_lock_goes_with_a_killed_holder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BadSettings, match=f"process {holder.pid}"), Home(tmp_path).locked():
            raise AssertionError("locked twice")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with Home(tmp_path).locked():
        pass


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for content in (b"old and longer", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("no_umask")
def test_a_file_is_its_owners_alone_even_after_a_crash_left_a_public_one(tmp_path: Path) -> None:
    path = tmp_path / "invite"
    (tmp_path / ".invite.new").write_text("left by a crash")
    (tmp_path / ".invite.new").chmod(0o644)
    write_whole(path, b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"secret"


def test_no_other_file_of_the_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "run.new").write_text("the operator's own")
    write_whole(tmp_path / "run.txt", b"an invite")
    assert (tmp_path / "run.new").read_text() == "the operator's own"


def test_files_that_an_earlier_release_left_readable_become_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    for file in (home.events, home.log, home.status, home.peers):
        file.write_text("{}")
        file.chmod(0o644)
    home.create()
    assert {stat.S_IMODE(file.stat().st_mode) for file in (home.events, home.log, home.status, home.peers)} == {0o600}


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "config.toml", list[tuple[bytes, bytes]]()
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: found.append((Path(f"/proc/self/fd/{fd}").read_bytes(), path.read_bytes())))
    write_whole(path, b"new")
    assert found == [(b"new", b"old")] and path.read_bytes() == b"new"


def test_the_old_file_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    (tmp_path / ".state.json.new").mkdir()
    with pytest.raises(OSError):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
