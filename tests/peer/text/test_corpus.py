from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.peer.text import streaming
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import ResidentCorpus, TextReading, load_corpus, try_text
from gossamer.peer.text.document import is_held_out
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.protocol.run.sections import DataSection, TokenizerSection

BYTES = load_tokenizer(TokenizerSection())
BUILTIN, TEXT = DataSection(), DataSection(source="text")


def draw(peer: bytes = b"a") -> Draw:
    return Draw(run_seed=0, peer=peer, batch_size=8, sequence_length=128)


def load_text(path: Path, cache: Path) -> ResidentCorpus:
    corpus = load_corpus(TEXT, BYTES, draw(), path, cache)
    assert isinstance(corpus, ResidentCorpus)
    return corpus


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> ResidentCorpus:
    corpus = load_corpus(BUILTIN, BYTES, draw(), None, tmp_path_factory.mktemp("cache"))
    assert isinstance(corpus, ResidentCorpus)
    return corpus


def test_the_built_in_corpus_is_read_as_bytes(builtin: ResidentCorpus) -> None:
    assert builtin.tokens.train.dtype == np.uint8
    assert b"def __init__(self" in builtin.tokens.train.tobytes()
    assert builtin.bytes_per_token == 1.0


def test_batches_are_what_the_trainer_expects(builtin: ResidentCorpus) -> None:
    batch = builtin.batch(0)
    assert batch.shape == (8, 129)
    assert batch.dtype == torch.int64
    assert not torch.equal(batch, builtin.batch(1))
    text = bytes(batch[0].tolist())
    assert text in builtin.tokens.train.tobytes()


def test_the_step_is_the_whole_cursor(builtin: ResidentCorpus, tmp_path: Path) -> None:
    again = load_corpus(BUILTIN, BYTES, draw(), None, tmp_path)
    again.restore(builtin.cursor())
    assert torch.equal(again.batch(12345), builtin.batch(12345))


def test_peers_train_apart_and_are_measured_alike(builtin: ResidentCorpus, tmp_path: Path) -> None:
    other = load_corpus(BUILTIN, BYTES, draw(b"b"), None, tmp_path)
    assert not torch.equal(other.batch(0), builtin.batch(0))
    for mine, theirs in zip(builtin.held_out_batches(4), other.held_out_batches(4), strict=True):
        assert torch.equal(mine, theirs)


def test_held_out_text_is_not_trained_on(builtin: ResidentCorpus) -> None:
    train = builtin.tokens.train.tobytes()
    windows = torch.cat(builtin.held_out_batches(4))
    assert sum(bytes(window.tolist()) in train for window in windows) <= 2  # licence headers


def test_a_text_of_the_operators_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"line {number}\n" for number in range(30_000)))
    corpus = load_text(tmp_path / "text", tmp_path / "cache")
    share = len(corpus.tokens.held_out) / (len(corpus.tokens.train) + len(corpus.tokens.held_out))
    assert 0.005 < share < 0.2
    corpus.close()


NEEDED = 9 * 129


@pytest.mark.parametrize("num_tokens", [NEEDED, NEEDED + 1, 3 * NEEDED, 20 * NEEDED])
@pytest.mark.parametrize("salt", range(4))
def test_short_texts_have_both_sides(tmp_path: Path, num_tokens: int, salt: int) -> None:
    text = f"{salt} ".ljust(num_tokens - 1, "x")
    (tmp_path / "text").write_text(text)
    tokens = load_text(tmp_path / "text", tmp_path / "cache").tokens
    assert len(tokens.train) + len(tokens.held_out) == num_tokens
    assert len(tokens.train) >= 8 * 129
    assert len(tokens.held_out) >= 129


@pytest.mark.parametrize("num_tokens", [0, 2, NEEDED - 1])
def test_less_than_a_batch_is_refused_with_the_numbers(tmp_path: Path, num_tokens: int) -> None:
    (tmp_path / "text").write_text("x" * (num_tokens - 1))
    with pytest.raises(BadSettings, match=f"holds {num_tokens} tokens; .* need {NEEDED}") as caught:
        load_text(tmp_path / "text", tmp_path / "cache")
    assert caught.value.hint


def test_missing_and_unwanted_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="its own text") as caught:
        load_corpus(TEXT, BYTES, draw(), None, tmp_path)
    assert "--data" in caught.value.hint
    with pytest.raises(BadSettings, match="fixed"):
        load_corpus(BUILTIN, BYTES, draw(), tmp_path, tmp_path)


def test_a_folder_that_a_manifest_names_is_read_only_if_the_operator_names_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is another's, and the files are ours."""
    monkeypatch.setattr(streaming, "MIN_BUFFER_TOKENS", 0)  # else it is read more than a hundred times
    folder = tmp_path / "diary" / "private"
    folder.mkdir(parents=True)
    held_out = next(text for text in (f"{number} ".ljust(200, "x") for number in range(1000)) if is_held_out(text))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (held_out, *["y" * 300] * 20)))
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "diary/private", "./diary/private", f"{tmp_path}/diary/../diary/private"):
        section = DataSection(source="huggingface", name=name, revision="0" * 40)
        for path in (None, tmp_path / "elsewhere", folder / "train.jsonl"):
            with pytest.raises(BadSettings, match="files of this machine") as caught:
                load_corpus(section, BYTES, draw(), path, tmp_path)
            assert caught.value.hint.endswith(f"--data {folder}")
        with closing(load_corpus(section, BYTES, draw(), tmp_path / "diary", tmp_path)) as corpus:
            assert set(corpus.batch(0).flatten().tolist()) == {ord("y"), 0}


@pytest.mark.parametrize("name", ["text", "json", "parquet"])
def test_a_data_set_without_an_owner_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such names make the library read all files of the working directory."""
    (tmp_path / "diary.txt").write_text("private")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadManifest, match="has no owner") as caught:
        load_corpus(DataSection(source="huggingface", name=name, revision="0" * 40), BYTES, draw(), None, tmp_path)
    assert "org/name" in caught.value.hint


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="no folder of this machine") as caught:
        load_corpus(DataSection(source="huggingface", name=str(tmp_path / "absent")), BYTES, draw(), tmp_path, tmp_path)
    assert caught.value.hint


def test_what_was_read_and_what_not_is_reported_also_of_text_that_is_tokenized_already(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("line\n" * 5000)
    (tmp_path / "text" / "b.png").write_bytes(b"\x89PNG\0")
    reports: list[TextReading] = []
    for _ in range(2):
        load_corpus(TEXT, BYTES, draw(), tmp_path / "text", tmp_path / "cache", report=reports.append)
    assert reports[0] == reports[1]
    assert (reports[0].num_files, reports[0].num_bytes) == (1, 25_001)
    assert reports[0].skipped == (f"{tmp_path / 'text' / 'b.png'} is binary, not text",)


def test_trying_a_text_reads_no_more_than_a_batch_needs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 50_000)
    (tmp_path / "b.jsonl").write_text("broken")
    try_text(TEXT, BYTES, draw(), tmp_path)
    with pytest.raises(BadSettings, match="holds 0 tokens"):
        (tmp_path / "a.txt").write_text("")
        try_text(TEXT, BYTES, draw(), tmp_path / "a.txt")
    with pytest.raises(BadSettings, match="own text"):
        try_text(TEXT, BYTES, draw(), None)
