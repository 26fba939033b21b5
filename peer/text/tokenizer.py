"""Tokenizers: the 256 bytes themselves, or any fast tokenizer of transformers.

A byte's token is the byte itself, and byte 0, which no text holds, ends a document. A folder exported with bytes loads with AutoTokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from gossamer.peer.machine.extras import need_extra
from gossamer.peer.text.document import Document
from gossamer.protocol.errors import BadManifest, BadSettings, GossamerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gossamer.protocol.run.sections import TokenizerSection

BYTES: Final = "bytes"
NUM_BYTES: Final = 256
FILE: Final = "tokenizer.json"  # in the folder of a model
MAX_GROWTH: Final = 1000  # characters made of one before the vocabulary; Unicode's own rules make 18


class Encoder(Protocol):
    """What turns documents into tokens on disk: a Tokenizer, or the ConversationTokenizer of conversations.py."""

    @property
    def name(self) -> str:
        """The tokenizer's name in the manifest."""

    @property
    def digest(self) -> str:
        """What else the tokens depend on."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens."""

    def encode_all(self, documents: Sequence[Document]) -> Sequence[npt.NDArray[Any]]:
        """Tokenize several documents, or parts of documents, into new arrays. Raises BadSettings or BadManifest."""

    def with_document_end(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the tokens of a whole document with the token that ends it, if they lack it."""

    def num_text_bytes(self, document: Document) -> int:
        """Return the number of UTF-8 bytes of a document's text, as far as it trains."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer for training. Safe to share between threads."""

    name: str  # as in the manifest
    vocab_size: int
    document_end: int  # the token after each document
    digest: str  # SHA-256 of its vocabulary and rules; empty for bytes
    pretrained: Any  # PreTrainedTokenizerBase; None for bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the narrowest type that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    def encode_all(self, documents: Sequence[Document]) -> list[npt.NDArray[Any]]:
        """Tokenize several pieces of text into new arrays of `dtype`, without special tokens.

        Raises BadSettings for tokens outside the vocabulary.
        """
        texts = [document for document in documents if isinstance(document, str)]
        encoded = iter(self._encode_texts(texts))
        return [next(encoded) if isinstance(document, str) else self.checked(document) for document in documents]

    def encode_documents(self, documents: Sequence[Document]) -> list[npt.NDArray[Any]]:
        """Tokenize whole documents as `encode_all` does, each with the token that ends it."""
        return [self.with_document_end(tokens) for tokens in self.encode_all(documents)]

    def num_text_bytes(self, document: Document) -> int:
        """Return the number of UTF-8 bytes of a document."""
        if isinstance(document, str):
            return len(document.encode())
        return len(document) if self.pretrained is None else len(self.pretrained.decode(document.tolist()).encode())

    def _encode_texts(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        if self.pretrained is None or not texts:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        with refusing(f"the tokenizer {self.name!r} cannot tokenize this text"):
            found = self.pretrained(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [self.checked(np.asarray(tokens, dtype=np.int64)) for tokens in found]

    def checked(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return tokens as `dtype`. Raises BadSettings for tokens outside the vocabulary."""
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise BadSettings(
                f"these tokens are of another tokenizer: one is {tokens.max()}, and {self.name!r} has {self.vocab_size}",
                hint="make the tokens with the manifest's [tokenizer], or take a column of text",
            )
        return tokens.astype(self.dtype)

    def with_document_end(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the tokens of a whole document with the token that ends it, if they lack it."""
        is_ended = len(tokens) > 0 and tokens[-1] == self.document_end
        return tokens if is_ended else np.append(tokens, self.dtype.type(self.document_end))

    def save(self, folder: Path) -> None:
        """Write the files that AutoTokenizer.from_pretrained reads."""
        pretrained = byte_tokenizer() if self.pretrained is None else self.pretrained
        pretrained.save_pretrained(folder)


def load_tokenizer(section: TokenizerSection, *folders: Path | None) -> Tokenizer:
    """Load a manifest's tokenizer: `bytes`, or that of the first folder with one, or a name or path for transformers.

    Raises BadManifest if there is no such tokenizer, if its digest differs from the manifest's, or if it has no end-of-text token.
    """
    name = section.name
    if name == BYTES:
        return Tokenizer(BYTES, NUM_BYTES, 0, "", None)
    found = next((folder for folder in folders if folder is not None and (folder / FILE).is_file()), None)
    pretrained = _load_pretrained(name, section.revision) if found is None else _load_pretrained(str(found), None)
    with refusing(f"the tokenizer {name!r} cannot be used"):
        return _checked_tokenizer(section, pretrained)


def _checked_tokenizer(section: TokenizerSection, pretrained: PreTrainedTokenizerBase) -> Tokenizer:
    name, digest = section.name, tokenizer_digest(pretrained)
    if section.digest not in (None, digest):
        raise BadManifest(
            f"the tokenizer {name!r} differs from the manifest's: its digest is {digest}, not {section.digest}",
            hint="use the files of the run's host; as the host, correct [tokenizer] digest",
        )
    ends = [token for token in (pretrained.eos_token_id, pretrained.sep_token_id) if token is not None]
    if not ends:
        raise BadManifest(
            f"the tokenizer {name!r} has no end-of-text token, so documents cannot be told apart",
            hint="choose one with an eos or sep token, or `bytes`",
        )
    growth = _growth(_rules(pretrained).get("normalizer"))
    if growth > MAX_GROWTH:
        raise BadManifest(f"the tokenizer {name!r} makes up to {growth} characters of one", hint="choose another tokenizer, or `bytes`")
    num_tokens = max(len(pretrained), 1 + max(pretrained.get_vocab().values(), default=0), 1 + ends[0])  # ids may have gaps
    return Tokenizer(name, num_tokens, ends[0], digest, pretrained)


def _growth(normalizer: Any) -> int:
    """Return how many characters the rules before the vocabulary can make of one: a few rules can make a gigabyte of a page."""
    match normalizer:
        case {"normalizers": list(inner)}:
            return math.prod(map(_growth, inner))
        case {"content": str(text)} | {"prepend": str(text)}:
            return 1 + len(text)
    return 1


def name_of(folder: Path) -> tuple[str, str]:
    """Return the manifest's name and digest for the tokenizer in a folder; `bytes` has no digest. Raises BadManifest if there is none."""
    if not (folder / FILE).is_file():
        raise BadManifest(f"{folder} holds no tokenizer", hint=f"put its {FILE} beside the model")
    pretrained = _load_pretrained(str(folder), None)
    with refusing(f"the tokenizer in {folder} cannot be used"):
        digest = tokenizer_digest(pretrained)
    return (BYTES, "") if digest == tokenizer_digest(byte_tokenizer()) else (folder.resolve().name, digest)


def tokenizer_digest(pretrained: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer's vocabulary with its ids, and of its rules before and after the vocabulary."""
    rules = _rules(pretrained)
    for passing in ("truncation", "padding"):
        rules.pop(passing, None)
    return hashlib.sha256(json.dumps([sorted(pretrained.get_vocab().items()), rules], sort_keys=True).encode()).hexdigest()


def _rules(pretrained: PreTrainedTokenizerBase) -> dict[str, Any]:
    rules: dict[str, Any] = json.loads(pretrained.backend_tokenizer.to_str()) if pretrained.is_fast else {}
    return rules


@contextlib.contextmanager
def refusing(message: str) -> Iterator[None]:
    """Turn the errors of a tokenizer, of many types, into BadManifest. Its Rust code may panic, which is no Exception."""
    try:
        yield
    except GossamerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadManifest(
            f"{message}: {reason[:200]}",
            hint="give --model a folder with its files; as the host, name a tokenizer of the Hugging Face hub, or `bytes`",
        ) from error


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return the byte tokenizer in transformers' form: 256 tokens, each with its byte as id."""
    need_extra("text")
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = FastTokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"]
    )


def _byte_symbols() -> list[str]:
    """Return the character of each byte in GPT-2's byte-level tokenizers: the byte itself if printable, else one above 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(NUM_BYTES + others.index(byte)) for byte in range(NUM_BYTES)]


def _load_pretrained(name: str, revision: str | None) -> Any:
    need_extra("text")
    from transformers import AutoTokenizer

    with refusing(f"the tokenizer {name!r} cannot be loaded"):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
