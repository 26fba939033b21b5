from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from gossamer.peer.simulator.choices import scenario
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.texts import Skewed, Texts, load_texts
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import ResidentCorpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.sections import TokenizerSection
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
    return load_texts(made, load_tokenizer(TokenizerSection()), folder, tmp_path / "cache")


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


def test_the_parts_of_a_mixture_are_not_called_streamed(folder: Path, tmp_path: Path) -> None:
    sources = [{"weight": 1, "source": "builtin"}, {"weight": 1, "source": "text"}]
    made: Scenario = scenario(small_manifest(data={"source": "mixture", "mixture": sources}), {"peers": 2, "skew": 0.5})
    with pytest.raises(BadSettings, match="a mixture is not divided"):
        load_texts(made, load_tokenizer(TokenizerSection()), folder, tmp_path / "cache")


def test_half_a_skew_mixes(folder: Path, tmp_path: Path) -> None:
    texts = loaded(folder, tmp_path, skew=0.5)
    batches = [texts.batches[0].batch(step) for step in range(200)]
    assert all(batch.shape == (2, 17) for batch in batches)
    assert share_of("abcd", [batch[:1] for batch in batches]) > 0.85
    assert 0.35 < share_of("abcd", [batch[1:] for batch in batches]) < 0.65


@dataclass(frozen=True)
class Numbered:
    """Windows of two numbers: which text, and which window of it."""

    text: int

    def batch(self, step: int) -> torch.Tensor:
        return torch.tensor([[self.text, step]])


def read(texts: Skewed, num_steps: int) -> torch.Tensor:
    """Which text and window each sequence of each step is."""
    return torch.stack([texts.batch(step) for step in range(num_steps)])


@pytest.mark.parametrize("num_own", [Fraction(2, 5), Fraction(1, 7), Fraction(3), Fraction(37, 10), Fraction(4)])
@pytest.mark.parametrize("phase", [Fraction(0), Fraction(1, 3), Fraction(0.999)])
def test_a_fractional_share_is_rounded_with_an_exact_mean(num_own: Fraction, phase: Fraction) -> None:
    found = read(Skewed(Numbered(1), Numbered(0), 4, num_own, phase), 70)
    counts = found[..., 0].sum(1).tolist()
    assert set(counts) <= {math.floor(num_own), math.ceil(num_own)}
    assert sum(counts) == 70 * num_own
    for text in (0, 1):  # each window once, in order
        windows = found[found[..., 0] == text][:, 1].tolist()
        assert windows == list(range(len(windows)))


def test_a_small_skew_is_not_none(folder: Path, tmp_path: Path) -> None:
    """A tenth of two sequences: a fifth of a sequence, on average."""
    texts = [loaded(folder, tmp_path, skew=0.1, seed=seed).batches[0] for seed in (0, 0, 1)]
    assert all(isinstance(one, Skewed) for one in texts)
    batches = [[one.batch(step) for step in range(10)] for one in texts]
    assert all(batch.shape == (2, 17) for batch in batches[0])
    assert all(torch.equal(*both) for both in zip(batches[0], batches[1], strict=True))
    assert not all(torch.equal(*both) for both in zip(batches[0], batches[2], strict=True))


def test_peers_round_at_different_steps(folder: Path, tmp_path: Path) -> None:
    texts = loaded(folder, tmp_path, skew=0.1, peers=8).batches
    phases = {one.phase for one in texts if isinstance(one, Skewed)}
    assert len(phases) == 8


@pytest.mark.parametrize("skew", [0.5, 1.0])
def test_whole_numbers_of_sequences_are_read_as_one_batch(folder: Path, tmp_path: Path, skew: float) -> None:
    texts = loaded(folder, tmp_path, skew=skew)
    skewed, num_own = texts.batches[0], round(2 * skew)
    assert isinstance(skewed, Skewed)
    draw = Draw(0, b"simulated-0-own", num_own, 16)
    assert isinstance(skewed.own, ResidentCorpus)
    own = ResidentCorpus(skewed.own.tokens, draw)
    assert all(torch.equal(skewed.batch(step)[:num_own], own.batch(step)) for step in range(5))


def test_skewed_peers_are_measured_alike(folder: Path, tmp_path: Path) -> None:
    plain, skewed = loaded(folder, tmp_path), loaded(folder, tmp_path, skew=1.0)
    for one, other in zip(plain.held_out.held_out_batches(3), skewed.held_out.held_out_batches(3), strict=True):
        assert torch.equal(one, other)


def test_a_stream_is_read_from_its_begin_after_a_look_at_other_text(tmp_path: Path) -> None:
    """A batch from far beyond the run would have moved it there for good."""
    (data := tmp_path / "data").mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps({"text": f"document {number} of a data set"}) + "\n" for number in range(2000)))
    made = scenario(small_manifest(data={"source": "huggingface", "name": str(data)}), {"peers": 2})
    first, second = (load_texts(made, load_tokenizer(TokenizerSection()), data, tmp_path / "cache") for _ in range(2))
    other = first.other(1)
    assert other.shape[1] == 17 and torch.equal(other[0], first.held_out.held_out_batches(1)[0][0])
    assert all(torch.equal(one.batch(0), same.batch(0)) for one, same in zip(first.batches, second.batches, strict=True))
    first.close()
    second.close()


def test_a_text_too_small_for_so_many_parts_is_refused_with_the_numbers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="20000 parts of one batch each need 680000") as caught:
        loaded(folder, tmp_path, skew=1.0, peers=20000)
    assert "--data" in caught.value.hint


def test_a_text_too_small_for_one_batch_is_reported_with_the_need(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(BadSettings, match="need 51"):
        loaded(tmp_path / "short.txt", tmp_path)
