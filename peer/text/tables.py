"""Documents in a column of a local file: parquet, or one JSON object per line. Whatever the file holds, memory stays bounded.

A file of kilobytes can describe gigabytes. So a text that parquet holds once stays in memory once, and a line of JSON has a largest size.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow
import pyarrow.parquet

from gossamer.peer.text.document import Document
from gossamer.protocol.errors import BadManifest, BadSettings, GossamerError

ROWS: Final = 1000  # of a parquet file, decoded at once
MAX_LINE_BYTES: Final = 1 << 26  # of JSON, parsed to about four times as much
MAX_GROUP_VALUES: Final = 1 << 26  # tokens in a row group: 512 MiB
MAX_GROUP_BYTES: Final = 1 << 30  # in a row group, uncompressed


def table_documents(file: Path, kind: str, column: str) -> Iterator[Document]:
    """Yield the documents of a local file, `json` (one object per line) or `parquet`.

    Raises BadSettings for a file that is not such a table, BadManifest if it has no such column of text.
    """
    with _readable(file):
        yield from _parquet(file, column) if kind == "parquet" else _json(file, column)


def table_rows(file: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a local file by column. Raises BadSettings for a file that is not such a table."""
    with _readable(file):
        yield from _parquet_rows(file) if kind == "parquet" else _json_rows(file)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn whatever reading a damaged file raises into BadSettings."""
    try:
        yield
    except GossamerError:
        raise
    except Exception as error:  # of many types
        words = " ".join(str(error).split())
        raise BadSettings(f"{file} cannot be read: {words}", hint="take this file out, or repair it") from error


def _json(file: Path, column: str) -> Iterator[Document]:
    for number, row in enumerate(_json_rows(file)):
        if not number:
            need_column(str(file), column, row)
        yield _from_json(row.get(column))


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    with pyarrow.input_stream(str(file), compression="detect") as raw, io.BufferedReader(raw) as lines:
        while line := lines.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"a line has more than {MAX_LINE_BYTES >> 20} MB")
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("a line is not an object")
            yield row


def _from_json(value: object) -> Document:
    match value:
        case None:
            return ""
        case str():
            return value.encode().decode()  # fails for half a surrogate pair
        case list() if is_document(value):
            return np.asarray(value, dtype=np.int64)
    raise ValueError("a row has neither text nor tokens in the column")


def _parquet(file: Path, column: str) -> Iterator[Document]:
    schema = pyarrow.parquet.read_schema(file)
    fields: dict[str, Any] = {field.name: "" if _is_text(field.type) else [] if _is_tokens(field.type) else 0 for field in schema}
    need_column(str(file), column, fields)
    once = [column] if fields[column] == "" else []  # a text that is repeated stays in memory once
    with pyarrow.parquet.ParquetFile(file, read_dictionary=once) as table:
        _need_small_groups(table.metadata, column)
        for batch in table.iter_batches(batch_size=ROWS, columns=[column]):
            yield from map(from_arrow, batch.column(0))


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    columns = pyarrow.parquet.read_metadata(file).schema
    once = [column.path for column in map(columns.column, range(len(columns))) if column.physical_type == "BYTE_ARRAY"]
    with pyarrow.parquet.ParquetFile(file, read_dictionary=once) as table:
        _need_small_groups(table.metadata)
        for batch in table.iter_batches(batch_size=ROWS):
            for row in range(batch.num_rows):
                yield from batch.slice(row, 1).to_pylist()  # a text that is repeated in many rows is long in one row at a time


def _need_small_groups(metadata: Any, column: str | None = None) -> None:
    """Raise ValueError for a row group that would take too much memory in this column; None: in any."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for chunk in (group.column(place) for group in groups for place in range(group.num_columns)):
        is_large = chunk.num_values > MAX_GROUP_VALUES or chunk.total_uncompressed_size > MAX_GROUP_BYTES
        if is_large and column in (None, chunk.path_in_schema.split(".")[0]):
            raise ValueError("a row group is too large; write the file with smaller ones")


def _is_text(kind: Any) -> bool:
    plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return bool(pyarrow.types.is_string(plain) or pyarrow.types.is_large_string(plain))


def _is_tokens(kind: Any) -> bool:
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    return bool(is_list and pyarrow.types.is_integer(kind.value_type))


def from_arrow(value: Any) -> Document:
    """Return a scalar of Arrow as a document."""
    if not value.is_valid:
        return ""
    found = value.as_py() if not hasattr(value, "values") else value.values.to_numpy(zero_copy_only=False)
    return found if isinstance(found, str) else found.astype(np.int64)


def need_column(name: str, column: str, row: Mapping[str, Any]) -> None:
    """Raise BadManifest, with the columns of text, if a row has anything but text, tokens or nothing in the manifest's column."""
    if is_document(row.get(column)) or (column in row and row[column] is None):  # an empty document says nothing of the column
        return
    columns = ", ".join(name for name, value in row.items() if is_document(value))
    raise BadManifest(
        f"{name} has no text in a column {column!r}",
        hint=f"set [data] column; its columns of text: {columns}"
        if columns
        else "it has no column of text: name another data set in [data]",
    )


def is_document(value: object) -> bool:
    """Return whether a value of a row is text or tokens."""
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))
