"""What a peer trains on: batches of its text, each a pure function of the run's seed, the peer and the step.

So the data cursor is the step's number: nothing else is saved to resume bit for bit. The one exception is a data set that is streamed
(peer/text/streaming.py), whose `cursor` says where in the stream the present batches come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from peer.text.batches import Draw, WindowOrder, cut, held_out_batches
from peer.text.documents import GIVE_TEXT, HELD_OUT_SHARE, read_texts, standard_library, text_files
from peer.text.token_cache import Tokens, in_memory, on_disk
from protocol.errors import BadSettings

if TYPE_CHECKING:
    from peer.text.tokenizer import Tokenizer
    from protocol.run.sections import DataSection


class Corpus(Protocol):
    """Where batches come from. Call it from one thread.

    What the step's number alone decides has no cursor, and what owns no threads or files has nothing to close.
    """

    bytes_per_token: float

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step: int64[B, L+1], new, on the CPU."""

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        """Return batches (int64[B, L+1]) of text that is never trained on, the same ones at each call."""

    def cursor(self) -> dict[str, Any]:
        """Return, as JSON, what `batch` needs beside the step's number to go on exactly here."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Go on from a cursor of this corpus."""
        return

    def close(self) -> None:
        """Let go of threads and files."""
        return


class ResidentCorpus(Corpus):
    """A text that lies on this machine whole, in memory or mapped from a file: the step says it all."""

    def __init__(self, tokens: Tokens, draw: Draw) -> None:
        self.tokens = tokens
        self.bytes_per_token = tokens.bytes_per_token
        self._draw = draw
        self._order = WindowOrder(draw, len(tokens.train))

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step; see Corpus."""
        return torch.from_numpy(cut(self.tokens.train, self._order.starts(step), self._draw.num_window_tokens))

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        """Return held-out batches, spread evenly over the held-out text; see Corpus."""
        return held_out_batches(self.tokens.held_out, self._draw, num_batches)


Tell = Callable[[int, int], None]  # hears how many bytes of how many are tokenized


def load_corpus(
    section: DataSection, tokenizer: Tokenizer, draw: Draw, path: Path | None, cache: Path, tell: Tell = lambda done, total: None
) -> Corpus:
    """Load what the manifest's data section and the operator's `--data` path say; `cache` may be filled with tokens.

    Raises BadSettings if a path is missing or not wanted, or the text is not text or less than one batch.
    """
    if path is None and section.source == "text":
        raise BadSettings("this run trains each peer on its own text", hint=GIVE_TEXT)
    if path is not None and section.source != "text":
        raise BadSettings(f"this run's data is fixed ({section.source}), so --data has no place in it", hint="leave --data out")
    if section.source == "huggingface":
        from peer.text.document_stream import open_stream  # `datasets` takes long to import
        from peer.text.streaming import StreamedCorpus

        return StreamedCorpus(open_stream(section, draw), tokenizer, draw)
    if path is None:
        tokens, name = in_memory(standard_library(), tokenizer), "the standard library of this interpreter"
    else:
        files = text_files(path)
        num_bytes = sum(file.stat().st_size for file in files)
        tokens, name = on_disk(files, read_texts(files), tokenizer, cache, lambda done: tell(done, num_bytes)), str(path)
    return ResidentCorpus(balanced(tokens, draw, name), draw)


def balanced(tokens: Tokens, draw: Draw, name: str) -> Tokens:
    """Make sure that there is a batch to train on and a window to hold out, if need be by holding out the end of the text.

    Hashes may put all of a short text on one side. Raises BadSettings, with the numbers, for a text that is too short either way.
    """
    num_train, num_held_out = len(tokens.train), len(tokens.held_out)
    needed = draw.num_batch_tokens + draw.num_window_tokens
    if num_train + num_held_out < needed:
        raise BadSettings(
            f"{name} holds {num_train + num_held_out} tokens; one batch and its held-out part need {needed}"
            f" ({draw.batch_size} + 1 sequences of {draw.num_window_tokens})",
            hint="give --data more text",
        )
    if num_train >= draw.num_batch_tokens and num_held_out >= draw.num_window_tokens:
        return tokens
    whole = np.concatenate([tokens.train, tokens.held_out])
    num_tail = max(draw.num_window_tokens, min(int(len(whole) * HELD_OUT_SHARE), len(whole) - draw.num_batch_tokens))
    return Tokens(whole[:-num_tail], whole[-num_tail:], tokens.bytes_per_token)
