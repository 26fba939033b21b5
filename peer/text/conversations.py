"""Conversations as documents: a list of messages, or a prompt and its completion, and which of their tokens train.

A conversation travels from file to tokenizer as the JSON text of its content, so it is held out by that content like any document.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gossamer.peer.text.document import Document
from gossamer.peer.text.labels import Marks, marked
from gossamer.peer.text.tokenizer import Tokenizer, refusing
from gossamer.protocol.errors import BadManifest
from gossamer.protocol.run.sections import DataSection

ASSISTANT: Final = "assistant"
ROLES: Final = ("system", "user", ASSISTANT)
MARKS: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template says with these what the assistant writes
WRITE_PAIRS: Final = 'set [data] format = "pairs", with a column of prompts and one of completions'
OTHER_TEMPLATE: Final = f"put another chat_template.jinja beside the tokenizer, one with {{% generation %}} marks, or {WRITE_PAIRS}"


def columns_of(data: DataSection) -> tuple[str, ...]:
    """Return the columns that a conversation takes."""
    return (data.prompt_column, data.column) if data.format == "pairs" else (data.column,)


def need_columns(name: str, data: DataSection, row: Mapping[str, Any]) -> None:
    """Raise BadManifest, with the columns that could be meant, unless a row holds what the manifest's format says."""
    kind, fits = ("text", _is_text) if data.format == "pairs" else ("messages", _are_messages)
    for column in columns_of(data):
        if column not in row or (row[column] is not None and not fits(row[column])):
            keys = "column and prompt_column" if data.format == "pairs" else "column"
            fitting = ", ".join(key for key, value in row.items() if fits(value))
            raise BadManifest(
                f"{name} has no {kind} in a column {column!r}", hint=f"set [data] {keys}; its columns of {kind}: {fitting or 'none'}"
            )


def conversation(data: DataSection, row: Mapping[str, Any]) -> str:
    """Return the conversation of a row as JSON, empty for one without. Raises ValueError, with the reason, for a malformed one."""
    parts = [row.get(column) for column in columns_of(data)]
    if any(part in (None, "", []) for part in parts):
        return ""
    if data.format == "chat":
        messages: Any = parts[0]
        if not _are_messages(messages):
            raise ValueError(f"a conversation is a list of messages, each with a role of {', '.join(ROLES)} and a content of text")
        parts = [{"role": message["role"], "content": message["content"]} for message in messages]
    elif not all(isinstance(part, str) for part in parts):
        raise ValueError("prompt and completion should be text")
    text = json.dumps(parts, ensure_ascii=False)
    if not text.isascii():
        text.encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair
    return text


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str) for message in value
    )


class ConversationTokenizer:
    """Turns conversations into marked tokens (labels.py): only what the assistant writes trains. Safe to share between threads.

    Pairs: prompt and completion are tokenized apart and joined, and the token that ends a document ends the completion. Chat: the
    tokenizer's template writes the whole conversation. What the assistant writes is what the template marks with `generation`. Without
    such marks it is what each assistant message but the first of all adds after the template's generation prompt; a template that rewrites
    earlier messages is refused.
    """

    dtype: Final = np.dtype(np.int32)

    def __init__(self, tokenizer: Tokenizer, data: DataSection) -> None:
        """Raises BadManifest for a tokenizer without a chat template, or with another than the manifest's."""
        self._tokenizer = tokenizer
        self._is_chat = data.format == "chat"
        self._template = chat_template(tokenizer) if self._is_chat else ""
        self.name = tokenizer.name
        self.document_end = tokenizer.document_end
        digest = template_digest(self._template)
        self.digest = f"{tokenizer.digest} {data.format} {digest}"
        if self._is_chat and data.template not in (None, digest):
            raise BadManifest(
                f"the chat template of {self.name!r} differs from the run's: its digest is {digest}, the manifest's {data.template}",
                hint="give --model the folder of the run's host",
            )

    def encode_all(self, documents: Sequence[Document]) -> list[Marks]:
        """Tokenize several conversations, JSON as `conversation` returns. Raises BadManifest or BadSettings."""
        parts = [json.loads(str(document)) if len(document) else [] for document in documents]
        with refusing(f"the chat template of {self.name!r} cannot write these conversations"):
            return list(self._chats(parts) if self._is_chat else self._pairs(parts))

    def with_document_end(self, tokens: Marks) -> Marks:
        """Return the tokens as they are: a conversation has its end already."""
        return tokens

    def num_text_bytes(self, document: Document) -> int:
        """Return the number of UTF-8 bytes of what trains in a conversation."""
        parts = json.loads(str(document)) if len(document) else []
        texts = [part["content"] for part in parts if part["role"] == ASSISTANT] if self._is_chat else parts[1:]
        return sum(len(text.encode()) for text in texts)

    def _pairs(self, pairs: Sequence[Sequence[str]]) -> Iterator[Marks]:
        encoded = iter(self._tokenizer.encode_all([text for pair in pairs for text in pair]))
        for pair in pairs:
            prompt, completion = (next(encoded), self._tokenizer.with_document_end(next(encoded))) if pair else (np.zeros(0), np.zeros(0))
            yield marked(np.concatenate([prompt, completion]), np.arange(len(prompt) + len(completion)) >= len(prompt))

    def _chats(self, chats: Sequence[list[dict[str, str]]]) -> Iterator[Marks]:
        split = self._split_by_marks if MARKS.search(self._template) else self._split_by_prompts
        for messages in chats:
            ids, is_trained = split(messages) if messages else (np.zeros(0, np.int64), np.zeros(0, np.bool_))
            yield marked(self._tokenizer.checked(ids), is_trained)

    def _split_by_marks(self, messages: list[dict[str, str]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        written = self._tokenizer.pretrained.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return np.asarray(written["input_ids"], np.int64), np.asarray(written["assistant_masks"], np.bool_)

    def _split_by_prompts(self, messages: list[dict[str, str]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        text = self._write(messages)
        encoded = self._tokenizer.pretrained(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]], np.int64)
        is_trained = np.zeros(len(starts), np.bool_)
        for number, message in enumerate(messages):
            if number and message["role"] == ASSISTANT:  # before the first message there is no prompt, so where it begins is not known
                prompt, answered = self._write(messages[:number], asks=True), self._write(messages[: number + 1])
                if not (text.startswith(answered) and answered.startswith(prompt)):
                    raise BadManifest(
                        f"the chat template of {self.name!r} has no generation marks, and rewrites a message when others follow, so what "
                        "the assistant writes cannot be told from the rest",
                        hint=OTHER_TEMPLATE,
                    )
                is_trained |= (starts >= len(prompt)) & (starts < len(answered))
        return np.asarray(encoded["input_ids"], np.int64), is_trained

    def _write(self, messages: list[dict[str, str]], *, asks: bool = False) -> str:
        written: str = self._tokenizer.pretrained.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return written


def chat_template(tokenizer: Tokenizer) -> str:
    """Return a tokenizer's chat template. Raises BadManifest without one."""
    found = tokenizer.pretrained.chat_template if tokenizer.pretrained is not None else None
    if not isinstance(found, str):
        trouble = "no chat template" if found is None else "several chat templates"
        raise BadManifest(
            f"the tokenizer {tokenizer.name!r} has {trouble}", hint=f"put one chat_template.jinja beside it, or {WRITE_PAIRS}"
        )
    return found


def template_digest(template: str) -> str:
    """Return the SHA-256 of a chat template."""
    return hashlib.sha256(template.encode()).hexdigest()
