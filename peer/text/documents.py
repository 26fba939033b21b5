"""Local text, block by block: the interpreter's standard library, or the operator's folder or file.

Each block is marked as training or held-out by a hash that no peer chooses: of the file's name in the built-in corpus, of the block's
content in an operator's text. So text that two peers share is held out at both.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from gossamer.peer.machine.extras import need_extra
from gossamer.peer.text.document import Document, is_held_out
from gossamer.protocol.errors import BadSettings

if TYPE_CHECKING:
    from gossamer.protocol.run.sections import DataSection

T = TypeVar("T")

SCANNED_BYTES = 1 << 20  # at once, before a file is read
BLOCK_CHARACTERS = 16384  # a block extends to the end of its line, at most LINE_CHARACTERS more
LINE_CHARACTERS = 4096
GIVE_TEXT = "give --data a folder or file of UTF-8 text, or of parquet or jsonl"
# Endings of names, and the words of the datasets library.
TABLES = {".jsonl": "json", ".jsonl.gz": "json", ".jsonl.zst": "json", ".parquet": "parquet"}

# Of little value for training, or not on every machine: generated tables and texts, installed packages, tests.
SKIPPED_FOLDERS = frozenset({"encodings", "idle_test", "lib-dynload", "pydoc_data", "site-packages", "dist-packages", "test", "tests"})


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a document, or a whole document of tokens."""

    text: Document
    is_held_out: bool
    ends_document: bool


def standard_library() -> Iterator[Block]:
    """Yield the sources of the running interpreter's standard library, one file per block, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in sorted(_source_names(root)):
        try:
            text = (root / name).read_bytes().decode()
        except (OSError, UnicodeDecodeError):  # a dangling link of the distribution, or a sample of another encoding
            continue
        yield Block(text, is_held_out(name), ends_document=True)


def _source_names(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(("config-", "__"))]
        # _sysconfigdata: generated when the interpreter is built, different on every machine
        names = [name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        yield from ((Path(folder) / name).relative_to(root).as_posix() for name in names)


def text_files(path: Path) -> list[Path]:
    """Return the files of an operator's text, sorted, without hidden ones. Raises BadSettings if there is none."""
    if path.is_dir():
        files = sorted(_visible_files(path))
    elif path.is_file():
        files = [path]
    else:
        raise BadSettings(f"{path} is {'neither a file nor a folder' if path.exists() else 'not there'}", hint=GIVE_TEXT)
    if not files:
        raise BadSettings(f"the folder {path} holds no files", hint=GIVE_TEXT)
    return files


def file_status(file: Path) -> os.stat_result:
    """Return size and time of a file of an operator's text. Raises BadSettings if it cannot be read, such as one that is gone."""
    with _readable(file):
        return file.stat()


def _visible_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in files if not name.startswith(".") and (path := Path(folder) / name).is_file())


def read_texts(files: list[Path], column: str = "text", skipped: list[str] | None = None) -> Iterator[Block]:
    """Yield the blocks of text files, and the documents in a column of table files.

    A file that is not text or cannot be read is left out if there are others; a sentence about it is added to `skipped`. Raises BadSettings
    if none can be read, BadManifest for a table without the column.
    """
    yield from _of_readable(files, lambda file: _reading(file, column), skipped)


def read_conversations(files: list[Path], data: DataSection, skipped: list[str] | None = None) -> Iterator[Block]:
    """Yield the conversations of table files, JSON each (conversations.py).

    A file that is no table or cannot be read is left out, as in `read_texts`. Raises BadSettings if none can be read, or if one holds
    something else; BadManifest for one without the columns.
    """
    yield from _of_readable(files, lambda file: _reading_conversations(file, data), skipped)


def _of_readable(files: list[Path], read: Callable[[Path], Iterator[Block]], skipped: list[str] | None) -> Iterator[Block]:
    left_out = [] if skipped is None else skipped
    for file in files:
        try:
            blocks = read(file)
        except BadSettings as error:
            if len(files) == 1:
                raise
            left_out.append(str(error))
            continue
        yield from blocks
    if files and len(left_out) == len(files):
        raise BadSettings(f"none of the {len(files)} files of --data can be read; of the first: {left_out[0]}", hint=GIVE_TEXT)


def _reading(file: Path, column: str) -> Iterator[Block]:
    """Return the blocks of a file. Raises BadSettings, before the first block, for a file that is not text or cannot be read."""
    kind = _table_kind(file)
    if kind is not None:
        return _begun(_rows(file, kind, column))
    with _readable(file):
        _need_text(file)
    return _blocks(file)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn the errors of a file that is not text, or cannot be read, into BadSettings."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadSettings(f"{file} is not UTF-8 text ({error.reason})", hint=f"{GIVE_TEXT} only; take this file out") from error
    except OSError as error:
        raise BadSettings(f"{file} cannot be read: {error.strerror}", hint=GIVE_TEXT) from error


def _reading_conversations(file: Path, data: DataSection) -> Iterator[Block]:
    if (kind := _table_kind(file)) is None:
        raise BadSettings(f"{file} holds no conversations: it is neither parquet nor jsonl", hint="take this file out of --data")
    need_extra("text")
    from gossamer.peer.text.tables import table_rows  # pyarrow takes long to import

    return _conversations(file, data, _begun(table_rows(file, kind)))


def _conversations(file: Path, data: DataSection, rows: Iterator[dict[str, Any]]) -> Iterator[Block]:
    from gossamer.peer.text.conversations import conversation, need_columns

    for number, row in enumerate(rows):
        if not number:
            need_columns(str(file), data, row)
        try:
            text = conversation(data, row)
        except ValueError as error:
            raise BadSettings(f"{file}, row {number}: {error}", hint="correct this row, or take it out") from error
        if text:
            yield Block(text, is_held_out(text), ends_document=True)


def _begun(items: Iterator[T]) -> Iterator[T]:
    """Take the first item now, so that a file that cannot be read fails at once; return all items."""
    first = list(itertools.islice(items, 1))
    return itertools.chain(first, items)


def _need_text(file: Path) -> None:
    """Raise BadSettings for a binary file, UnicodeDecodeError for one that is not UTF-8 throughout, OSError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open("rb") as source:
        while part := source.read(SCANNED_BYTES):
            if b"\0" in part:
                raise BadSettings(f"{file} is binary, not text", hint=f"{GIVE_TEXT} only; take this file out")
            decoder.decode(part)
        decoder.decode(b"", final=True)


def _table_kind(file: Path) -> str | None:
    return next((kind for ending, kind in TABLES.items() if file.name.lower().endswith(ending)), None)


def _rows(file: Path, kind: str, column: str) -> Iterator[Block]:
    need_extra("text")
    from gossamer.peer.text.tables import table_documents  # pyarrow takes long to import

    for document in table_documents(file, kind, column):
        yield Block(document, is_held_out(document), ends_document=True)


def _blocks(file: Path) -> Iterator[Block]:
    with _readable(file), file.open(encoding="utf-8-sig", newline="") as source:  # line ends stay as they are
        text = _next_text(source)
        while text:
            following = _next_text(source)
            yield Block(text, is_held_out(text), ends_document=not following)
            text = following


def _next_text(source: TextIO) -> str:
    return source.read(BLOCK_CHARACTERS) + source.readline(LINE_CHARACTERS)


def _raise_unreadable(error: OSError) -> None:
    raise BadSettings(f"{error.filename} cannot be read: {error.strerror}", hint=GIVE_TEXT) from error
