from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from peer.text.batches import Draw
from peer.text.streaming import DocumentStream, Place, open_stream
from protocol.errors import BadManifest, BadSettings
from protocol.run.sections import DataSection

DRAW = Draw(run_seed=0, peer=b"a", batch_size=2, sequence_length=16)
OTHER = Draw(run_seed=0, peer=b"b", batch_size=2, sequence_length=16)
REVISION = "0" * 40


def write_shards(folder: Path, num_shards: int, num_documents: int) -> Path:
    for shard in range(num_shards):
        rows = [{"text": f"{shard}/{number}", "number": number} for number in range(num_documents)]
        (folder / f"train-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opened(folder: Path, draw: Draw = DRAW, column: str = "text") -> DocumentStream:
    return open_stream(DataSection(source="huggingface", name=str(folder), revision=REVISION, column=column), draw)


def take(stream: DocumentStream, place: Place, num: int) -> list[tuple[str, Place]]:
    return list(itertools.islice(stream.read(place), num))


START = Place(0, 0, 0)


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


def test_a_place_beyond_a_shard_is_the_next_shards_start(tmp_path: Path) -> None:
    stream = opened(write_shards(tmp_path, 3, 4))
    assert take(stream, Place(0, 0, 999), 1) == take(stream, Place(0, 1, 0), 1)
    assert take(stream, Place(0, 2, 999), 1) == take(stream, Place(1, 0, 0), 1)


def test_peers_begin_apart_and_go_their_own_ways(tmp_path: Path) -> None:
    write_shards(tmp_path, 8, 2)
    mine, theirs = opened(tmp_path), opened(tmp_path, OTHER)
    assert mine.first_place() != theirs.first_place()
    assert [text for text, _ in take(mine, START, 16)] != [text for text, _ in take(theirs, START, 16)]


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    stream = opened(write_shards(tmp_path, 1, 1))
    stream._dataset = stream._dataset.filter(lambda row: False)
    with pytest.raises(BadManifest, match="no documents"):
        take(stream, Place(0, 0, 5), 1)


def test_a_missing_text_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    assert list(opened(tmp_path).in_order()) == ["one", ""]


@pytest.mark.parametrize("column", ["words", "number"])
def test_a_column_without_text_names_those_with_it(tmp_path: Path, column: str) -> None:
    with pytest.raises(BadManifest, match=column) as caught:
        opened(write_shards(tmp_path, 1, 1), column=column)
    assert caught.value.hint == "its columns of text: text"


def test_an_unreachable_data_set_is_explained(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="cannot be opened") as caught:
        opened(tmp_path / "missing")
    assert "network" in caught.value.hint


def test_parquet_is_read_too(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "train.parquet")
    assert list(opened(tmp_path).in_order()) == ["one", "two"]
