"""Conversations: which of their tokens train, with marks in the template and without, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.peer.text.conversations import ConversationTokenizer, template_digest
from gossamer.peer.text.documents import read_conversations
from gossamer.peer.text.labels import beginnings, ids_of
from gossamer.peer.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_digest
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.protocol.run.sections import DataSection, TokenizerSection
from tests.peer.fine_tuned import END, MARKED, PLAIN, chat_tokenizer

Messages = list[dict[str, str]]
REWRITES = "{% for m in messages %}{% if loop.last %}>{% endif %}{{ m.content }}<|end|>{% endfor %}"  # the last message looks otherwise


def data(format: str = "chat", **keys: Any) -> DataSection:
    return DataSection(source="text", format=format, column="messages" if format == "chat" else "completion", **keys)


def tokenizer_with(template: str | None) -> Tokenizer:
    pretrained = chat_tokenizer(template)
    return Tokenizer("chat", 260, 256, tokenizer_digest(pretrained), pretrained)


def texts_of(tokenizer: Tokenizer, marks: np.ndarray) -> tuple[str, list[str]]:
    """Return the whole text, and each piece of it that trains."""
    pieces, before = [], False
    for token, trains in zip(ids_of(torch.from_numpy(marks.astype(np.int64))).tolist(), marks >= 0, strict=True):
        if trains:
            pieces = [*pieces, [token]] if not before else [*pieces[:-1], [*pieces[-1], token]]
        before = bool(trains)
    whole = tokenizer.pretrained.decode(ids_of(torch.from_numpy(marks.astype(np.int64))).tolist())
    return whole, [tokenizer.pretrained.decode(piece) for piece in pieces]


MARKING, PROMPTING = (ConversationTokenizer(tokenizer_with(template), data()) for template in (MARKED, PLAIN))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>\0"), min_size=1, max_size=8)
CHATS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=5)


@given(CHATS)
def test_the_assistants_messages_train_and_nothing_else_whatever_the_template(chat: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in chat]
    (marked,), (prompted,) = (encoder.encode_all([json.dumps(messages)]) for encoder in (MARKING, PROMPTING))
    unprompted = len(f"{chat[0][1]}".encode()) + 2 if chat[0][0] == "assistant" else 0  # its role and its end are tokens
    assert np.array_equal(marked[unprompted:], prompted[unprompted:]) and (prompted[:unprompted] < 0).all()
    whole, trained = texts_of(tokenizer_with(MARKED), marked)
    assert whole == "".join(f"<|{role}|>{text}{END}" for role, text in chat)
    assert trained == [f"{text}{END}" for role, text in chat if role == "assistant"]
    assert beginnings(marked).tolist() == [0]
    assert MARKING.num_text_bytes(json.dumps(messages)) == sum(len(text.encode()) for role, text in chat if role == "assistant")


@given(TEXT, TEXT)
def test_of_a_pair_the_completion_trains_up_to_the_end_of_the_document(prompt: str, completion: str) -> None:
    tokenizer = load_tokenizer(TokenizerSection())
    encoder = ConversationTokenizer(tokenizer, data("pairs"))
    (marks,) = encoder.encode_all([json.dumps([prompt, completion])])
    expected = [*prompt.encode(), *completion.encode(), 0]
    assert ids_of(torch.from_numpy(marks.astype(np.int64))).tolist() == expected
    assert (marks >= 0).tolist() == [False] * len(prompt.encode()) + [True] * (len(completion.encode()) + 1)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "has no chat template"), (REWRITES, "rewrites a message"), ("{{ messages[7].content }}", "cannot write")],
)
def test_a_template_that_does_not_tell_answers_apart_is_refused(template: str | None, reason: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with pytest.raises(BadManifest, match=reason) as caught:
        ConversationTokenizer(tokenizer_with(template), data()).encode_all([json.dumps(chat)])
    assert caught.value.hint


def test_another_template_than_the_runs_is_refused_with_both_digests() -> None:
    section = data(template=template_digest(MARKED))
    ConversationTokenizer(tokenizer_with(MARKED), section)
    with pytest.raises(BadManifest, match=rf"{template_digest(PLAIN)}, the manifest's {section.template}"):
        ConversationTokenizer(tokenizer_with(PLAIN), section)


ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}], "prompt": "p", "completion": "c", "n": 1},
    {"messages": [], "prompt": "", "completion": "c", "n": 2},
    {"messages": [{"role": "assistant", "content": "again"}], "prompt": "q", "completion": "d", "n": 3},
]


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("format", ["chat", "pairs"])
def test_conversations_are_read_from_tables_without_empty_ones(kind: str, format: str, tmp_path: Path) -> None:
    blocks = list(read_conversations([written(tmp_path, kind, ROWS)], data(format)))
    columns = ("messages",) if format == "chat" else ("prompt", "completion")
    expected = [[row[column] for column in columns] for row in (ROWS[0], ROWS[2])]
    assert [json.loads(str(block.text)) for block in blocks] == [each[0] if format == "chat" else each for each in expected]
    assert all(block.ends_document for block in blocks)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("section", "reason", "hint"),
    [
        (DataSection(source="text", format="chat", column="talk"), "no messages in a column 'talk'", "of messages: messages"),
        (DataSection(source="text", format="chat", column="n"), "no messages in a column 'n'", "of messages: messages"),
        (
            data("pairs", prompt_column="ask"),
            "no text in a column 'ask'",
            "column and prompt_column; its columns of text: prompt, completion",
        ),
    ],
)
def test_an_unknown_column_is_named_with_those_that_could_be_meant(
    kind: str, section: DataSection, reason: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(BadManifest, match=reason) as caught:
        list(read_conversations([written(tmp_path, kind, ROWS)], section))
    assert hint in caught.value.hint


def test_other_files_and_malformed_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadSettings, match="notes.txt holds no conversations"):
        list(read_conversations([tmp_path / "notes.txt"], data()))
    bad: Messages = [{"role": "robot", "content": "beep"}]
    with pytest.raises(BadSettings, match="row 1: a conversation is a list of messages") as caught:
        list(read_conversations([written(tmp_path, "jsonl", [ROWS[0], {"messages": bad}])], data()))
    assert caught.value.hint


def test_half_a_surrogate_pair_is_named_as_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"prompt": "hello", "completion": "\ud83d"}) + "\n")
    with pytest.raises(BadSettings, match="row 1: .*surrogates not allowed"):
        list(read_conversations([tmp_path / "rows.jsonl"], data("pairs")))
