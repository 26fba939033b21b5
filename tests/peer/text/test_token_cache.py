from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gossamer.peer.text.documents import Block, read_texts
from gossamer.peer.text.token_cache import in_memory, on_disk
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.sections import TokenizerSection
from tests.full_disk import room_for

BYTES = load_tokenizer(TokenizerSection())
BLOCKS = [Block("one", False, False), Block("two", False, True), Block("held", True, True), Block("\u20ac", False, True)]


def write(path: Path, text: str) -> list[Path]:
    path.write_text(text)
    return [path]


def test_each_block_goes_to_its_side() -> None:
    tokens = in_memory(BLOCKS, BYTES)
    assert tokens.train.tobytes() == b"onetwo\0" + "\u20ac".encode() + b"\0"
    assert tokens.held_out.tobytes() == b"held\0"
    assert tokens.bytes_per_token == 1.0


def test_disk_and_memory_hold_the_same(tmp_path: Path) -> None:
    files = write(tmp_path / "text", "some words\n" * 10_000)
    mapped = on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    resident = in_memory(read_texts(files), BYTES)
    assert isinstance(mapped.train, np.memmap)
    assert np.array_equal(mapped.train, resident.train)
    assert np.array_equal(mapped.held_out, resident.held_out)
    assert mapped.bytes_per_token == resident.bytes_per_token


def test_a_text_is_tokenized_once(tmp_path: Path) -> None:
    files = write(tmp_path / "text", "some words\n" * 10)
    first = on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    again = on_disk(files, iter([]), BYTES, tmp_path / "cache")
    assert np.array_equal(first.train, again.train)


def test_a_changed_text_is_tokenized_again_and_the_old_entry_is_removed(tmp_path: Path) -> None:
    files = write(tmp_path / "text", "old\n")
    on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    (tmp_path / "cache" / "mine").touch()
    files = write(tmp_path / "text", "newer\n")
    tokens = on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    assert tokens.train.tobytes() + tokens.held_out.tobytes() == b"newer\n\0"
    assert len(list((tmp_path / "cache").glob("tokens-*"))) == 1
    assert (tmp_path / "cache" / "mine").exists()


def test_no_text_gives_no_tokens(tmp_path: Path) -> None:
    files = write(tmp_path / "text", "")
    tokens = on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    assert len(tokens.train) == len(tokens.held_out) == 0


def test_a_text_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"good\n" * 10_000 + b"\0")
    files = [tmp_path / "binary"]
    with pytest.raises(BadSettings, match="binary"):
        on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    files = write(tmp_path / "text", "some words\n" * 20_000)
    with room_for(50_000), pytest.raises(BadSettings, match="cannot be tokenized") as caught:
        on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    assert "free some space" in caught.value.hint
    assert not list((tmp_path / "cache").iterdir())


def test_tokens_are_on_the_disk_before_they_can_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, synced, sync = write(tmp_path / "text", "some words\n" * 10), set[str](), os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        assert not any("-" not in found.name.removeprefix("tokens-") for found in (tmp_path / "cache").iterdir())
        synced.add(Path(f"/proc/self/fd/{descriptor}").resolve().name)

    monkeypatch.setattr(os, "fsync", noted)
    on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
    [entry] = (tmp_path / "cache").iterdir()
    assert synced >= {path.name for path in entry.iterdir()}


def test_a_file_that_is_gone_before_it_is_read_is_named(tmp_path: Path) -> None:
    files = write(tmp_path / "text", "some words\n")
    files[0].unlink()
    with pytest.raises(BadSettings, match=r"cannot be read: No such file"):
        on_disk(files, read_texts(files), BYTES, tmp_path / "cache")
