"""A streamed data set: its documents from any place on, and batches out of one buffer after the other."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from gossamer.peer.text import streaming
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import load_corpus
from gossamer.peer.text.document import Document, is_held_out
from gossamer.peer.text.document_stream import Bookmark, DocumentStream, open_stream
from gossamer.peer.text.streaming import StreamedCorpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadSettings, TransportError
from gossamer.protocol.run.sections import DataSection, TokenizerSection

BYTES = load_tokenizer(TokenizerSection())
DRAW = Draw(run_seed=0, peer=b"a", batch_size=2, sequence_length=16)
OTHER = Draw(run_seed=0, peer=b"b", batch_size=2, sequence_length=16)
REVISION = "0" * 40
FIRST_BUFFER_DOCUMENTS = 500  # more than the 360 that it takes, and far fewer than two buffers do


def document(number: int) -> str:
    return f"document {number} says {number * 7919 % 1000} "


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> DataSection:
    folder = tmp_path_factory.mktemp("data")
    for shard in range(4):
        rows = [{"text": document(number)} for number in range(shard, 6000, 4)]
        (folder / f"train-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSection(source="huggingface", name=str(folder), revision=REVISION)


@pytest.fixture
def closing() -> Iterator[list[StreamedCorpus]]:
    corpora: list[StreamedCorpus] = []
    yield corpora
    for corpus in corpora:
        corpus.close()


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least: 256 batches, of which windows of 16 tokens make 271 steps."""
    monkeypatch.setattr(streaming, "MIN_BUFFER_TOKENS", 0)


def corpus_of(section: DataSection, closing: list[StreamedCorpus], draw: Draw = DRAW) -> StreamedCorpus:
    closing.append(StreamedCorpus(open_stream(section, draw), BYTES, draw))
    return closing[-1]


def steps(corpus: StreamedCorpus, first: int, end: int) -> torch.Tensor:
    return torch.stack([corpus.batch(step) for step in range(first, end)])


def test_batches_go_on_through_buffers(section: DataSection, closing: list[StreamedCorpus]) -> None:
    corpus = corpus_of(section, closing)
    batches = steps(corpus, 0, 600)
    assert batches.shape == (600, 2, 17)
    assert batches.dtype == torch.int64
    windows = {bytes(window.tolist()) for window in batches.flatten(0, 1)}
    assert len(windows) > 0.9 * 1200


@pytest.mark.parametrize("step", [1, 5, 271, 272, 500])
def test_a_resumed_peer_reads_what_it_would_have_read(section: DataSection, closing: list[StreamedCorpus], step: int) -> None:
    uninterrupted, killed = corpus_of(section, closing), corpus_of(section, closing)
    steps(uninterrupted, 0, step)
    steps(killed, 0, step)
    cursor = json.loads(json.dumps(killed.cursor()))
    resumed = corpus_of(section, closing)
    resumed.restore(cursor)
    assert torch.equal(steps(resumed, step, step + 300), steps(uninterrupted, step, step + 300))


def test_peers_train_apart_and_are_measured_alike(section: DataSection, closing: list[StreamedCorpus]) -> None:
    mine, theirs = corpus_of(section, closing), corpus_of(section, closing, OTHER)
    assert not torch.equal(mine.batch(0), theirs.batch(0))
    assert all(torch.equal(a, b) for a, b in zip(mine.held_out_batches(3), theirs.held_out_batches(3), strict=True))


def test_held_out_documents_are_not_trained_on(section: DataSection, closing: list[StreamedCorpus]) -> None:
    corpus = corpus_of(section, closing, Draw(0, b"a", batch_size=2, sequence_length=100))
    train = [bytes(window.tolist()) for window in steps(corpus, 0, 250).flatten(0, 1)]
    held_out = {document(number).encode() for number in range(6000) if is_held_out(document(number))}
    assert 0.03 < len(held_out) / 6000 < 0.07
    assert not any(text in window for text in held_out for window in train)
    measured = [bytes(window.tolist()) for batch in corpus.held_out_batches(20) for window in batch]
    assert all(any(text in window for text in held_out) for window in measured)


class Line(DocumentStream):
    """A data set behind a network that lets so many more documents through, then is slow, or dead."""

    def __init__(self, section: DataSection, num_documents: int) -> None:
        super().__init__(datasets.load_dataset(section.name, split="train", streaming=True), "text", DRAW)
        self.num_documents = num_documents
        self.is_dead = False
        self.is_open = threading.Event()

    def read(self, place: Bookmark) -> Iterator[tuple[Document, Bookmark]]:
        for found in super().read(place):
            self.num_documents -= 1
            if self.num_documents < 0:
                if self.is_dead:
                    raise ConnectionError("no route")
                self.is_open.wait(timeout=20)
            yield found


def corpus_behind(line: Line, closing: list[StreamedCorpus]) -> StreamedCorpus:
    closing.append(StreamedCorpus(line, BYTES, DRAW))
    return closing[-1]


def test_a_dead_network_makes_training_read_the_current_buffer_again(
    section: DataSection, closing: list[StreamedCorpus], caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(section, FIRST_BUFFER_DOCUMENTS)
    line.is_dead = True
    corpus = corpus_behind(line, closing)
    corpus.batch(0)
    num_steps = corpus.cursor()["steps"][1]
    first, second = steps(corpus, 0, num_steps), steps(corpus, num_steps, 2 * num_steps)
    assert "late (no route)" in caplog.text
    assert not torch.equal(first, second)
    resumed = corpus_of(section, closing)
    resumed.restore(corpus.cursor())
    assert torch.equal(resumed.batch(num_steps + 3), second[3])


class Damaged(DocumentStream):
    """A data set in which a reader meets an error that is none of the operating system's."""

    def __init__(self, section: DataSection, error: Exception, *, is_held_out_readable: bool) -> None:
        super().__init__(datasets.load_dataset(section.name, split="train", streaming=True), "text", DRAW)
        self._error = error
        self._is_held_out_readable = is_held_out_readable

    def in_order(self) -> Iterator[Document]:
        return super().in_order() if self._is_held_out_readable else self._fail()

    def read(self, place: Bookmark) -> Iterator[tuple[Document, Bookmark]]:
        return self._fail()

    def _fail(self) -> Iterator[Any]:
        raise self._error
        yield  # a generator fails where it is read


@pytest.mark.parametrize("is_held_out_readable", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("a shard\nis damaged"), BadSettings), (ConnectionError("a shard is damaged"), TransportError)]
)
def test_a_data_set_that_cannot_be_read_is_no_bug(
    section: DataSection, closing: list[StreamedCorpus], error: Exception, kind: type[Exception], *, is_held_out_readable: bool
) -> None:
    with pytest.raises(kind, match="the data set cannot be read: a shard is damaged"):
        closing.append(StreamedCorpus(Damaged(section, error, is_held_out_readable=is_held_out_readable), BYTES, DRAW))
        closing[-1].batch(0)


def test_a_slow_network_is_waited_for_only_so_long(
    section: DataSection, closing: list[StreamedCorpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(section, FIRST_BUFFER_DOCUMENTS)
    corpus = corpus_behind(line, closing)
    corpus.batch(0)
    num_steps = corpus.cursor()["steps"][1]
    monkeypatch.setattr(streaming, "WAIT_S", 0.01)
    corpus.batch(num_steps)
    assert corpus.cursor()["steps"] == (0, 2 * num_steps)
    monkeypatch.setattr(streaming, "WAIT_S", 20.0)
    line.is_open.set()
    corpus.batch(2 * num_steps)
    assert corpus.cursor()["steps"][0] == 2 * num_steps


def test_a_stop_ends_the_wait_and_the_next_start_goes_on_with_the_next_buffer(
    section: DataSection, closing: list[StreamedCorpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "WAIT_S", 20.0)
    looks = iter([False, True])
    line = Line(section, FIRST_BUFFER_DOCUMENTS)
    corpus, whole = StreamedCorpus(line, BYTES, DRAW, lambda: next(looks)), corpus_of(section, closing)
    closing.append(corpus)
    corpus.batch(0)
    num_steps = corpus.cursor()["steps"][1]
    corpus.batch(num_steps)
    assert not line.is_open.is_set() and next(looks, None) is None, "it waited for the buffer"
    line.is_open.set()
    resumed = corpus_of(section, closing)
    resumed.restore(corpus.cursor())
    whole.batch(0)
    assert torch.equal(resumed.batch(num_steps), whole.batch(num_steps))


def test_too_small_a_data_set_is_refused_with_the_numbers(tmp_path: Path, closing: list[StreamedCorpus]) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "short"}\n')
    section = DataSection(source="huggingface", name=str(tmp_path), revision=REVISION)
    with pytest.raises(BadSettings, match=r"held-out part has 0 tokens; one sequence needs 17"):
        corpus_of(section, closing)
    held_out = next(text for text in (document(number) for number in range(1000)) if is_held_out(text))
    (tmp_path / "train.jsonl").write_text(f'{{"text": "{held_out}"}}\n{{"text": "x"}}\n')
    with pytest.raises(BadSettings, match=r"one batch needs 34"):
        corpus_of(section, closing).batch(0)


def test_a_manifest_with_a_streamed_data_set_gets_it(section: DataSection, closing: list[StreamedCorpus], tmp_path: Path) -> None:
    corpus = load_corpus(section, BYTES, DRAW, Path(section.name or ""), tmp_path)
    assert isinstance(corpus, StreamedCorpus)
    closing.append(corpus)
    assert corpus.bytes_per_token == 1.0
