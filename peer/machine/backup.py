"""A backup: a peer's home in one file, which only its passphrase opens.

The file is a zip archive of two age files (age-encryption.org/v1), so that any age program can open it without this one:

- `key.age`: a secret key, encrypted with the passphrase (scrypt).
- `home.tar.age`: a tar of the home, encrypted for that key, in pieces: a large checkpoint is never held in memory.

The first file of the tar, `backup.json`, says what made it. `read` accepts only the names that `write` knows.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Self

from gossamer.peer.machine.config import COMMANDS, save_settings, saved_settings
from gossamer.peer.machine.home import Home, finished_checkpoints, private, sync_path
from gossamer.peer.machine.status import VERSION
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import PeerId

FORMAT: Final = 1
KEY: Final = "key.age"
CONTENTS: Final = "home.tar.age"
ABOUT: Final = "backup.json"
FILES: Final = (
    "identity.key", "generation", "manifest.bin", "invite.txt", "credential", "revocations", "invites.json", "members.json", "config.toml",
    "peers.json", "partners.json", "journal", "stage", "stage-left", "filled", "traffic.json", "events.jsonl", "status.json", "run.json",
    "port",
)  # fmt: skip
FOLDERS: Final = ("tokenizer", "checkpoints")
POWERS: Final = (*COMMANDS, "data")  # settings that run commands, or have files of this machine trained on, and so shared
MOST_ABOUT_BYTES: Final = 1 << 16
MOST_KEY_BYTES: Final = 1 << 16  # of the file with the key, which is read whole
TOO_MUCH_WORK: Final = "Excessive work"  # in pyrage's message: the only sign of this error
FIRST_HOUR_S: Final = 1_767_225_600  # 2026-01-01 in Unix seconds: generations count the hours since, which MOST_GENERATIONS ends in 2033
ZIP_ENCRYPTED: Final = 1  # flag of an entry
NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # FAT, exFAT and some network shares
UNREADABLE_ERRORS: Final = (  # of zipfile, tarfile and json, for a file that is damaged or made to do harm
    zipfile.BadZipFile, tarfile.TarError, KeyError, ValueError, EOFError, OverflowError, NotImplementedError, RecursionError,
)  # fmt: skip
UNREADABLE: Final = "take another backup; `peer backup FILE` writes one"


@dataclass(frozen=True, slots=True)
class About:
    """What a backup says of itself."""

    format: int
    version: str  # of the Gossamer that wrote it
    peer_id: str
    generation: int  # of the home when it was written
    saved_s: int  # Unix seconds

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse `backup.json`. Raises BadSettings for a backup of another format, ValueError for anything else."""
        found = json.loads(content)
        if not isinstance(found, dict) or not isinstance(number := found.get("format"), int):
            raise ValueError("no backup of a peer")
        if number != FORMAT:
            raise BadSettings(
                f"the backup has format {number}, of Gossamer {found.get('version')}; this is Gossamer {VERSION}, with format {FORMAT}",
                hint="install that version of Gossamer, or take the backup anew with this one",
            )
        about = cls(number, str(found["version"]), str(found["peer_id"]), int(found["generation"]), int(found["saved_s"]))
        PeerId.from_text(about.peer_id)
        return about


def need_new_file(file: Path) -> None:
    """Raise BadSettings if `write` cannot make this file."""
    if os.path.lexists(file):
        raise _taken(file)
    descriptor, name = _begun(file)
    os.close(descriptor)
    os.unlink(name)


def need_new_home(home: Home) -> None:
    """Raise BadSettings if `read` cannot restore into this home."""
    if home.path.exists() and (not home.path.is_dir() or any(home.path.iterdir())):
        raise BadSettings(f"the home {home.path} is not empty", hint="restore into a new folder with --home DIR")


def write(home: Home, me: PeerId, file: Path, passphrase: str) -> int:
    """Write a backup of a home, which a peer may be running from; return its size in bytes.

    The last checkpoint goes in, without downloads and caches. Raises BadSettings if the home or the disk refuses; then no file is left.
    """
    import pyrage  # an extra

    about = About(FORMAT, VERSION, str(me), home.read_generation(), int(time.time()))
    key = pyrage.x25519.Identity.generate()
    descriptor, name = _begun(file)
    beside = Path(name)
    try:
        with open(descriptor, "wb") as target, zipfile.ZipFile(target, "w") as archive:
            archive.writestr(KEY, pyrage.passphrase.encrypt(str(key).encode(), passphrase))
            with archive.open(CONTENTS, "w", force_zip64=True) as encrypted, _piped(lambda pipe: _pack(home, about, pipe)) as packed:
                pyrage.encrypt_io(packed, encrypted, [key.to_public()])
        sync_path(beside)
        _name(beside, file)
        with contextlib.suppress(OSError):  # some network shares sync no folder
            sync_path(file.parent)
        return file.stat().st_size
    except FileExistsError as error:
        raise _taken(file) from error
    except OSError as error:
        raise BadSettings(f"the backup {file} cannot be written: {error.strerror}", hint="name a file on a disk with more room") from error
    finally:
        beside.unlink(missing_ok=True)


def _begun(file: Path) -> tuple[int, str]:
    """Make a file beside another one, readable by its owner alone; return its descriptor and path. Raises BadSettings."""
    try:
        return tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise BadSettings(f"{file.parent} cannot be written to: {error.strerror}", hint="name a file in another folder") from error


def _taken(file: Path) -> BadSettings:
    return BadSettings(f"{file} exists", hint="name a new file: a backup is not written over another file")


def _name(beside: Path, file: Path) -> None:
    """Give a file its name. Raises FileExistsError rather than replace another file, OSError when the disk refuses."""
    try:
        os.link(beside, file)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        open(file, "xb").close()  # reserves the name
        try:
            beside.replace(file)
        except OSError:
            file.unlink()
            raise


def next_generation(generation: int, now_s: float) -> int:
    """Return the generation of a home that is restored at `now_s` (Unix time) from a backup of this `generation`.

    Of two restores the later one has the higher generation, whatever their backups are, unless both are in the same hour.
    """
    return max(generation + 1, int(now_s - FIRST_HOUR_S) // 3600)


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of a backup."""

    peer_id: str
    generation: int  # of the new home
    dropped: dict[str, str]  # settings of the backup that the new home lacks


def read(file: Path, home: Home, passphrase: str) -> Restored:
    """Restore a backup into a home, which must not exist, or be an empty folder, such as a volume. The home gets the `next_generation`.

    The settings that run commands, and the one that names the text to train on, stay out: a stranger may have written the backup.
    Raises BadSettings; then there is no home.
    """
    import pyrage

    need_new_home(home)
    is_there = home.path.exists()
    try:
        place = home.path if is_there else home.path.parent  # a folder that is there may be on a disk of its own
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".restored-", dir=place) as made:
            restored = Home(Path(made) / "home")
            restored.create()
            with zipfile.ZipFile(file) as archive, archive.open(contents := _stored(archive, CONTENTS)) as encrypted:
                if contents.file_size > shutil.disk_usage(made).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(home.path.parent))
                key = pyrage.x25519.Identity.from_str(_secret_key(archive.read(_stored(archive, KEY, MOST_KEY_BYTES)), passphrase))
                about = _decrypt(encrypted, key, restored)
            generation = next_generation(about.generation, time.time())
            restored.write_generation(generation)
            dropped = _drop_powers(restored, about)
            if is_there:
                home.path.chmod(0o700)
                for path in sorted(restored.path.iterdir(), key=restored.identity.__eq__):  # the key last: it makes the home a peer's
                    path.rename(home.path / path.name)
            else:
                restored.path.rename(home.path)
            sync_path(place)
            return Restored(about.peer_id, generation, dropped)
    except (*UNREADABLE_ERRORS, pyrage.DecryptError, pyrage.IdentityError) as error:
        why = error if zipfile.is_zipfile(file) else "it is another file, or its end is missing"
        raise BadSettings(f"{file} is no whole backup of a peer: {why}", hint=UNREADABLE) from error
    except OSError as error:
        raise BadSettings(
            f"{error.filename or file}: {error.strerror}", hint="name a backup that you can read, and a home with room"
        ) from error


def _drop_powers(restored: Home, about: About) -> dict[str, str]:
    """Remove the settings that act on this machine, and return them. Raises BadSettings for settings that this release cannot read."""
    try:
        settings = saved_settings(restored)
    except BadSettings as error:
        raise BadSettings(f"the backup's settings cannot be read: {error}", hint=f"restore it with Gossamer {about.version}") from error
    dropped: dict[str, str] = {key: str(settings.pop(key)) for key in POWERS if key in settings}
    if dropped:
        save_settings(restored, settings)
    return dropped


def _stored(archive: zipfile.ZipFile, name: str, most_bytes: int | None = None) -> zipfile.ZipInfo:
    """Return an entry of a backup, which zip neither compresses nor encrypts. Raises ValueError for another one, KeyError for none."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & ZIP_ENCRYPTED:
        raise ValueError(f"{name} is compressed or encrypted by zip")
    if most_bytes is not None and entry.file_size > most_bytes:
        raise ValueError(f"{name} has {entry.file_size} bytes; at most {most_bytes} are read")
    return entry


def _secret_key(encrypted: bytes, passphrase: str) -> str:
    import pyrage

    try:
        return str(pyrage.passphrase.decrypt(encrypted, passphrase), "ascii")
    except pyrage.DecryptError as error:
        if TOO_MUCH_WORK in str(error):  # the writer's machine chose the work for its own speed, and age bounds it by the speed of this one
            raise BadSettings(
                "this machine is too slow, or too busy now, to open the backup with a passphrase",
                hint="end other programs and try again, or restore it on a machine as fast as the one that wrote it",
            ) from error
        raise BadSettings("the passphrase does not open this backup", hint="give the passphrase that it was written with") from error


@contextlib.contextmanager
def _piped(write_all: Callable[[IO[bytes]], None]) -> Iterator[IO[bytes]]:
    """Yield a file that reads what `write_all` writes in a thread. Raises what that raised, once the body is done."""
    failures: list[BaseException] = []
    end, start = os.pipe()

    def run() -> None:
        try:
            with open(start, "wb") as pipe:
                write_all(pipe)
        except BaseException as error:  # the body's thread raises it
            failures.append(error)

    writer = threading.Thread(target=run, name="backup")
    writer.start()
    try:
        with open(end, "rb") as pipe:
            yield pipe
    finally:
        writer.join()
    if failures:
        raise failures[0]


def _pack(home: Home, about: About, pipe: IO[bytes]) -> None:
    with tarfile.open(fileobj=pipe, mode="w|") as tar:
        content = json.dumps(asdict(about)).encode()
        tar.addfile(_entry(ABOUT, len(content)), io.BytesIO(content))
        with contextlib.ExitStack() as stack:
            rest = [*sorted(home.tokenizer.rglob("*")), *(home.path / name for name in FILES)]
            for path, file in itertools.chain(_newest_checkpoint(home, stack), _present(rest)):
                tar.addfile(_entry(path.relative_to(home.path).as_posix(), os.fstat(file.fileno()).st_size), file)


def _newest_checkpoint(home: Home, stack: contextlib.ExitStack) -> list[tuple[Path, IO[bytes]]]:
    """Open the files of the newest checkpoint, all at once: a peer that runs may replace it while they are read."""
    while newest := next(iter(finished_checkpoints(home.checkpoints).values()), None):
        with contextlib.suppress(FileNotFoundError):
            return [(path, stack.enter_context(open(path, "rb"))) for path in sorted(newest.iterdir())]
    return []


def _present(paths: Iterable[Path]) -> Iterator[tuple[Path, IO[bytes]]]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), open(path, "rb") as file:
            yield path, file


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, int(time.time())
    return entry


def _decrypt(encrypted: IO[bytes], key: Any, restored: Home) -> About:
    import pyrage

    with _piped(lambda pipe: pyrage.decrypt_io(encrypted, pipe, [key])) as packed:
        try:
            return _unpack(packed, restored)
        finally:
            while packed.read(1 << 20):  # a rejected archive: the writing thread ends only when all is read
                pass


def _unpack(packed: IO[bytes], restored: Home) -> About:
    """Write the files of a tar into a new home, no more bytes than the tar has. Raises ValueError for one that no backup holds."""
    with tarfile.open(fileobj=packed, mode="r|") as tar:
        first = tar.next()
        if first is None or first.name != ABOUT or first.size > MOST_ABOUT_BYTES or (content := tar.extractfile(first)) is None:
            raise ValueError("it does not say what it is")
        about = About.from_json(content.read())
        for entry in iter(tar.next, None):
            path = PurePosixPath(entry.name)
            is_known = path.parts[0] in FOLDERS if len(path.parts) > 1 else entry.name in FILES
            if not (entry.isreg() and is_known) or entry.issparse() or ".." in path.parts or (file := tar.extractfile(entry)) is None:
                raise ValueError(f"it holds {entry.name!r}, which is no part of a home")
            target = restored.path / path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(target, "xb", opener=private) as written:
                shutil.copyfileobj(file, written)
            sync_path(target)
        return about
