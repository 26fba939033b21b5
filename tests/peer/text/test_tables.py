"""Local tables: what is read of them, and that a hostile one ends in a declared error within bounded memory and time."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gossamer.peer.text.document import Document
from gossamer.peer.text.tables import table_documents
from gossamer.protocol.errors import BadManifest, BadSettings
from tests.mutations import mutated_bytes

NUM_MUTATIONS = 150
MEMORY_BYTES = 3 << 30  # of addresses; the programs themselves take half
READ = """
import resource, sys
from itertools import islice
from pathlib import Path
from gossamer.peer.text import tables
from gossamer.protocol.errors import GossamerError
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
try:
    column = ["text"] if sys.argv[4] == "table_documents" else []
    print(sum(1 for _ in islice(getattr(tables, sys.argv[4])(Path(sys.argv[1]), sys.argv[2], *column), 20)))
except GossamerError as error:
    print(type(error).__name__, error)
"""


def documents(file: Path, kind: str, column: str = "text") -> list[Any]:
    found: list[Document] = list(table_documents(file, kind, column))
    return [document if isinstance(document, str) else document.tolist() for document in found]


def read_within_bounds(file: Path, kind: str, reader: str = "table_documents") -> str:
    """Read the start of a table in a process with little memory; return what it says."""
    command = [sys.executable, "-P", "-c", READ, str(file), kind, str(MEMORY_BYTES), reader]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return tmp_path / "x.jsonl"


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_text_and_tokens_are_read_line_by_line(ending: str, tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": None}, {"other": 1}, {"text": [1, 2]}, {"text": "caf\u00e9"}]
    content = "\n\n".join(map(json.dumps, rows)).encode()
    file = tmp_path / f"x.{ending}"
    with pyarrow.output_stream(str(file), compression="detect") as out:
        out.write(content)
    assert documents(file, "json") == ["one", "", "", [1, 2], "caf\u00e9"]


def test_a_first_row_without_text_says_nothing_of_the_column(jsonl: Path) -> None:
    jsonl.write_text('{"text": null, "n": 1}\n{"text": "two", "n": 2}\n')
    assert documents(jsonl, "json") == ["", "two"]
    with pytest.raises(BadManifest, match="no text in a column 'n'"):
        documents(jsonl, "json", "n")


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"compression": "zstd", "data_page_version": "2.0"}])
def test_text_and_tokens_of_parquet(options: dict[str, Any], tmp_path: Path) -> None:
    table = pyarrow.table(
        {"text": ["one", None, "two"], "large": pyarrow.array(["a", "b", "c"], pyarrow.large_string()), "ids": [[1], [], [2, 3]]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2, **options)
    assert documents(tmp_path / "x.parquet", "parquet") == ["one", "", "two"]
    assert documents(tmp_path / "x.parquet", "parquet", "large") == ["a", "b", "c"]
    assert documents(tmp_path / "x.parquet", "parquet", "ids") == [[1], [], [2, 3]]
    with pytest.raises(BadManifest, match="no text in a column 'none'") as caught:
        documents(tmp_path / "x.parquet", "parquet", "none")
    assert "text, large, ids" in caught.value.hint


@pytest.mark.parametrize(
    "line",
    ["[1]", "5", "{", '{"text": "a"}{', '{"text": "\\ud800"}', '{"text": "a"}\n{"text": [1.5]}', '{"text": [9223372036854775808]}',
     '{"text": "a"}\n{"text": {}}', '{"text": ' + "9" * 5000 + "}", '{"text": "a", "z": ' + "[" * 100_000 + "]" * 100_000 + "}"],
    ids=lambda line: line[:24],
)  # fmt: skip
def test_a_line_that_is_no_row_of_text_is_an_error_of_the_file(line: str, jsonl: Path) -> None:
    jsonl.write_text(line)
    with pytest.raises(BadSettings, match="cannot be read") as caught:
        documents(jsonl, "json")
    assert caught.value.hint


def test_mutated_lines_end_in_a_declared_error_or_are_read(jsonl: Path) -> None:
    rng = random.Random(1)
    valid = "\n".join(json.dumps({"text": f"line {number} \u00e9", "ids": [number, 2]}) for number in range(20)).encode()
    for _ in range(NUM_MUTATIONS):
        jsonl.write_bytes(mutated_bytes(valid, rng))
        for column in ("text", "ids"):
            try:
                documents(jsonl, "json", column)
            except (BadSettings, BadManifest):
                continue


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "compression": "gzip"}, {"compression": "none"}])
def test_mutated_parquet_ends_in_a_declared_error_or_is_read(options: dict[str, Any], tmp_path: Path) -> None:
    rng, file = random.Random(2), tmp_path / "x.parquet"
    table = pyarrow.table({"text": [f"line {number}" for number in range(50)], "ids": [[number, 2] for number in range(50)]})
    pyarrow.parquet.write_table(table, file, row_group_size=20, **options)
    valid = file.read_bytes()
    for _ in range(NUM_MUTATIONS):
        file.write_bytes(mutated_bytes(valid, rng))
        for column in ("text", "ids"):
            try:
                documents(file, "parquet", column)
            except (BadSettings, BadManifest):
                continue


def test_a_small_file_with_gigabytes_of_text_stays_within_bounded_memory(tmp_path: Path) -> None:
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(5000, np.int32)), ["a" * (4 << 20)])
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 1 << 20
    assert read_within_bounds(tmp_path / "x.parquet", "parquet") == "20\n"


def test_a_small_file_with_gigabytes_of_conversations_stays_within_bounded_memory(tmp_path: Path) -> None:
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(5000, np.int32)), ["a" * (4 << 20)])
    message = pyarrow.StructArray.from_arrays([text], ["content"])
    column = pyarrow.ListArray.from_arrays(np.arange(5001, dtype=np.int32), message)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 1 << 20
    assert read_within_bounds(tmp_path / "x.parquet", "parquet", "table_rows") == "20\n"


def test_a_row_group_with_too_many_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.peer.text.tables.MAX_GROUP_VALUES", 1000)
    pyarrow.parquet.write_table(pyarrow.table({"text": [[0] * 2000]}), tmp_path / "x.parquet")
    with pytest.raises(BadSettings, match="too large"):
        documents(tmp_path / "x.parquet", "parquet")


def test_a_compressed_line_of_gigabytes_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.jsonl.gz", "wb", compresslevel=1) as out:
        out.write(b'{"text": "')
        for _ in range(200):
            out.write(b"a" * (1 << 20))
    assert "a line has more than 64 MB" in read_within_bounds(tmp_path / "x.jsonl.gz", "json")
