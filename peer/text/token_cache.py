"""Tokenized text, in memory or cached on disk; an entry appears atomically and may be deleted, and at most one text is kept."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gossamer.peer.machine.home import sync_path
from gossamer.peer.text.documents import Block, file_status
from gossamer.peer.text.tokenizer import Encoder
from gossamer.protocol.errors import BadSettings

PREFIX = "tokens-"
BLOCKS = 64  # tokenized at once
SIDES = ("train", "held_out")
SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized text: its training and held-out sides, and the mean length of its tokens."""

    train: npt.NDArray[Any]  # [num_tokens] of the tokenizer's dtype; not to be written to
    held_out: npt.NDArray[Any]
    bytes_per_token: float  # UTF-8 bytes of text per token, over both sides
    num_bytes: int = 0  # of a text on disk
    skipped: tuple[str, ...] = ()  # sentences about its files that were left out


ShowBytes = Callable[[int], None]  # called with the bytes tokenized so far


def in_memory(blocks: Iterable[Block], tokenizer: Encoder) -> Tokens:
    """Tokenize a text that fits in memory."""
    sinks = io.BytesIO(), io.BytesIO()
    num_bytes = _tokenize(blocks, tokenizer, sinks, lambda num_bytes: None)
    train, held_out = (np.frombuffer(sink.getbuffer(), dtype=tokenizer.dtype) for sink in sinks)
    return Tokens(train, held_out, num_bytes / max(1, len(train) + len(held_out)))


def on_disk(
    files: list[Path],
    blocks: Iterable[Block],
    tokenizer: Encoder,
    cache: Path,
    show: ShowBytes = lambda num_bytes: None,
    column: str = "text",
    skipped: list[str] | None = None,
) -> Tokens:
    """Tokenize a text into `cache`, unless it is there, and map it. Raises BadSettings when the disk is full or a file is gone.

    `skipped`: to which `blocks` adds sentences about files that it leaves out; they are kept with the tokens.
    """
    folder = cache / _fingerprint(files, tokenizer, column)
    if not folder.is_dir():
        try:
            _fill(folder, blocks, tokenizer, show, [] if skipped is None else skipped)
        except OSError as error:
            hint = "free some space, or train on less text"
            raise BadSettings(f"the text cannot be tokenized into {cache}: {error.strerror}", hint=hint) from error
    paths, dtype = [folder / side for side in SIDES], tokenizer.dtype  # an empty file cannot be mapped
    train, held_out = (np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype) for path in paths)
    num_bytes = int((folder / "num_bytes").read_text())
    left_out = tuple((folder / SKIPPED).read_text().splitlines()) if (folder / SKIPPED).exists() else ()
    return Tokens(train, held_out, num_bytes / max(1, len(train) + len(held_out)), num_bytes, left_out)


def _fill(folder: Path, blocks: Iterable[Block], tokenizer: Encoder, show: ShowBytes, skipped: list[str]) -> None:
    for earlier in folder.parent.glob(f"{PREFIX}*"):  # an earlier text, or an interrupted one
        shutil.rmtree(earlier, ignore_errors=True)
    unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished.mkdir(mode=0o700)
    try:
        with (unfinished / SIDES[0]).open("wb") as train, (unfinished / SIDES[1]).open("wb") as held_out:
            num_bytes = _tokenize(blocks, tokenizer, (train, held_out), show)
        (unfinished / "num_bytes").write_text(str(num_bytes))
        if skipped:
            (unfinished / SKIPPED).write_text("\n".join(" ".join(line.splitlines()) for line in skipped), errors="backslashreplace")
        for path in unfinished.iterdir():
            sync_path(path)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tokenize(blocks: Iterable[Block], tokenizer: Encoder, sinks: tuple[IO[bytes], IO[bytes]], show: ShowBytes) -> int:
    """Write each block's tokens to its side, and return the size of the text in bytes."""
    num_bytes, reading = 0, iter(blocks)
    while some := list(itertools.islice(reading, BLOCKS)):
        for block, tokens in zip(some, tokenizer.encode_all([block.text for block in some]), strict=True):
            whole = tokenizer.with_document_end(tokens) if block.ends_document else tokens
            sinks[block.is_held_out].write(whole.tobytes())
            num_bytes += tokenizer.num_text_bytes(block.text) + len(whole) - len(tokens)
        show(num_bytes)
    return num_bytes


def _fingerprint(files: list[Path], tokenizer: Encoder, column: str) -> str:
    digest = hashlib.sha256(f"{tokenizer.name}\0{tokenizer.digest}\0{column}".encode())
    for file in files:
        stat = file_status(file)
        digest.update(f"\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return PREFIX + digest.hexdigest()[:32]
