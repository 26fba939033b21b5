"""A streamed Hugging Face data set as a corpus: the peer holds one buffer of tokens and fetches the next while it trains.

Each pass visits the shards in an order that depends on the run's seed, the peer and the pass; inside a shard, documents come as they lie.
Peers begin at different documents, so that they overlap only by chance. Nothing is shuffled in memory, so a place is three numbers, and
what a buffer holds is a pure function of the place where it began. A checkpoint needs no tokens: after a restart the same buffer is fetched
again (reading its shard up to the first document) and training goes on bit for bit. A document that does not fit into the rest of a buffer
loses its end. One document in twenty, chosen by the hash of its content, is never trained on, by anybody; the held-out text is the first
such documents in the data set's own order, so all peers measure on the same.

When the next buffer is late (slow or dead network), training reads the present one again, in another order, and says so in the log. Only
then do the steps after that differ from those of a run with a good network; the cursor tells a resumed run what was read all the same.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peer.text.batches import Draw, WindowOrder, cut, held_out_batches, permutation, random_stream
from peer.text.documents import is_held_out
from protocol.errors import BadManifest, BadSettings

if TYPE_CHECKING:
    from peer.text.tokenizer import Tokenizer
    from protocol.run.sections import DataSection

logger = logging.getLogger(__name__)

FIRST_DOCUMENTS = 10_000  # a peer begins at one of so many documents of its first shard
MIN_BUFFER_TOKENS = 1 << 20
MIN_BUFFER_BATCHES = 256
MAX_HELD_OUT_TOKENS = 1 << 17
WAIT_S = 30.0  # for a late buffer, before the present one is read again


@dataclass(frozen=True, slots=True)
class Bookmark:
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

    def first_place(self) -> Bookmark:
        """Return where this peer begins."""
        return Bookmark(0, 0, random_stream(self._draw, b"first-document", 0).random_raw() % FIRST_DOCUMENTS)

    def in_order(self) -> Iterator[str]:
        """Yield one pass in the data set's own order, the same at every peer."""
        return (row[self._column] or "" for row in self._dataset)

    def read(self, place: Bookmark) -> Iterator[tuple[str, Bookmark]]:
        """Yield documents for ever, each with the place after it. Raises BadManifest if the data set has none."""
        shard, document = place.shard, place.document
        for number in itertools.count(place.number):
            is_empty = shard == document == 0
            for at in range(shard, self._num_shards):
                for text in self._shard(number, at, document):
                    is_empty = False
                    document += 1
                    yield text, Bookmark(number, at, document)
                document = 0
            shard = 0
            if is_empty:
                raise BadManifest("the data set has no documents", hint="correct [data] in the manifest")

    def _shard(self, number: int, shard: int, first_document: int) -> Iterator[str]:
        order = permutation(random_stream(self._draw, b"shards", number), self._num_shards)
        rows = self._dataset.shard(num_shards=self._num_shards, index=int(order[shard])).skip(first_document)
        return (row[self._column] or "" for row in rows)


def open_stream(section: DataSection, draw: Draw) -> DocumentStream:
    """Open the data set that a manifest names. Raises BadSettings if it cannot be reached, BadManifest if it has no such column of text."""
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


@dataclass(frozen=True, slots=True)
class Buffer:
    """The tokens of the documents from one place to another."""

    tokens: npt.NDArray[Any]
    order: WindowOrder
    first: Bookmark
    after: Bookmark


class StreamedCorpus:
    """Batches out of one buffer after the other; see peer.text.corpus.Corpus."""

    def __init__(self, stream: DocumentStream, tokenizer: Tokenizer, draw: Draw) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._draw = draw
        self._num_buffer_tokens = max(MIN_BUFFER_TOKENS, MIN_BUFFER_BATCHES * draw.num_batch_tokens)
        self._held_out, self.bytes_per_token = self._read_held_out()
        self._closing = threading.Event()
        self._place = stream.first_place()  # where the present buffer begins
        self._steps: tuple[int, int] | None = None  # the first step that it serves, and the one that asks for the next; None before any
        self._present: Buffer | None = None
        self._following: Future[Buffer] = Future()

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step; see Corpus. The first one waits for a buffer, and raises what prevents it."""
        buffer = self._present or self._begin(step)
        assert self._steps is not None
        if step >= self._steps[1]:
            buffer = self._turn_over(step, buffer)
        starts = buffer.order.starts(step - self._steps[0])
        return torch.from_numpy(cut(buffer.tokens, starts, self._draw.num_window_tokens))

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        """Return held-out batches; see Corpus."""
        return held_out_batches(self._held_out, self._draw, num_batches)

    def cursor(self) -> dict[str, Any]:
        """Return where the present buffer begins, and which steps it serves."""
        return {"place": asdict(self._place), "steps": self._steps}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Go on from a cursor; the next batch fetches its buffer again."""
        self.close()
        self._closing = threading.Event()
        self._place = Bookmark(**cursor["place"])
        self._steps = None if cursor["steps"] is None else (int(cursor["steps"][0]), int(cursor["steps"][1]))
        self._present = None

    def close(self) -> None:
        """Stop fetching, soon."""
        self._closing.set()

    def _begin(self, step: int) -> Buffer:
        try:
            buffer = self._fill(self._place, self._closing)
        except OSError as error:
            raise BadSettings(f"the data set cannot be read: {error}", hint="check the network, then start again") from error
        self._steps = self._steps or (step, step + self._num_steps(buffer))
        return self._adopt(buffer)

    def _turn_over(self, step: int, buffer: Buffer) -> Buffer:
        """Go on to the next buffer, or once more through the present one if there is none."""
        assert self._steps is not None
        try:
            following = self._following.result(timeout=WAIT_S)
        except Exception as error:  # whatever the network, the data set's host or a decoder came up with
            logger.warning("the next part of the data set is late (%s); reading the present one again", error or "no answer")
            if self._following.done():
                self._following = self._fetch(buffer.after)
            self._steps = self._steps[0], step + self._num_steps(buffer)
            return buffer
        self._steps = step, step + self._num_steps(following)
        return self._adopt(following)

    def _adopt(self, buffer: Buffer) -> Buffer:
        self._present, self._place = buffer, buffer.first
        self._following = self._fetch(buffer.after)
        return buffer

    def _num_steps(self, buffer: Buffer) -> int:
        """How many steps read each window of a buffer about once."""
        return max(1, (len(buffer.tokens) // self._draw.sequence_length - 1) // self._draw.batch_size)

    def _fetch(self, place: Bookmark) -> Future[Buffer]:
        """Fill a buffer in the background; on a daemon thread, for a dead network must not keep the process from ending."""
        future: Future[Buffer] = Future()
        closing = self._closing

        def fetch() -> None:
            try:
                future.set_result(self._fill(place, closing))
            except Exception as error:  # the trainer's thread meets it in the future
                future.set_exception(error)

        threading.Thread(target=fetch, name="data-set", daemon=True).start()
        return future

    def _fill(self, first: Bookmark, closing: threading.Event) -> Buffer:
        parts: list[npt.NDArray[Any]] = []
        after, num_tokens = first, 0
        for text, after in self._stream.read(first):
            if not is_held_out(text.encode()):
                parts.append(self._encode(text))
                num_tokens += len(parts[-1])
            if num_tokens >= self._num_buffer_tokens or closing.is_set():
                break
            self._refuse_too_little(num_tokens, after.number - first.number)
        tokens = np.concatenate(parts)[: self._num_buffer_tokens]
        return Buffer(tokens, WindowOrder(self._draw, len(tokens)), first, after)

    def _refuse_too_little(self, num_tokens: int, num_passes: int) -> None:
        if num_passes >= 2 and num_tokens < self._draw.num_batch_tokens:  # the pass that was entered midway does not count
            raise BadSettings(
                f"the data set holds less than {num_tokens} tokens to train on; one batch needs {self._draw.num_batch_tokens}",
                hint="choose a larger data set in the manifest",
            )

    def _read_held_out(self) -> tuple[npt.NDArray[Any], float]:
        parts: list[npt.NDArray[Any]] = []
        num_tokens = num_bytes = 0
        for text in self._stream.in_order():
            if is_held_out(text.encode()):
                parts.append(self._encode(text))
                num_tokens += len(parts[-1])
                num_bytes += len(text.encode()) + 1
            if num_tokens >= max(MAX_HELD_OUT_TOKENS, self._draw.num_batch_tokens):
                break
        if num_tokens < self._draw.num_window_tokens:
            raise BadSettings(
                f"the data set's held-out part has {num_tokens} tokens; one sequence needs {self._draw.num_window_tokens}",
                hint="choose a larger data set in the manifest",
            )
        return np.concatenate(parts), num_bytes / num_tokens

    def _encode(self, text: str) -> npt.NDArray[Any]:
        return np.append(self._tokenizer.encode(text), self._tokenizer.dtype.type(self._tokenizer.document_end))
