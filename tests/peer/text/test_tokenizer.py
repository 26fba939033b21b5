from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gossamer.peer.text.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_digest
from gossamer.protocol.errors import BadManifest, BadSettings
from gossamer.protocol.run.sections import TokenizerSection
from tests.mutations import mutated_bytes, mutated_json


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """The byte tokenizer after a journey through its files."""
    folder = tmp_path_factory.mktemp("tokenizer")
    load_tokenizer(TokenizerSection()).save(folder)
    return AutoTokenizer.from_pretrained(folder)


def train_word_tokenizer(folder: Path, special: dict[str, str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "one": 1, "two": 2, "[END]": 3}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", **special).save_pretrained(folder)


def test_every_byte_is_its_own_token() -> None:
    vocabulary = byte_tokenizer().get_vocab()
    assert sorted(vocabulary.values()) == list(range(256))
    tokenizer = byte_tokenizer()
    for byte in range(256):
        symbol = tokenizer.convert_ids_to_tokens(byte)
        assert vocabulary[symbol] == byte
    assert len(tokenizer) == 256


@given(st.text())
@settings(max_examples=200)
def test_any_text_tokenizes_to_its_bytes(exported: PreTrainedTokenizerBase, text: str) -> None:
    ids = list(text.encode())
    assert load_tokenizer(TokenizerSection()).encode_all([text])[0].tolist() == ids
    assert exported(text)["input_ids"] == ids
    assert exported.decode(ids) == text


@given(st.binary(max_size=64))
@settings(max_examples=50)
def test_any_bytes_decode_as_python_decodes_them(exported: PreTrainedTokenizerBase, data: bytes) -> None:
    assert exported.decode(list(data)) == data.decode(errors="replace")


def test_byte_tokens_take_one_byte_each() -> None:
    tokenizer = load_tokenizer(TokenizerSection())
    assert tokenizer.dtype == np.uint8
    assert tokenizer.vocab_size == 256
    assert tokenizer.document_end == 0


def test_a_tokenizer_folder_of_transformers_loads(tmp_path: Path) -> None:
    train_word_tokenizer(tmp_path, {"eos_token": "[END]"})
    tokenizer = load_tokenizer(TokenizerSection(name=str(tmp_path)))
    assert tokenizer.encode_all(["two one three"])[0].tolist() == [2, 1, 0]
    assert tokenizer.document_end == 3
    assert tokenizer.encode_all(["one"])[0].dtype == np.uint8
    tokenizer.save(tmp_path / "copy")
    assert AutoTokenizer.from_pretrained(tmp_path / "copy")("two")["input_ids"] == [2]


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    train_word_tokenizer(tmp_path, {})
    with pytest.raises(BadManifest, match="no end-of-text token"):
        load_tokenizer(TokenizerSection(name=str(tmp_path)))


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadManifest, match="cannot be loaded") as caught:
        load_tokenizer(TokenizerSection(name=str(tmp_path)))
    assert "bytes" in caught.value.hint


def test_another_tokenizer_than_the_manifest_pins_is_refused_with_both_digests(tmp_path: Path) -> None:
    load_tokenizer(TokenizerSection()).save(tmp_path)
    pretrained = byte_tokenizer()
    pretrained.add_special_tokens({"eos_token": "\u0100"})
    pretrained.save_pretrained(tmp_path)
    digest = tokenizer_digest(pretrained)
    load_tokenizer(TokenizerSection(name=str(tmp_path), digest=digest))
    pretrained.add_tokens(["gossamer"])
    assert tokenizer_digest(pretrained) != digest
    with pytest.raises(BadManifest) as caught:
        load_tokenizer(TokenizerSection(name=str(tmp_path), digest="0" * 64))
    assert digest in str(caught.value) and "0" * 64 in str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The files of a byte tokenizer with an end token of its own."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "the end"})
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_mutated_files_of_a_tokenizer_end_in_a_declared_error_or_tokenize(saved: Path) -> None:
    rng = random.Random(3)
    valid = {name: (saved / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    num_read = 0
    for _ in range(60):
        for name, content in valid.items():
            (saved / name).write_text(content)
        name = rng.choice(list(valid))
        is_json = rng.random() < 0.8
        changed = mutated_json(valid[name], rng).encode() if is_json else mutated_bytes(valid[name].encode(), rng)
        (saved / name).write_bytes(changed)
        try:
            tokenizer = load_tokenizer(TokenizerSection(name="x"), saved)
            tokens = tokenizer.encode_documents(["caf\u00e9 and more", ""])
        except (BadManifest, BadSettings):
            continue
        num_read += 1
        assert all(int(one.max()) < tokenizer.vocab_size for one in tokens)
    assert num_read


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}, "cannot tokenize"),
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}, "characters of one"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 99}] * 9}, "characters of one"),
    ],
    ids=["a regular expression without end", "bloat", "nested bloat"],
)
def test_a_tokenizer_that_would_take_the_memory_or_never_end_is_refused(key: str, value: object, reason: str, saved: Path) -> None:
    rules = json.loads((saved / "tokenizer.json").read_text())
    (saved / "tokenizer.json").write_text(json.dumps(rules | {key: value}))
    with pytest.raises(BadManifest, match=reason) as caught:
        load_tokenizer(TokenizerSection(name="x"), saved).encode_documents(["a" * 100 + "b"])
    assert caught.value.hint


def test_token_ids_may_have_gaps(saved: Path) -> None:
    rules = json.loads((saved / "tokenizer.json").read_text())
    rules["model"]["vocab"]["h"] = 5000
    (saved / "tokenizer.json").write_text(json.dumps(rules))
    tokenizer = load_tokenizer(TokenizerSection(name="x"), saved)
    assert tokenizer.vocab_size == 5001
    assert tokenizer.encode_all(["h"])[0].tolist() == [5000]
