"""The documents of a streamed Hugging Face data set, in an order of each peer's own that can be entered at any place.

Each pass visits the shards in an order that depends on the run's seed, the peer and the pass; inside a shard, documents come as they lie.
Peers begin at different documents, so that they overlap only by chance. Nothing is shuffled in memory, so a place is three numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from peer.windows import NUM_ROUNDS, Draw, permuted
from protocol.errors import BadManifest, BadSettings

if TYPE_CHECKING:
    from protocol.sections import DataSection

FIRST_DOCUMENTS = 10_000  # a peer begins at one of so many documents of its first shard


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a peer's endless order of documents."""

    number: int  # of the pass over the data set
    shard: int  # in this pass's order
    document: int  # in the shard; beyond its end means the next shard's first


class DocumentStream:
    """The texts of one column of a data set. Reading goes over the network: any of its errors may come out of an iterator."""

    def __init__(self, dataset: Any, column: str, draw: Draw) -> None:
        self._dataset = dataset
        self._column = column
        self._draw = draw
        self._num_shards: int = dataset.num_shards

    def first_place(self) -> Place:
        """Return where this peer begins."""
        return Place(0, 0, self._secrets(0)[-1] % FIRST_DOCUMENTS)

    def in_order(self) -> Iterator[str]:
        """Yield one pass in the data set's own order, the same at every peer."""
        return (row[self._column] or "" for row in self._dataset)

    def read(self, place: Place) -> Iterator[tuple[str, Place]]:
        """Yield documents for ever, each with the place after it. Raises BadManifest if the data set has none."""
        shard, document = place.shard, place.document
        for number in itertools.count(place.number):
            is_empty = shard == document == 0
            for at in range(shard, self._num_shards):
                for text in self._shard(number, at, document):
                    is_empty = False
                    document += 1
                    yield text, Place(number, at, document)
                document = 0
            shard = 0
            if is_empty:
                raise BadManifest("the data set has no documents", hint="correct [data] in the manifest")

    def _shard(self, number: int, shard: int, first_document: int) -> Iterator[str]:
        index = int(permuted(np.asarray([shard], dtype=np.uint64), self._num_shards, list(self._secrets(number)[:-1]))[0])
        rows = self._dataset.shard(num_shards=self._num_shards, index=index).skip(first_document)
        return (row[self._column] or "" for row in rows)

    def _secrets(self, number: int) -> tuple[int, ...]:
        """The keys of a pass's order, and a number to begin with."""
        message = b"gossamer-shards" + struct.pack("<qQ", self._draw.run_seed, number) + self._draw.peer
        return struct.unpack(f"<{NUM_ROUNDS + 1}Q", hashlib.blake2b(message, digest_size=8 * (NUM_ROUNDS + 1)).digest())


def open_stream(section: DataSection, draw: Draw) -> DocumentStream:
    """Open the data set that a manifest names. Raises BadSettings if it cannot be reached, BadManifest if it has no such column of text."""
    import datasets

    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(section.name, section.config, split=section.split, revision=section.revision, streaming=True)
        row = next(iter(dataset), {section.column: ""})
    except Exception as error:  # of many kinds: no such name, no such split, no network, a decoder's
        raise BadSettings(
            f"the data set {section.name} cannot be opened: {' '.join(str(error).split())}",
            hint="check the network, and [data] in the manifest",
        ) from error
    if not isinstance(row.get(section.column), str):
        columns = ", ".join(name for name, value in row.items() if isinstance(value, str))
        raise BadManifest(f"the data set {section.name} has no text in a column {section.column!r}", hint=f"its columns of text: {columns}")
    return DocumentStream(dataset, section.column, draw)
