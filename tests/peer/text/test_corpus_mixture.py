"""Several texts as one corpus: exact shares, the same choice at every peer, and back to any step."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from gossamer.peer.text import streaming
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import BLOCK, MixedCorpus, load_corpus, windows_per_block
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.run.sections import DataSection, TokenizerSection

BYTES = load_tokenizer(TokenizerSection())
REVISION = "0" * 40
LETTERS = "abc"


def draw(peer: bytes = b"a") -> Draw:
    return Draw(run_seed=0, peer=peer, batch_size=4, sequence_length=16)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MIN_BUFFER_TOKENS", 0)


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> DataSection:
    """Three data sets, each of documents of one letter."""
    entries = []
    for letter, weight in zip(LETTERS, (5, 3, 2), strict=True):
        folder = tmp_path_factory.mktemp(letter)
        rows = [{"text": letter * (100 + number % 50)} for number in range(1000)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        entries.append({"source": "huggingface", "name": str(folder), "revision": REVISION, "weight": weight})
    return Manifest.checked({"data": {"source": "mixture", "mixture": entries}}).data


def letters(batch: torch.Tensor) -> str:
    """Which text each window comes from."""
    return "".join(chr(int(window.max())) for window in batch)


def opened(section: DataSection, peer: bytes = b"a") -> MixedCorpus:
    corpus = load_corpus(section, BYTES, draw(peer), Path(section.mixture[0].name or "").parent, Path("unused"))
    assert isinstance(corpus, MixedCorpus)
    return corpus


def test_shares_are_exact_and_the_same_at_every_peer(section: DataSection) -> None:
    mine, theirs = opened(section), opened(section, b"b")
    read = "".join(letters(mine.batch(step)) for step in range(BLOCK // 4))
    assert [read.count(letter) for letter in LETTERS] == [512, 307, 205]
    assert read[:80] == "".join(letters(theirs.batch(step)) for step in range(20))
    held_out = "".join(map(letters, mine.held_out_batches(25)))
    assert all(0.3 < held_out.count(letter) / read[:100].count(letter) < 1.01 for letter in LETTERS) and len(held_out) == 100
    assert all(torch.equal(a, b) for a, b in zip(mine.held_out_batches(3), theirs.held_out_batches(3), strict=True))
    mine.close()
    theirs.close()


def test_a_resumed_peer_reads_what_it_would_have_read(section: DataSection) -> None:
    corpus, resumed = opened(section), opened(section)
    for step in range(30):
        corpus.batch(step)
    resumed.restore(json.loads(json.dumps(corpus.cursor())))
    assert all(torch.equal(corpus.batch(step), resumed.batch(step)) for step in range(30, 50))
    corpus.close()
    resumed.close()


def test_a_block_is_dealt_out_whole() -> None:
    assert windows_per_block([1]) == [BLOCK]
    assert windows_per_block([1, 1, 1]) == [342, 341, 341]
    assert windows_per_block([0.999, 0.001]) == [1023, 1]


def test_local_tables_and_tokens_can_be_part_of_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    letters = [[65 + number % 20] * 50 for number in range(400)]
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": letters}), tmp_path / "own/one.parquet")
    (tmp_path / "own/two.jsonl").write_text('{"input_ids": [90, 90, 90]}\n' * 5)
    entries = [{"source": "text", "column": "input_ids", "weight": 1}, {"source": "builtin", "weight": 3}]
    section = Manifest.checked({"data": {"source": "mixture", "mixture": entries}}).data
    corpus = load_corpus(section, BYTES, draw(), tmp_path / "own", tmp_path / "cache")
    own = [window for step in range(64) for window in corpus.batch(step) if set(window.tolist()) <= {0, *range(65, 91)}]
    assert abs(len(own) - 64) < 25
    with pytest.raises(BadSettings, match="own text"):
        load_corpus(section, BYTES, draw(), None, tmp_path / "cache")
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[300]]}), tmp_path / "own/one.parquet")
    with pytest.raises(BadSettings, match=r"these tokens are of another tokenizer: one is 300, and 'bytes' has 256"):
        load_corpus(section, BYTES, draw(), tmp_path / "own", tmp_path / "cache")
