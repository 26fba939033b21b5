"""A data set's documents, unit by unit, from any place on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gossamer.peer.text.batches import Draw
from gossamer.peer.text.document import Document
from gossamer.peer.text.document_stream import Bookmark, DocumentStream, open_stream
from gossamer.protocol.errors import BadManifest, BadSettings, TransportError
from gossamer.protocol.run.sections import DataSection

DRAW = Draw(run_seed=0, peer=b"a", batch_size=2, sequence_length=16)
OTHER = Draw(run_seed=0, peer=b"b", batch_size=2, sequence_length=16)
REVISION = "0" * 40
START = Bookmark(0, 0, 0, 0)


def write_shards(folder: Path, num_shards: int, num_documents: int) -> Path:
    for shard in range(num_shards):
        rows = [{"text": f"{shard}/{number}", "number": number} for number in range(num_documents)]
        (folder / f"train-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opened(folder: Path, draw: Draw = DRAW, column: str = "text") -> DocumentStream:
    return open_stream(DataSection(source="huggingface", name=str(folder), revision=REVISION, column=column), draw)


def take(stream: DocumentStream, place: Bookmark, num: int) -> list[tuple[Document, Bookmark]]:
    return list(itertools.islice(stream.read(place), num))


def test_each_pass_reads_everything_in_an_order_of_its_own(tmp_path: Path) -> None:
    stream = opened(write_shards(tmp_path, 5, 4))
    texts = [text for text, _ in take(stream, START, 60)]
    passes = [texts[:20], texts[20:40], texts[40:]]
    assert all(sorted(one) == sorted(stream.in_order()) for one in passes)
    assert passes[0] != passes[1] or passes[1] != passes[2]


def test_any_place_can_be_entered(tmp_path: Path) -> None:
    stream = opened(write_shards(tmp_path, 3, 4))
    whole = take(stream, START, 40)
    for at in (0, 3, 4, 11, 12, 20):
        assert take(opened(tmp_path), whole[at][1], 10) == whole[at + 1 : at + 11]


def test_a_place_beyond_a_unit_is_the_next_units_start(tmp_path: Path) -> None:
    stream = opened(write_shards(tmp_path, 3, 44))
    assert take(stream, Bookmark(0, 0, 0, 999), 1) == take(stream, Bookmark(0, 0, 1, 0), 1)
    assert take(stream, Bookmark(0, 0, 10, 999), 1) == take(stream, Bookmark(0, 1, 0, 0), 1)
    assert take(stream, Bookmark(0, 2, 10, 999), 1) == take(stream, Bookmark(1, 0, 0, 0), 1)


def one_file(folder: Path, kind: str, rows_per_group: int) -> Path:
    """Two thousand documents in a data set of one file."""
    texts = [f"document {number}" for number in range(2000)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "train.parquet", row_group_size=rows_per_group)
    else:
        (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.mark.parametrize(("kind", "rows_per_group"), [("parquet", 50), ("parquet", 2000), ("jsonl", 0)])
def test_peers_read_different_text_from_one_file(tmp_path: Path, kind: str, rows_per_group: int) -> None:
    one_file(tmp_path, kind, rows_per_group)
    read = [
        {text for text, _ in take(opened(tmp_path, Draw(0, peer, batch_size=2, sequence_length=16)), START, 200)}
        for peer in (b"a", b"b", b"c", b"d")
    ]
    overlaps = [len(mine & set().union(*(others for others in read if others is not mine))) / 200 for mine in read]
    assert sum(overlaps) / 4 < 0.6  # 27 % on average: each has read a tenth
    whole = take(opened(tmp_path), START, 2000)
    assert len({text for text, _ in whole}) == 2000


def test_pretokenized_documents_can_be_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2, 3], [4]]}), tmp_path / "train.parquet")
    found = list(opened(tmp_path, column="input_ids").in_order())
    assert [tokens.tolist() for tokens in found if isinstance(tokens, np.ndarray)] == [[1, 2, 3], [4]]


def test_an_empty_data_set_is_refused() -> None:
    nothing = datasets.Dataset.from_dict({"text": ["one"]}).to_iterable_dataset().filter(lambda row: False)
    with pytest.raises(BadManifest, match="no documents"):
        take(DocumentStream(nothing, "text", DRAW), Bookmark(0, 0, 0, 5), 1)


def test_a_missing_text_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    assert list(opened(tmp_path).in_order()) == ["one", ""]


@pytest.mark.parametrize("has_splits", [False, True])
def test_a_data_set_of_save_to_disk_is_read_in_an_order_of_each_peer(tmp_path: Path, has_splits: bool) -> None:
    texts = [f"document {number}" for number in range(2000)]
    saved = datasets.Dataset.from_dict({"text": texts, "number": list(range(2000))})
    (datasets.DatasetDict({"train": saved, "test": saved.select(range(3))}) if has_splits else saved).save_to_disk(tmp_path)
    mine, theirs = take(opened(tmp_path), START, 2000), take(opened(tmp_path, OTHER), START, 200)
    assert list(opened(tmp_path).in_order()) == texts == sorted((text for text, _ in mine), key=texts.index)
    assert len({text for text, _ in mine[:200]} & {text for text, _ in theirs}) < 200
    assert take(opened(tmp_path), mine[999][1], 50) == mine[1000:1050]


def test_a_folder_without_the_split_is_explained_without_the_network(tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["one"]})}).save_to_disk(tmp_path)
    with pytest.raises(BadSettings, match="cannot be opened") as caught:
        opened(tmp_path)
    assert "folder" in caught.value.hint and "network" not in caught.value.hint


@pytest.mark.parametrize("column", ["words", "number"])
def test_a_column_without_text_names_those_with_it(tmp_path: Path, column: str) -> None:
    with pytest.raises(BadManifest, match=column) as caught:
        opened(write_shards(tmp_path, 1, 1), column=column)
    assert caught.value.hint == "set [data] column; its columns of text: text"


def test_an_unreachable_data_set_is_explained(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="cannot be opened") as caught:
        opened(tmp_path / "missing")
    assert "network" in caught.value.hint


def test_a_host_that_does_not_answer_is_trouble_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise ConnectionError("Couldn't reach it on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(TransportError, match="cannot be opened: Couldn't reach it") as caught:
        opened(tmp_path / "missing")
    assert "check the network" in caught.value.hint


@pytest.mark.parametrize("named", ["{outside}/*.jsonl", "../private/*.jsonl"])
def test_the_card_of_a_data_set_opens_no_files_outside_of_its_folder(tmp_path: Path, named: str) -> None:
    """The operator lets the peer read this folder alone, and others wrote the card."""
    folder, outside = tmp_path / "set", tmp_path / "private"
    for place in (folder, outside):
        place.mkdir()
        write_shards(place, 1, 1)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {named.format(outside=outside)}\n---\n")
    with pytest.raises(BadManifest, match="outside of it"):
        opened(folder)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: '*.jsonl'\n---\n")
    assert list(opened(folder).in_order()) == ["0/0"]
