from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peer.simulator.choices import scenario
from peer.simulator.scenario import Scenario
from peer.simulator.texts import Texts, load_texts
from peer.tokenizer import load_tokenizer
from protocol.errors import BadSettings
from tests.peer.small import small_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text whose first half has only letters of one kind, and its second half only of another."""
    (tmp_path / "text").mkdir()
    for number, letters in enumerate(("abcd", "wxyz")):
        lines = "".join(f"{letters * 10}{n}\n" for n in range(4000))
        (tmp_path / "text" / f"{number}.txt").write_text(lines)
    return tmp_path / "text"


def loaded(folder: Path, tmp_path: Path, **choices: object) -> Texts:
    made: Scenario = scenario(small_manifest(data={"source": "text"}), {"peers": 2, **choices})
    return load_texts(made, load_tokenizer("bytes"), folder, tmp_path / "cache")


def share_of(kind: str, batches: list[torch.Tensor]) -> float:
    """The share of letters of a kind; the parts' border is near that of the kinds, for some text is held out."""
    text = bytes(torch.cat(batches).flatten().tolist()).decode()
    return sum(text.count(letter) for letter in kind) / sum(text.count(letter) for letter in "abcdwxyz")


def test_peers_read_one_text_in_different_orders(folder: Path, tmp_path: Path) -> None:
    texts = loaded(folder, tmp_path)
    one, two = (batches.batch(0) for batches in texts.batches)
    assert one.shape == two.shape == (2, 17)
    assert not torch.equal(one, two)
    assert torch.equal(one, texts.batches[0].batch(0))
    assert len(texts.corpora) == 1
    texts.close()


def test_full_skew_leaves_each_peer_its_own_part(folder: Path, tmp_path: Path) -> None:
    texts = loaded(folder, tmp_path, skew=1.0)
    one, two = ([batches.batch(step) for step in range(200)] for batches in texts.batches)
    assert share_of("abcd", one) > 0.85
    assert share_of("wxyz", two) > 0.85


def test_half_a_skew_mixes(folder: Path, tmp_path: Path) -> None:
    texts = loaded(folder, tmp_path, skew=0.5)
    batches = [texts.batches[0].batch(step) for step in range(200)]
    assert all(batch.shape == (2, 17) for batch in batches)
    assert share_of("abcd", [batch[:1] for batch in batches]) > 0.85
    assert 0.35 < share_of("abcd", [batch[1:] for batch in batches]) < 0.65


def test_skewed_peers_are_measured_alike(folder: Path, tmp_path: Path) -> None:
    plain, skewed = loaded(folder, tmp_path), loaded(folder, tmp_path, skew=1.0)
    for one, other in zip(plain.held_out.held_out_batches(3), skewed.held_out.held_out_batches(3), strict=True):
        assert torch.equal(one, other)


def test_a_text_too_small_for_so_many_parts_is_refused_with_the_numbers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="20000 parts of one batch each need 680000") as caught:
        loaded(folder, tmp_path, skew=1.0, peers=20000)
    assert "--data" in caught.value.hint


def test_a_text_too_small_for_one_batch_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(BadSettings, match="need 51"):
        loaded(tmp_path / "short.txt", tmp_path)
