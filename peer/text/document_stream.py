"""The documents of a data set in one peer's order: unit by unit, ordered by a hash of the run, the peer and the pass.

A unit is a row group of a shard. Shards without row groups are read in stripes, every n-th row, until a data set has MIN_UNITS units. So
peers read different text without coordination, even from one file. Nothing is shuffled in memory, so a place is four numbers.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import datasets
import numpy as np

from gossamer.peer.text.batches import Draw, permutation, random_stream
from gossamer.peer.text.document import Document
from gossamer.peer.text.tables import ROWS, from_arrow, need_column
from gossamer.protocol.errors import BadManifest, BadSettings, TransportError

if TYPE_CHECKING:
    from gossamer.protocol.run.sections import DataSource

MIN_UNITS: Final = 32  # of a data set; not more, because reading a stripe reads all rows of its neighbours too


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A place in a peer's endless order of documents."""

    number: int  # of the pass over the data set
    shard: int  # in this pass's order
    unit: int  # in the shard's order
    document: int  # in the unit; past its end: the first of the next unit


class DocumentStream:
    """The documents in one column of a data set. Its iterators may read over the network and raise any of its errors."""

    def __init__(self, dataset: Any, column: str, draw: Draw) -> None:
        self._dataset = dataset.select_columns([column]).with_format("arrow")
        self._draw = draw
        self._num_shards: int = dataset.num_shards

    def in_order(self) -> Iterator[Document]:
        """Yield one pass in the data set's own order, which is the same at every peer."""
        return _documents(self._dataset)

    def read(self, place: Bookmark) -> Iterator[tuple[Document, Bookmark]]:
        """Yield documents endlessly, each with the place after it. Raises BadManifest if the data set has none."""
        shard, unit, document = place.shard, place.unit, place.document
        for number in itertools.count(place.number):
            is_empty = shard == unit == document == 0
            for at in range(shard, self._num_shards):
                units = self._units(number, at)
                for place_in_shard in range(unit, len(units)):
                    for found in units[place_in_shard](document):
                        is_empty = False
                        document += 1
                        yield found, Bookmark(number, at, place_in_shard, document)
                    document = 0
                unit = document = 0
            shard = 0
            if is_empty:
                raise BadManifest("the data set has no documents", hint="correct [data] in the manifest")

    def _units(self, number: int, place: int) -> list[Callable[[int], Iterator[Document]]]:
        """Return the units of the shard at a place of a pass, in this peer's order: each yields its documents from a number on."""
        shards = permutation(random_stream(self._draw, b"shards", number), self._num_shards)
        shard = int(shards[place])
        groups = self._dataset.shard(num_shards=self._num_shards, index=shard).reshard()
        num_stripes = math.ceil(MIN_UNITS / (self._num_shards * groups.num_shards))
        order = permutation(random_stream(self._draw, b"units", number * self._num_shards + shard), groups.num_shards * num_stripes)
        places = [divmod(int(unit), num_stripes) for unit in order]
        rows = [(groups.shard(num_shards=groups.num_shards, index=group), stripe) for group, stripe in places]
        return [partial(_documents, group, stripe=stripe, num_stripes=num_stripes) for group, stripe in rows]


def _documents(rows: Any, first: int = 0, stripe: int = 0, num_stripes: int = 1) -> Iterator[Document]:
    """Yield the documents of every `num_stripes`-th row from number `first` on; earlier ones are counted, not decoded."""
    num_passed, following = 0, stripe + num_stripes * first
    for table in rows.iter(batch_size=ROWS):
        column = table.column(0)
        if following < num_passed + len(column):
            chosen = np.arange(following - num_passed, len(column), num_stripes)
            following = num_passed + int(chosen[-1]) + num_stripes
            yield from map(from_arrow, column.take(chosen))
        num_passed += len(column)


def open_stream(section: DataSource, draw: Draw) -> DocumentStream:
    """Open a manifest's data set: of the hub, or in a folder, as files or as `save_to_disk` writes it.

    Raises TransportError if it cannot be reached, BadSettings if it cannot be opened, BadManifest if it has no such column of text.
    """
    datasets.disable_progress_bars()
    is_folder = Path(section.name or "").is_dir()
    try:
        dataset = _saved_or_streamed(section)
        row = next(iter(dataset), {section.column: ""})
    except BadManifest:
        raise
    except Exception as error:  # of many types: no such name, no such split, no network, a decoder's error
        way_out = "repair the files in this folder" if is_folder else "check the network"
        trouble, hint = f"the data set {section.name} cannot be opened", f"{way_out}, and check [data] in the manifest"
        raise reading_error(trouble, error, hint) from error
    need_column(f"the data set {section.name}", section.column, row)
    return DocumentStream(dataset, section.column, draw)


def reading_error(trouble: str, error: Exception, hint: str) -> TransportError | BadSettings:
    """Return the error for what reading a data set has raised: TransportError where the network failed, which may pass."""
    kind = TransportError if isinstance(error, ConnectionError | TimeoutError) else BadSettings
    return kind(f"{trouble}: {' '.join(str(error).split())}", hint=hint)


def _saved_or_streamed(section: DataSource) -> Any:
    folder, config = Path(section.name or ""), datasets.config
    has_splits = (folder / config.DATASETDICT_JSON_FILENAME).is_file()
    if has_splits or (folder / config.DATASET_STATE_JSON_FILENAME).is_file():
        saved = datasets.load_from_disk(folder / section.split if has_splits else folder)
        return saved.to_iterable_dataset(num_shards=max(1, min(MIN_UNITS, len(saved))))
    builder = datasets.load_dataset_builder(section.name, section.config, revision=section.revision)
    if folder.is_dir():  # `datasets` refuses a data set of the hub whose card names files elsewhere, and no other
        _need_inside(folder, [file for files in (builder.config.data_files or {}).values() for file in files])
    return builder.as_streaming_dataset(split=section.split)


def _need_inside(folder: Path, files: Iterable[str]) -> None:
    """Raise BadManifest where the card of a data set, which others wrote, names files outside of its folder, or on the network."""
    whole = os.path.abspath(folder)
    for file in files:
        if "://" in file or not Path(os.path.abspath(file)).is_relative_to(whole):
            raise BadManifest(f"the card of the data set in {folder} names {file}, which is outside of it", hint="correct its README.md")
