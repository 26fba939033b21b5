"""Corpora: batches of a peer's text, each a pure function of the run's seed, the peer and the step.

So the step number is the only state, except for a streamed data set (peer/text/streaming.py), whose `cursor` is a place in its stream.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from gossamer.peer.machine.extras import need_extra
from gossamer.peer.text.batches import Draw, IndexArray, WindowOrder, cut, held_out_batches, num_sequences, permutation, random_stream
from gossamer.peer.text.document import HELD_OUT_SHARE
from gossamer.peer.text.documents import GIVE_TEXT, file_status, read_conversations, read_texts, standard_library, text_files
from gossamer.peer.text.packing import PackedSequences
from gossamer.peer.text.token_cache import Tokens, in_memory, on_disk
from gossamer.protocol.errors import BadManifest, BadSettings

if TYPE_CHECKING:
    from gossamer.peer.text.documents import Block
    from gossamer.peer.text.tokenizer import Encoder, Tokenizer
    from gossamer.protocol.run.sections import DataSection, DataSource

NUM_TRIED: Final = 256  # conversations, before a run is hosted
BLOCK: Final = 1024  # windows of a mixture that are distributed together


class Corpus(Protocol):
    """The source of batches. Call it from one thread.

    A corpus that depends on the step number alone has an empty cursor. One without threads or files has nothing to close.
    """

    bytes_per_token: float

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step: int64[B, L+1], new, on the CPU."""

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        """Return batches (int64[B, L+1]) of text that is never trained on, the same ones at each call."""

    def num_held_out(self) -> int:
        """Return how many held-out sequences there are that do not overlap."""

    def cursor(self) -> dict[str, Any]:
        """Return, JSON-able, the state beside the step number that `batch` needs to continue exactly here."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor of this corpus."""
        return

    def close(self) -> None:
        """Stop threads and close files."""
        return


class ResidentCorpus(Corpus):
    """A whole text on this machine, in memory or mapped from a file; its batches depend on the step number alone."""

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

    def num_held_out(self) -> int:
        """Return how many held-out sequences there are; see Corpus."""
        return num_sequences(self.tokens.held_out, self._draw)


class PackedCorpus(Corpus):
    """Conversations packed into sequences, of whose tokens only some train; its batches depend on the step number alone.

    A pass visits each sequence once, in an order that depends on the run's seed, the peer and the pass.
    """

    def __init__(self, train: PackedSequences, held_out: PackedSequences, bytes_per_token: float, draw: Draw) -> None:
        self.bytes_per_token = bytes_per_token
        self._train = train
        self._held_out = held_out
        self._draw = draw
        self._order = lru_cache(maxsize=2)(lambda number: permutation(random_stream(draw, b"sequences", number), len(train)))

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step, marked (labels.py); see Corpus."""
        first = step * self._draw.batch_size
        places = (divmod(position, len(self._train)) for position in range(first, first + self._draw.batch_size))
        return torch.from_numpy(self._train.sequences(np.asarray([self._order(number)[place] for number, place in places])))

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        """Return held-out batches, spread evenly over the held-out conversations; see Corpus."""
        num_sequences = num_batches * self._draw.batch_size
        chosen = np.arange(num_sequences) * len(self._held_out) // num_sequences
        return list(torch.split(torch.from_numpy(self._held_out.sequences(chosen)), self._draw.batch_size))

    def num_held_out(self) -> int:
        """Return how many held-out sequences there are; see Corpus."""
        return len(self._held_out)


class MixedCorpus(Corpus):
    """Batches whose windows come from several corpora, which must have one window per batch.

    The source of a window depends on the run's seed and the window's number, the same at every peer. In each block of BLOCK windows a
    source has as many as its weight says, so shares are exact.
    """

    def __init__(self, parts: Sequence[Corpus], weights: Sequence[float], draw: Draw) -> None:
        self._parts = parts
        self._draw = draw
        self._counts = windows_per_block(weights)
        self._block = lru_cache(maxsize=1)(self._shuffled)
        self.bytes_per_token = math.fsum(count * part.bytes_per_token for count, part in zip(self._counts, parts, strict=True)) / BLOCK

    def batch(self, step: int) -> Tensor:
        """Return the batch of an inner step; see Corpus."""
        first = step * self._draw.batch_size
        places = map(self._place, range(first, first + self._draw.batch_size))
        return torch.cat([self._parts[part].batch(number) for part, number in places])

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        """Return held-out batches with as many windows of each source as its weight says; see Corpus."""
        places = [self._place(position) for position in range(num_batches * self._draw.batch_size)]
        most = [max((number + 1 for at, number in places if at == part), default=0) for part in range(len(self._parts))]
        windows = [part.held_out_batches(count) if count else [] for part, count in zip(self._parts, most, strict=True)]
        return list(torch.split(torch.cat([windows[part][number] for part, number in places]), self._draw.batch_size))

    def num_held_out(self) -> int:
        """Return how many sequences there are until the first source has no more; see Corpus."""
        return min(part.num_held_out() * BLOCK // count for part, count in zip(self._parts, self._counts, strict=True) if count)

    def cursor(self) -> dict[str, Any]:
        """Return the cursors of the parts."""
        return {"parts": [part.cursor() for part in self._parts]}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor."""
        for part, of_part in zip(self._parts, cursor["parts"], strict=True):
            part.restore(of_part)

    def close(self) -> None:
        """Close the parts."""
        for part in self._parts:
            part.close()

    def _place(self, position: int) -> tuple[int, int]:
        """Return the part of the window at a position of the run, and the number of the window within that part."""
        block, place = divmod(position, BLOCK)
        parts, ranks = self._block(block)
        part = int(parts[place])
        return part, block * self._counts[part] + int(ranks[place])

    def _shuffled(self, block: int) -> tuple[IndexArray, IndexArray]:
        """Return for each window of a block its part, and the number of earlier windows of that part."""
        shuffled = permutation(random_stream(Draw(self._draw.run_seed, b"", 1, 1), b"mixture", block), BLOCK)
        parts = np.repeat(np.arange(len(self._counts)), self._counts)[shuffled]
        ranks = np.empty(BLOCK, dtype=np.int64)
        for part, count in enumerate(self._counts):
            ranks[parts == part] = np.arange(count)
        return parts, ranks


def windows_per_block(weights: Sequence[float]) -> list[int]:
    """Return the number of windows of a block for each weight: BLOCK in total, rounded by the largest remainders."""
    shares = BLOCK * np.asarray(weights) / math.fsum(weights)
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[: BLOCK - counts.sum()]] += 1
    return list(map(int, counts))


ShowProgress = Callable[[int, int], None]  # called with the bytes tokenized so far and the total


@dataclass(frozen=True, slots=True)
class TextReading:
    """What was read of an operator's files."""

    num_files: int
    num_bytes: int  # of text
    skipped: tuple[str, ...]  # a sentence about each file that was left out


Report = Callable[[TextReading], None]


@dataclass(frozen=True, slots=True)
class _OwnText:
    """The operator's `--data`, where its tokens are kept, and what reports on its reading."""

    path: Path
    cache: Path
    show: ShowProgress
    report: Report

    def tokens(self, read: Callable[[list[Path], list[str]], Iterator[Block]], encoder: Encoder, columns: str) -> Tokens:
        """Return the tokens of what `read` yields of its files; `read` adds to a list what it leaves out."""
        files, skipped = text_files(self.path), list[str]()
        num_bytes = sum(file_status(file).st_size for file in files)
        tokens = on_disk(files, read(files, skipped), encoder, self.cache, lambda done: self.show(done, num_bytes), columns, skipped)
        self.report(TextReading(len(files) - len(tokens.skipped), tokens.num_bytes, tokens.skipped))
        return tokens


def load_corpus(
    section: DataSection,
    tokenizer: Tokenizer,
    draw: Draw,
    path: Path | None,
    cache: Path,
    show: ShowProgress = lambda done, total: None,
    report: Report = lambda reading: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Corpus:
    """Load the corpus of the manifest's data section and the operator's `--data` path; tokens may be kept in `cache`.

    `report` is called with what was read of the operator's files. No batch waits for the network once `is_stopping`. Raises BadSettings if
    a path is missing or not allowed, if no file is text, or if the text is less than one batch. Raises BadManifest for a data set that is
    neither of the hub nor a folder.
    """
    need_allowed(section, path)
    own = None if path is None else _OwnText(path, cache, show, report)
    if section.has_prompts and own is not None:
        return _load_conversations(section, tokenizer, draw, own)
    if not section.mixture:
        return _load(section, tokenizer, draw, own, is_stopping)
    one_window = replace(draw, batch_size=1)
    parts = [_load(source, tokenizer, one_window, own, is_stopping) for source in section.mixture]
    return MixedCorpus(parts, [source.weight for source in section.mixture], draw)


def need_allowed(section: DataSection, path: Path | None) -> None:
    """Raise BadSettings unless the operator's `--data` is what the run asks for; BadManifest for a data set without an owner."""
    sources = section.mixture or (section,)
    folders = [folder for source in sources if (folder := _named_folder(source)) is not None]
    wants_text = any(source.source == "text" for source in sources)
    if path is None and section.has_prompts:
        raise BadSettings("this run trains each peer on its own conversations", hint="give --data files of jsonl or parquet")
    if path is None and wants_text:
        raise BadSettings("this run trains each peer on its own text", hint=GIVE_TEXT)
    for folder in folders:
        _need_consent(folder, path)
    if path is not None and not wants_text and not folders:
        raise BadSettings(f"this run's data is fixed ({section.source}), so --data is not allowed", hint="leave --data out")


def try_text(section: DataSection, tokenizer: Tokenizer, draw: Draw, path: Path | None) -> None:
    """Raise BadSettings or BadManifest, as training would, for text that is not allowed, cannot be read or is too little.

    Reads only as much as one batch needs, of `--data` alone.
    """
    need_allowed(section, path)
    if section.has_prompts and path is not None:
        need_answers(section, tokenizer, draw.num_window_tokens - 1, path)
        return
    draw = replace(draw, batch_size=1) if section.mixture else draw
    for source in section.mixture or (section,):
        if source.source != "text" or path is None:
            continue
        num_tokens, needed = 0, _needed_tokens(draw)
        for block in read_texts(text_files(path), source.column):
            num_tokens += sum(map(len, tokenizer.encode_all([block.text]))) + block.ends_document
            if num_tokens >= needed:
                break
        _need_enough(num_tokens, draw, str(path))


def _named_folder(source: DataSource) -> Path | None:
    """Return the folder of this machine that a manifest names as a data set, None for one of the hub. Raises BadManifest.

    Names without an owner are refused: the library of data sets would read files of the working directory for some, such as `text`.
    """
    if source.source != "huggingface" or source.name is None:
        return None
    if source.name.startswith("/") or Path(source.name).exists():
        return Path(source.name)
    if "/" not in source.name:
        raise BadManifest(f"the data set {source.name!r} has no owner", hint="set [data] name to org/name, or to the path of a folder")
    return None


def _need_consent(folder: Path, path: Path | None) -> None:
    """Raise BadSettings unless the operator's `--data` names this folder or one around it: others wrote the manifest."""
    if not folder.is_dir():
        raise BadSettings(f"this run trains on the data set in {folder}, which is no folder of this machine", hint="copy it to that place")
    if path is None or not folder.resolve().is_relative_to(path.resolve()):
        raise BadSettings(
            f"this run trains on files of this machine, in {folder}", hint=f"to let this peer read them: --data {folder.resolve()}"
        )


def _load(source: DataSource, tokenizer: Tokenizer, draw: Draw, own: _OwnText | None, is_stopping: Callable[[], bool]) -> Corpus:
    if source.source == "huggingface":
        need_extra("text")
        from gossamer.peer.text.document_stream import open_stream  # `datasets` takes long to import
        from gossamer.peer.text.streaming import StreamedCorpus

        return StreamedCorpus(open_stream(source, draw), tokenizer, draw, is_stopping)
    if source.source == "builtin":
        return ResidentCorpus(
            with_held_out_part(in_memory(standard_library(), tokenizer), draw, "the standard library of this interpreter"), draw
        )
    assert own is not None
    tokens = own.tokens(lambda files, skipped: read_texts(files, source.column, skipped), tokenizer, source.column)
    return ResidentCorpus(with_held_out_part(tokens, draw, str(own.path)), draw)


def _load_conversations(data: DataSection, tokenizer: Tokenizer, draw: Draw, own: _OwnText) -> PackedCorpus:
    from gossamer.peer.text.conversations import ConversationTokenizer, columns_of

    encoder, columns = ConversationTokenizer(tokenizer, data), " ".join(columns_of(data))
    tokens = own.tokens(lambda files, skipped: read_conversations(files, data, skipped), encoder, columns)
    return packed_corpus(tokens, tokenizer.document_end, draw, str(own.path), shares=data.mask_documents)


def need_answers(data: DataSection, tokenizer: Tokenizer, sequence_length: int, path: Path) -> None:
    """Raise BadSettings or BadManifest, as training would, if nothing trains in the first conversations of an operator's files."""
    from gossamer.peer.text.conversations import ConversationTokenizer

    documents = [block.text for block in itertools.islice(read_conversations(text_files(path), data), NUM_TRIED)]
    marks = ConversationTokenizer(tokenizer, data).encode_all(documents)
    packed = PackedSequences(np.concatenate([np.empty(0, np.int32), *marks]), sequence_length + 1, tokenizer.document_end, shares=False)
    if not packed.num_targets:
        raise BadSettings(
            f"in the first {len(documents)} conversations of {path}, no token of an answer is among the first {sequence_length + 1}",
            hint="give --data conversations in which the assistant answers, or raise sequence_length in [inner]",
        )


def packed_corpus(tokens: Tokens, document_end: int, draw: Draw, name: str, *, shares: bool) -> PackedCorpus:
    """Pack the marked tokens of conversations; hold out the end of few conversations. Raises BadSettings for less than two sequences."""
    both = tokens.train, tokens.held_out
    train, held_out = (PackedSequences(side, draw.num_window_tokens, document_end, shares=shares) for side in both)
    num_targets = train.num_targets + held_out.num_targets
    if not len(train) or not len(held_out):
        whole = PackedSequences(np.concatenate(both), draw.num_window_tokens, document_end, shares=shares)
        if len(whole) < 2:
            raise BadSettings(
                f"{name} gives {len(whole)} sequences of {draw.num_window_tokens} tokens of which some train; at least 2 are needed, "
                "one of them to hold out",
                hint="give --data more conversations with the assistant's answers, or raise sequence_length in [inner]",
            )
        num_train = len(whole) - max(1, int(len(whole) * HELD_OUT_SHARE))
        train, held_out = whole.part(0, num_train), whole.part(num_train, len(whole))
    num_text_bytes = tokens.bytes_per_token * sum(map(len, both))
    return PackedCorpus(train, held_out, num_text_bytes / max(1, num_targets), draw)


def with_held_out_part(tokens: Tokens, draw: Draw, name: str) -> Tokens:
    """Ensure a batch to train on and a window to hold out, if necessary by holding out the end of the text.

    Hashes may put all of a short text on one side. Raises BadSettings, with the numbers, for a text too short for both.
    """
    num_train, num_held_out = len(tokens.train), len(tokens.held_out)
    _need_enough(num_train + num_held_out, draw, name)
    if num_train >= draw.num_batch_tokens and num_held_out >= draw.num_window_tokens:
        return tokens
    whole = np.concatenate([tokens.train, tokens.held_out])
    num_tail = max(draw.num_window_tokens, min(int(len(whole) * HELD_OUT_SHARE), len(whole) - draw.num_batch_tokens))
    return Tokens(whole[:-num_tail], whole[-num_tail:], tokens.bytes_per_token)


def _needed_tokens(draw: Draw) -> int:
    return draw.num_batch_tokens + draw.num_window_tokens


def _need_enough(num_tokens: int, draw: Draw, name: str) -> None:
    """Raise BadSettings, with the numbers, for a text too short for a batch and its held-out part."""
    if num_tokens < (needed := _needed_tokens(draw)):
        raise BadSettings(
            f"{name} holds {num_tokens} tokens; one batch and its held-out part need {needed}"
            f" ({draw.batch_size} + 1 sequences of {draw.num_window_tokens})",
            hint="give --data more text",
        )
