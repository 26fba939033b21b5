"""The corpus of a fine-tuning run: conversations in packed sequences, some of them held out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import PackedCorpus, load_corpus, need_allowed, need_answers
from gossamer.peer.text.labels import num_targets
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.sections import DataSection, TokenizerSection
from tests.peer.fine_tuned import pairs

TOKENIZER = load_tokenizer(TokenizerSection())
PAIRS = DataSection(source="text", format="pairs", column="completion", mask_documents=True)


def corpus(tmp_path: Path, number: int, peer: bytes = b"me", data: DataSection = PAIRS) -> PackedCorpus:
    draw = Draw(1, peer, 3, 31)
    loaded = load_corpus(data, TOKENIZER, draw, pairs(tmp_path / "pairs.jsonl", number, 1), tmp_path / "cache")
    assert isinstance(loaded, PackedCorpus)
    return loaded


def rows(batches: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch.tolist()]


def test_a_pass_visits_each_sequence_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    loaded = corpus(tmp_path, 90)
    num_sequences = len(loaded._train)
    read = rows([loaded.batch(step) for step in range(2 * num_sequences)])
    first, second = read[:num_sequences], read[num_sequences : 2 * num_sequences]
    assert sorted(first) == sorted(second) and len(set(first)) > 1 and first != second
    assert rows([loaded.batch(5)]) == read[15:18], "a batch depends on its step alone"
    assert rows([corpus(tmp_path, 90, b"you").batch(0)]) != read[:3], "peers read in different orders"


def test_held_out_conversations_are_never_trained_on_and_the_same_at_each_peer(tmp_path: Path) -> None:
    loaded = corpus(tmp_path, 400)
    held_out = rows(loaded.held_out_batches(4))
    assert held_out == rows(corpus(tmp_path, 400, b"you").held_out_batches(4))
    trained = {row for step in range(len(loaded._train)) for row in rows([loaded.batch(step)])}
    assert not trained & set(held_out)
    assert all(int(num_targets(batch)) for batch in loaded.held_out_batches(4))


def test_of_few_conversations_the_last_are_held_out(tmp_path: Path) -> None:
    loaded = corpus(tmp_path, 2, data=PAIRS.model_copy(update={"mask_documents": False}))
    assert (len(loaded._train), loaded.num_held_out()) == (1, 1)
    with pytest.raises(BadSettings, match="gives 1 sequences of 32 tokens") as caught:
        corpus(tmp_path, 1)
    assert caught.value.hint


def test_bytes_count_what_trains(tmp_path: Path) -> None:
    """A byte is a token here, and each completion ends with one token more."""
    assert 0.6 < corpus(tmp_path, 90).bytes_per_token < 1.0


def test_data_in_which_nothing_trains_is_refused_before_a_run_is_hosted(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "%s", "completion": "yes"}\n' % ("why? " * 20))
    with pytest.raises(BadSettings, match="no token of an answer is among the first 32") as caught:
        need_answers(PAIRS, TOKENIZER, 31, path)
    assert "raise sequence_length" in caught.value.hint
    need_answers(PAIRS, TOKENIZER, 127, path)
    with pytest.raises(BadSettings, match="own conversations"):
        need_allowed(PAIRS, None)
