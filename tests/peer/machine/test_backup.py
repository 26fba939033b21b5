"""Backups: what comes back is what was there, any age program opens one, and a bad one leaves no home behind."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import pyrage
import pytest
import torch

from gossamer.peer.machine import backup
from gossamer.peer.machine.home import Home
from gossamer.peer.model import checkpoint
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import MOST_GENERATIONS

ME = Identity(b"m" * 32).peer_id
PASSPHRASE = "correct horse battery"
KEPT = {
    "identity.key": b"a key",
    "config.toml": b'max_upload = "5 Mbit/s"\n',
    "invites.json": b"{}",
    "members.json": b"{}",
    "revocations": b"of members",
    "journal": bytes(range(256)),
    "stage": b"2\n",
    "stage-left": b"1\n",
    "filled": b"a run\n",
    "tokenizer/tokenizer.json": b"{}",
}


def make_home(path: Path) -> Home:
    home = Home(path)
    home.create()
    for name, content in KEPT.items():
        (home.path / name).parent.mkdir(exist_ok=True)
        (home.path / name).write_bytes(content)
    for step in (3, 7):
        checkpoint.save(home.checkpoints, checkpoint.CheckpointContents(b"r" * 32, step, {"w": torch.full((5,), float(step))}, {}))
    home.downloads.mkdir()
    (home.downloads / "state").write_bytes(b"half of it")
    (home.path / "base").symlink_to("/")
    return home


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup. Its passphrase takes seconds to check, by design: this is for all tests."""
    folder = tmp_path_factory.mktemp("backup")
    assert backup.write(make_home(folder / "home"), ME, folder / "peer.backup", PASSPHRASE) == (folder / "peer.backup").stat().st_size
    return folder / "peer.backup"


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write and open the keys of these tests at once: they are not encrypted."""
    monkeypatch.setattr(pyrage.passphrase, "encrypt", lambda key, _: key)
    monkeypatch.setattr(backup, "_secret_key", lambda key, _: key.decode())


def packed(path: Path, files: dict[str, bytes], link: str = "", hole_bytes: int = 0) -> Path:
    """Write a backup of any contents. `hole_bytes`: with a file of so many bytes that takes a few in the archive."""
    key, tar_file, encrypted = pyrage.x25519.Identity.generate(), io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar_file, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        if link:
            entry = tarfile.TarInfo("identity.key")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            tar.addfile(entry)
        if hole_bytes:
            entry = tarfile.TarInfo("events.jsonl")
            entry.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(hole_bytes)}
            tar.addfile(entry)
    pyrage.encrypt_io(io.BytesIO(tar_file.getvalue()), encrypted, [key.to_public()])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(backup.KEY, str(key))
        archive.writestr(backup.CONTENTS, encrypted.getvalue())
    return path


def about(number: int = backup.FORMAT, generation: int = 0) -> bytes:
    return json.dumps({"format": number, "version": "9.1.0", "peer_id": str(ME), "generation": generation, "saved_s": 1}).encode()


def test_a_restored_home_has_what_was_kept_and_the_next_generation(made: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "new" / "home")
    before = backup.next_generation(0, time.time())
    read = backup.read(made, home, PASSPHRASE)
    assert read.peer_id == str(ME) and read.generation == home.read_generation()
    assert {name: (home.path / name).read_bytes() for name in KEPT} == KEPT
    loaded = checkpoint.load_latest(home.checkpoints, b"r" * 32)
    assert loaded is not None and loaded.contents.step == 7 and torch.equal(loaded.contents.tensors["w"], torch.full((5,), 7.0))
    assert read.dropped == {}
    assert 1 < before <= home.read_generation() <= backup.next_generation(0, time.time())
    assert not home.downloads.exists() and not (home.path / "base").exists()
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in home.path.rglob("*") if path.is_file())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["home"]


def test_a_home_on_a_disk_of_its_own_stays_there(made: Path, tmp_path: Path) -> None:
    """As a container's volume, or a link to another disk: it can be neither removed nor replaced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        Path(disk).chmod(0o755)
        home, before = Home(tmp_path / "home"), Path(disk).stat().st_ino
        home.path.symlink_to(disk)
        backup.read(made, home, PASSPHRASE)
        assert {name: (home.path / name).read_bytes() for name in KEPT} == KEPT
        assert not [path for path in home.path.iterdir() if path.name.startswith(".")]
        assert home.path.is_symlink() and Path(disk).stat().st_ino == before and stat.S_IMODE(home.path.stat().st_mode) == 0o700


def test_backup_and_home_are_on_the_disk_before_they_are_there(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = set[int](), os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    backup.read(made, Home(tmp_path / "home"), PASSPHRASE)
    backup.write(Home(tmp_path / "home"), ME, tmp_path / "again", PASSPHRASE)
    needed = {tmp_path, tmp_path / "again", *((tmp_path / "home" / name) for name in KEPT)}
    assert synced >= {path.stat().st_ino for path in needed}


def test_a_later_restore_has_the_higher_generation_whatever_its_backup_is() -> None:
    now_s = backup.FIRST_HOUR_S + 9000 * 3600.0
    of_new = backup.next_generation(8999, now_s)
    of_old = backup.next_generation(0, now_s + 3600)
    again = backup.next_generation(0, now_s + 7200)
    assert 8999 < of_new < of_old < again
    assert backup.next_generation(of_new, now_s) == of_new + 1, "a backup of this hour"
    assert backup.next_generation(3, 0.0) == 4, "a clock that starts at zero"
    assert backup.next_generation(0, now_s + 7 * 365 * 86400) > MOST_GENERATIONS > backup.next_generation(0, now_s + 6 * 365 * 86400)


def test_age_alone_opens_a_backup(made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        assert archive.namelist() == ["key.age", "home.tar.age"]
        assert all(archive.read(name).startswith(b"age-encryption.org/v1\n") for name in archive.namelist())
        assert not any(content in made.read_bytes() for content in KEPT.values() if len(content) > 4)


@pytest.mark.usefixtures("instant")
def test_a_backup_is_its_owners_alone_and_replaces_no_file(made: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(BadSettings, match="exists"):
        backup.write(make_home(tmp_path / "home"), ME, taken, PASSPHRASE)
    assert taken.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["home", "taken"]


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_disk_without_links_holds_a_backup_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    home, file = make_home(tmp_path / "home"), tmp_path / "peer.backup"
    assert backup.write(home, ME, file, PASSPHRASE) == file.stat().st_size > 0
    content = file.read_bytes()
    with pytest.raises(BadSettings, match="exists"):
        backup.write(home, ME, file, PASSPHRASE)
    assert file.read_bytes() == content and sorted(path.name for path in tmp_path.iterdir()) == ["home", "peer.backup"]


def test_another_passphrase_opens_nothing(made: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="passphrase does not open"):
        backup.read(made, Home(tmp_path / "home"), "incorrect horse")
    assert not list(tmp_path.iterdir())


def test_a_backup_of_a_much_faster_machine_is_not_a_wrong_passphrase(made: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with zipfile.ZipFile(made) as archive:
        key, contents = archive.read(backup.KEY), archive.read(backup.CONTENTS)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(backup.KEY, re.sub(rb"(-> scrypt [^ ]+) [0-9]+", rb"\1 34", key, count=1))
        archive.writestr(backup.CONTENTS, contents)
    with pytest.raises(BadSettings, match="too slow, or too busy now"):
        backup.read(file, Home(tmp_path / "home"), PASSPHRASE)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_home_in_use_is_left_alone(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(BadSettings, match="is not empty"):
            backup.read(made, Home(path), PASSPHRASE)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize(
    ("files", "link", "words"),
    [
        ({}, "", "does not say what it is"),
        ({"identity.key": b"k"}, "", "does not say what it is"),
        ({"backup.json": b"[]"}, "", "no whole backup"),
        ({"backup.json": b"{}"}, "", "no whole backup"),
        ({"backup.json": about(2)}, "", r"format 2, of Gossamer 9\.1\.0; this is Gossamer"),
        ({"backup.json": about(), "lock": b""}, "", "no part of a home"),
        ({"backup.json": about(), "../other": b""}, "", "no part of a home"),
        ({"backup.json": about(), "checkpoints/../../other": b""}, "", "no part of a home"),
        ({"backup.json": about(), "/etc/other": b""}, "", "no part of a home"),
        ({"backup.json": about()}, "/etc/passwd", "no part of a home"),
        ({"backup.json": about(generation=MOST_GENERATIONS)}, "", "generation 65536 of the home is beyond 65535"),
        ({"backup.json": about(), "config.toml": b"later = 1"}, "", r"backup's settings cannot be read: .*later"),
        ({"backup.json": about(), "events.jsonl": bytes(1 << 22), "other": b""}, "", "no part of a home"),
    ],
)
def test_a_bad_backup_leaves_no_home(tmp_path: Path, files: dict[str, bytes], link: str, words: str) -> None:
    file = packed(tmp_path / "bad.backup", files, link)
    with pytest.raises(BadSettings, match=words):
        backup.read(file, Home(tmp_path / "home"), PASSPHRASE)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.backup"]


@pytest.mark.usefixtures("instant")
def test_a_small_backup_of_a_huge_file_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    monkeypatch.setattr(shutil, "copyfileobj", lambda *files: written.append(files))
    file = packed(tmp_path / "file", {"backup.json": about()}, hole_bytes=1 << 50)
    with pytest.raises(BadSettings, match="no part of a home"):
        backup.read(file, Home(tmp_path / "home"), PASSPHRASE)
    assert not written and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("instant")
def test_a_backup_for_which_the_disk_has_no_room_fills_it_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = packed(tmp_path / "file", {"backup.json": about(), "events.jsonl": bytes(300_000)})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300_000))
    monkeypatch.setattr(backup, "_unpack", None)
    with pytest.raises(BadSettings, match="No space left"):
        backup.read(file, Home(tmp_path / "home"), PASSPHRASE)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("instant")
def test_a_cut_or_changed_backup_leaves_no_home(tmp_path: Path) -> None:
    whole = packed(tmp_path / "whole", {"backup.json": about(), "events.jsonl": bytes(300_000)}).read_bytes()
    with zipfile.ZipFile(tmp_path / "whole") as archive:
        at = archive.getinfo(backup.CONTENTS).header_offset + 200_000
    for spoiled in (b"", b"junk", whole[:-1000], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
        (tmp_path / "whole").write_bytes(spoiled)
        words = "no whole backup" if len(spoiled) == len(whole) else "no whole backup of a peer: it is another file, or its end is missing"
        with pytest.raises(BadSettings, match=words):
            backup.read(tmp_path / "whole", Home(tmp_path / "home"), PASSPHRASE)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.usefixtures("instant")
def test_a_zip_that_was_made_to_do_harm_leaves_no_home(tmp_path: Path) -> None:
    file = packed(tmp_path / "file", {"backup.json": about()})
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        directory = archive.start_dir
        contents = archive.read(backup.CONTENTS)
    needed, flags, method, first = (directory + at for at in (6, 8, 10, 42))  # in the zip's entry for the key
    spoiled = [
        whole[:at] + bytes([value]) + whole[at + 1 :] for at, value in ((needed, 99), (flags, 1), (flags, 32), (method, 77), (method, 8))
    ]
    spoiled.append(whole[:first] + b"\xff\xff\xff\x7f" + whole[first + 4 :])
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(backup.KEY, bytes(1 << 20))
        archive.writestr(backup.CONTENTS, contents, zipfile.ZIP_STORED)
    long = io.BytesIO()
    with zipfile.ZipFile(long, "w") as archive:
        archive.writestr(backup.KEY, bytes(backup.MOST_KEY_BYTES + 1))
        archive.writestr(backup.CONTENTS, contents)
    for number, content in enumerate((*spoiled, bomb.getvalue(), long.getvalue())):
        file.write_bytes(content)
        with pytest.raises(BadSettings, match="no whole backup" if number < len(spoiled) else "zip|at most 65536"):
            backup.read(file, Home(tmp_path / "home"), PASSPHRASE)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_generation_is_a_small_number(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    assert home.read_generation() == 0
    for text in ("-1", "x", "65536", ""):
        home.generation.write_text(text)
        with pytest.raises(BadSettings, match="does not hold a number"):
            home.read_generation()
