from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.peer.text.document import is_held_out
from gossamer.peer.text.documents import BLOCK_CHARACTERS, Block, read_texts, standard_library, text_files
from gossamer.protocol.errors import BadManifest, BadSettings


@pytest.fixture(scope="module")
def library() -> list[Block]:
    return list(standard_library())


def read(path: Path) -> list[Block]:
    return list(read_texts(text_files(path)))


def test_the_standard_library_is_enough_to_train_on(library: list[Block]) -> None:
    num_characters = sum(len(block.text) for block in library)
    assert num_characters > 3_000_000
    assert all(block.ends_document for block in library)


def test_a_fixed_twentieth_of_the_library_is_held_out(library: list[Block]) -> None:
    held_out = sum(len(block.text) for block in library if block.is_held_out)
    assert 0.02 < held_out / sum(len(block.text) for block in library) < 0.1
    assert list(standard_library()) == library
    assert is_held_out("os.py")
    assert not is_held_out("ast.py")


def test_nothing_that_a_program_wrote_is_in_it(library: list[Block]) -> None:
    assert not any("_sysconfigdata" in block.text[:200] or "codecs.make_identity_dict" in block.text[-300:] for block in library)


def test_a_folder_is_read_in_order_without_its_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/2.txt", "a.md", "c", ".hidden", ".git/config"):
        (tmp_path / name).write_text(f"text of {name}\n")
    os.mkfifo(tmp_path / "pipe")
    assert [block.text for block in read(tmp_path)] == ["text of a.md\n", "text of b/2.txt\n", "text of c\n"]


def test_a_file_comes_back_whole(tmp_path: Path) -> None:
    text = "".join(f"line {number}: \u20ac\u00e4\U0001f600\r\n" for number in range(20_000))
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    blocks = read(path)
    assert "".join(block.text for block in blocks) == text
    assert [block.ends_document for block in blocks] == [False] * (len(blocks) - 1) + [True]
    assert all(block.text.endswith("\n") for block in blocks)
    assert all(block.is_held_out == is_held_out(block.text) for block in blocks)
    assert 0 < sum(block.is_held_out for block in blocks) < len(blocks) / 4


def test_a_file_without_lines_comes_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("\u20ac" * 100_000)
    assert max(len(block.text) for block in read(path)) < 2 * BLOCK_CHARACTERS


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"text\0more", b"caf\xe9", b"\xff\xfe\0h", b"x" * 50_000 + b"\xc3"])
def test_a_file_that_is_not_text_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "picture.png").write_bytes(content)
    with pytest.raises(BadSettings, match=r"picture\.png is (not UTF-8 text|binary)") as caught:
        read(tmp_path)
    assert "take this file out" in caught.value.hint


@pytest.mark.parametrize("name", ["picture.png", "table.parquet", "rows.jsonl"])
def test_a_file_that_cannot_be_read_is_left_out_with_its_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "z.txt").write_text("two\n")
    (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    skipped: list[str] = []
    assert [block.text for block in read_texts(text_files(tmp_path), "text", skipped)] == ["one\n", "two\n"]
    [sentence] = skipped
    assert sentence.startswith(f"{tmp_path / name} ")


def test_a_late_byte_that_is_not_text_leaves_the_whole_file_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_bytes(b"line\n" * 1_000_000 + b"caf\xe9\n")
    skipped: list[str] = []
    assert [block.text for block in read_texts(text_files(tmp_path), "text", skipped)] == ["one\n"]
    assert "not UTF-8" in skipped[0]


def test_a_folder_in_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"\0")
    with pytest.raises(BadSettings, match=r"none of the 2 files .*/a\.png is binary"):
        read(tmp_path)


def test_a_table_without_the_column_is_no_stray_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.jsonl").write_text('{"body": "two"}\n')
    with pytest.raises(BadManifest, match="no text in a column 'text'"):
        read(tmp_path)


def test_nothing_to_read_is_explained(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="holds no files"):
        text_files(tmp_path)
    with pytest.raises(BadSettings, match="is not there"):
        text_files(tmp_path / "missing")
    with pytest.raises(BadSettings, match="neither a file nor a folder"):
        text_files(Path("/dev/zero"))
    (tmp_path / "empty").touch()
    assert read(tmp_path) == []


def test_a_file_that_vanishes_is_explained(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="cannot be read: No such file"):
        list(read_texts([tmp_path / "gone"]))


def test_a_file_that_changes_while_it_is_read_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"line\n" * 100_000)
    blocks = read_texts([path])
    next(blocks)
    path.write_bytes(b"caf\xe9\n" * 100_000)
    with pytest.raises(BadSettings, match="is not UTF-8 text"):
        list(blocks)


def test_a_mark_at_the_start_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfhello")
    assert [block.text for block in read(tmp_path)] == ["hello"]
