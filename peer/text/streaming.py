"""A streamed Hugging Face data set as a corpus: the peer holds one buffer of tokens and fetches the next while it trains.

The contents of a buffer are a pure function of the place where it begins. So a checkpoint needs no tokens: after a restart the same buffer
is fetched again. A document that does not fit into the rest of a buffer loses its end. The held-out text is the first held-out documents
in the data set's own order, so all peers measure on the same text.

When the next buffer is late, training reads the current one again in another order and logs a warning. Only then do later steps differ
from those with a fast network.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.peer.text.batches import Draw, WindowOrder, cut, held_out_batches, num_sequences
from gossamer.peer.text.document import is_held_out
from gossamer.peer.text.document_stream import Bookmark, DocumentStream, reading_error
from gossamer.protocol.errors import BadSettings, GossamerError

if TYPE_CHECKING:
    from gossamer.peer.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MIN_BUFFER_TOKENS = 1 << 20
MIN_BUFFER_BATCHES = 256
MAX_HELD_OUT_TOKENS = 1 << 17
DOCUMENTS = 64  # tokenized at once
WAIT_S = 30.0  # for a late buffer, before the current one is read again
LOOK_S = 0.2  # between two looks for a stop meanwhile


@dataclass(frozen=True, slots=True)
class Buffer:
    """The tokens of the documents from one place to another."""

    tokens: npt.NDArray[Any]
    order: WindowOrder
    first: Bookmark
    after: Bookmark


class StreamedCorpus:
    """Batches from successive buffers; see peer.text.corpus.Corpus. It waits for no buffer once `is_stopping`."""

    def __init__(self, stream: DocumentStream, tokenizer: Tokenizer, draw: Draw, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._draw = draw
        self._is_stopping = is_stopping
        self._num_buffer_tokens = max(MIN_BUFFER_TOKENS, MIN_BUFFER_BATCHES * draw.num_batch_tokens)
        with _readable():
            self._held_out, self.bytes_per_token = self._read_held_out()
        self._closing = threading.Event()
        self._place = Bookmark(0, 0, 0, 0)  # where the current buffer begins
        self._steps: tuple[int, int] | None = None  # its first step, and the first step of the next buffer; None before any
        self._present: Buffer | None = None
        self._following: Future[Buffer] = Future()

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step; see Corpus. The first call waits for a buffer. Raises TransportError, BadSettings."""
        buffer = self._present or self._begin(step)
        assert self._steps is not None
        if step >= self._steps[1]:
            buffer = self._switch_buffer(step, buffer)
        starts = buffer.order.starts(step - self._steps[0])
        return torch.from_numpy(cut(buffer.tokens, starts, self._draw.num_window_tokens))

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        """Return held-out batches; see Corpus."""
        return held_out_batches(self._held_out, self._draw, num_batches)

    def num_held_out(self) -> int:
        """Return how many held-out sequences there are; see Corpus."""
        return num_sequences(self._held_out, self._draw)

    def cursor(self) -> dict[str, Any]:
        """Return the beginning of the current buffer and its steps."""
        return {"place": asdict(self._place), "steps": self._steps}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor; the next batch fetches its buffer again."""
        self.close()
        self._closing = threading.Event()
        self._place = Bookmark(**cursor["place"])
        self._steps = None if cursor["steps"] is None else (int(cursor["steps"][0]), int(cursor["steps"][1]))
        self._present = None

    def close(self) -> None:
        """Stop fetching at the next document."""
        self._closing.set()

    def _begin(self, step: int) -> Buffer:
        with _readable():
            buffer = self._fill(self._place, self._closing)
        self._steps = self._steps or (step, step + self._num_steps(buffer))
        return self._adopt(buffer)

    def _switch_buffer(self, step: int, buffer: Buffer) -> Buffer:
        """Switch to the next buffer, or read the current one again if the next is late."""
        assert self._steps is not None
        until_s = time.monotonic() + WAIT_S
        while not self._following.done() and (left_s := until_s - time.monotonic()) > 0.0:
            if self._is_stopping():
                return buffer  # for the last step; the next start goes on with the next buffer
            wait([self._following], min(LOOK_S, left_s))
        try:
            following = self._following.result(timeout=0.0)
        except Exception as error:  # any error of the network, the data set's host or a decoder
            logger.warning("the next part of the data set is late (%s); reading the current one again", error or "no answer")
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
        """Return the number of steps that read each window of a buffer about once."""
        return max(1, (len(buffer.tokens) // self._draw.sequence_length - 1) // self._draw.batch_size)

    def _fetch(self, place: Bookmark) -> Future[Buffer]:
        """Fill a buffer on a daemon thread, so that a dead network does not keep the process from ending."""
        future: Future[Buffer] = Future()
        closing = self._closing

        def fetch() -> None:
            try:
                future.set_result(self._fill(place, closing))
            except Exception as error:  # raised in the trainer's thread by the future
                future.set_exception(error)

        threading.Thread(target=fetch, name="data-set", daemon=True).start()
        return future

    def _fill(self, first: Bookmark, closing: threading.Event) -> Buffer:
        parts: list[npt.NDArray[Any]] = []
        after, num_tokens = first, 0
        for tokens, after in self._tokenized(first):
            parts.append(tokens)
            num_tokens += len(tokens)
            if num_tokens >= self._num_buffer_tokens or closing.is_set():
                break
            if after.number >= first.number + 2 and num_tokens < self._draw.num_batch_tokens:  # a pass that began midway does not count
                raise BadSettings(
                    f"the data set holds less than {num_tokens} tokens to train on; one batch needs {self._draw.num_batch_tokens}",
                    hint="choose a larger data set in the manifest",
                )
        tokens = np.concatenate(parts)[: self._num_buffer_tokens]
        return Buffer(tokens, WindowOrder(self._draw, len(tokens)), first, after)

    def _tokenized(self, first: Bookmark) -> Iterator[tuple[npt.NDArray[Any], Bookmark]]:
        """Yield the tokens of each document from a place on, none for one that is held out, with the place after it."""
        reading = self._stream.read(first)
        while some := list(itertools.islice(reading, DOCUMENTS)):
            kept = [document for document, _ in some if not is_held_out(document)]
            tokens = iter(self._tokenizer.encode_documents(kept))
            for document, after in some:
                yield (np.empty(0, self._tokenizer.dtype) if is_held_out(document) else next(tokens)), after

    def _read_held_out(self) -> tuple[npt.NDArray[Any], float]:
        parts: list[npt.NDArray[Any]] = []
        num_tokens = num_bytes = 0
        for document in self._stream.in_order():
            if is_held_out(document):
                parts += self._tokenizer.encode_documents([document])
                num_tokens += len(parts[-1])
                num_bytes += self._tokenizer.num_text_bytes(document) + 1
            if num_tokens >= max(MAX_HELD_OUT_TOKENS, self._draw.num_batch_tokens):
                break
        if num_tokens < self._draw.num_window_tokens:
            raise BadSettings(
                f"the data set's held-out part has {num_tokens} tokens; one sequence needs {self._draw.num_window_tokens}",
                hint="choose a larger data set in the manifest",
            )
        return np.concatenate(parts), num_bytes / num_tokens


@contextmanager
def _readable() -> Iterator[None]:
    """Turn what reading a data set raises into TransportError or BadSettings: errors of the network, its host or a decoder."""
    try:
        yield
    except GossamerError:
        raise
    except Exception as error:
        raise reading_error("the data set cannot be read", error, "check the network, then start again") from error
