from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.peer.machine.config import save_settings
from gossamer.peer.machine.home import Home
from gossamer.peer.model import evaluation
from gossamer.peer.model.computing import Computing, next_token_loss, output_distance, predictions
from gossamer.peer.model.evaluation import compare_homes, evaluate_home, held_out_loss, measured_size, open_corpus, perplexity
from gossamer.peer.model.model import build_model
from gossamer.peer.model.weights import mean_weights, set_weights
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest
from tests.peer.trained_homes import tiny_manifest, trained_home, weights_from

MANIFEST = tiny_manifest()


class Fixed:
    """A corpus of batches."""

    def __init__(self, *batches: Tensor) -> None:
        self._batches = list(batches)

    def held_out_batches(self, num_batches: int) -> list[Tensor]:
        return self._batches[:num_batches]


def batch(seed: int) -> Tensor:
    return torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(seed))


def expected_loss(manifest: Manifest, home: Home, weights: dict[str, Tensor]) -> float:
    model = build_model(manifest.model, 0)
    set_weights(model, weights)
    return held_out_loss(model, open_corpus(manifest, home, None), 4)


@pytest.mark.parametrize(
    ("sizes", "held_out", "asked", "found"),
    [
        ((4, 128), 10_000, None, (256, None)),  # 131072 tokens at any batch size
        ((64, 1024), 10_000, None, (2, None)),
        ((1, 16), 10_000, None, (8192, None)),
        ((4, 128), 100, None, (25, None)),  # what there is, and nothing twice
        ((4, 128), 3, None, (1, None)),
        ((4, 128), 10_000, 1024, (2, None)),
        ((4, 128), 10_000, 1000, (2, 1000)),
        ((64, 1024), 10_000, 5000, (1, 5000)),  # of one large batch only some sequences
        ((4, 128), 100, 10**9, (25, None)),
    ],
)
def test_no_more_is_measured_than_there_is_and_than_was_asked_for(
    sizes: tuple[int, int], held_out: int, asked: int | None, found: tuple[int, int | None]
) -> None:
    class Held(Fixed):
        def num_held_out(self) -> int:
            return held_out

    manifest = Manifest.checked({"inner": {"batch_size": sizes[0], "sequence_length": sizes[1]}})
    assert measured_size(manifest, Held(), asked) == found


def test_small_batches_are_measured_together_with_the_same_result() -> None:
    model = build_model(MANIFEST.model, 0)
    corpus = Fixed(*(batch(seed) for seed in range(5)))
    followed: list[tuple[int, int]] = []
    together = held_out_loss(model, corpus, 5, lambda done, total, loss: followed.append((done, total)), Computing(micro_batch=6))
    assert together == pytest.approx(held_out_loss(model, corpus, 5), rel=1e-6)
    assert followed == [(3, 5), (5, 5)]


def test_the_loss_is_the_mean_over_batches() -> None:
    model = build_model(MANIFEST.model, 0)
    loss = held_out_loss(model, Fixed(batch(0), batch(1), batch(2)), 2)
    with torch.no_grad():
        expected = torch.stack([next_token_loss(model, batch(0)), next_token_loss(model, batch(1))]).mean()
    assert math.isclose(loss, float(expected), rel_tol=1e-6)


@pytest.mark.parametrize(("most_tokens", "rows"), [(1, 1), (64, 1), (128, 2), (1000, 2)])
def test_of_large_batches_only_the_first_sequences_are_measured(most_tokens: int, rows: int) -> None:
    model = build_model(MANIFEST.model, 0)
    first = Fixed(batch(0)[:rows], batch(1)[:rows])
    assert held_out_loss(model, Fixed(batch(0), batch(1)), 2, most_tokens=most_tokens) == held_out_loss(model, first, 2)


def test_measuring_changes_nothing() -> None:
    manifest = Manifest.checked(
        {"model": {"architecture": "gpt2", "config": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 64}}}
    )
    model = build_model(manifest.model, 0)  # has dropout
    random_state = torch.get_rng_state()
    losses = {held_out_loss(model, Fixed(batch(0)), 1) for _ in range(3)}
    assert len(losses) == 1
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    held_out_loss(model, Fixed(batch(0)), 1)
    assert not model.training


def test_outputs_that_are_alike_are_no_way_apart_and_sure_opposites_are_log_2_apart() -> None:
    model, batch = build_model(MANIFEST.model, 0), torch.arange(18).view(2, 9)
    once = predictions(model, batch)
    assert once.shape == (16, MANIFEST.model.config["vocab_size"]) and torch.allclose(once.exp().sum(-1), torch.ones(16))
    assert output_distance([once, predictions(model, batch)]) < 1e-6
    assert 0.0 < output_distance([once, predictions(build_model(MANIFEST.model, 1), batch)]) < math.log(2)
    sure = torch.tensor([[0.0, -100.0], [-100.0, 0.0]])
    assert output_distance([sure[:1], sure[1:]]) == pytest.approx(math.log(2))


def test_a_home_is_measured_by_its_fast_weights(tmp_path: Path) -> None:
    home = trained_home(tmp_path, MANIFEST, fast_seed=2, slow_seed=3)
    found = evaluate_home(home, num_tokens=256)
    assert found.loss == pytest.approx(expected_loss(MANIFEST, home, weights_from(MANIFEST, 2)), rel=1e-6)
    assert found.step == 40
    assert found.num_tokens == 4 * 2 * 32
    assert found.perplexity == pytest.approx(found.byte_perplexity) == pytest.approx(math.exp(found.loss))


def test_a_loss_beyond_what_a_perplexity_can_be_is_still_a_loss() -> None:
    assert perplexity(1.0) == pytest.approx(math.e)
    assert perplexity(710.0) is None


def test_a_home_with_its_own_text_needs_that_text(tmp_path: Path) -> None:
    manifest = tiny_manifest(source="text")
    home = trained_home(tmp_path / "home", manifest, fast_seed=2)
    (tmp_path / "text").write_text("some words of my own\n" * 500)
    with pytest.raises(BadSettings, match="its own text"):
        evaluate_home(home)
    assert math.isfinite(evaluate_home(home, tmp_path / "text", num_tokens=128).loss)


def test_text_bytes_are_counted_independently_of_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = trained_home(tmp_path, MANIFEST, fast_seed=2)
    corpus = open_corpus(MANIFEST, home, None)
    corpus.bytes_per_token = 4.0
    monkeypatch.setattr(evaluation, "open_corpus", lambda *given: corpus)
    found = evaluate_home(home, num_tokens=128)
    assert found.byte_perplexity == pytest.approx(math.exp(found.loss / 4))


def test_a_swarm_is_compared_with_its_average_and_a_lone_peer(tmp_path: Path) -> None:
    homes = [trained_home(tmp_path / str(seed), MANIFEST, fast_seed=seed) for seed in (2, 3, 4)]
    followed: list[tuple[int, int, int, float]] = []
    losses = compare_homes([home.path for home in homes[:2]], homes[2].path, None, 256, lambda *step: followed.append(step))
    of_seed = {seed: expected_loss(MANIFEST, homes[0], weights_from(MANIFEST, seed)) for seed in (0, 2, 3, 4)}
    mean = mean_weights([weights_from(MANIFEST, 2), weights_from(MANIFEST, 3)])
    found = [losses.start, *losses.peers, losses.averaged, losses.alone]
    wanted = [of_seed[0], of_seed[2], of_seed[3], expected_loss(MANIFEST, homes[0], mean), of_seed[4]]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert [step[:3] for step in followed] == [(model, 256, 256) for model in range(5)]
    assert [step[3] for step in followed] == found


def test_peers_of_one_result_are_measured_once(tmp_path: Path) -> None:
    homes = [trained_home(tmp_path / str(number), MANIFEST, fast_seed=seed).path for number, seed in enumerate((2, 2, 4))]
    followed: list[int] = []
    losses = compare_homes(homes[:2], homes[2], None, 128, lambda model, *_: followed.append(model))
    assert losses.peers == (losses.averaged, losses.averaged) != (losses.alone, losses.alone)
    assert followed == [0, 1, 2, 3, 4], "all three are told of the one"


def test_concurrent_measurements_equal_sequential_ones(tmp_path: Path) -> None:
    homes = [trained_home(tmp_path / str(seed), MANIFEST, fast_seed=seed).path for seed in (2, 3, 4)]
    one_by_one = compare_homes(homes[:2], homes[2], num_tokens=256)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert compare_homes(homes[:2], homes[2], num_tokens=256) == one_by_one
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_text_that_the_home_remembers_is_measured_on(tmp_path: Path) -> None:
    own = Manifest.checked(tiny_manifest().model_dump() | {"data": {"source": "text"}})
    (tmp_path / "text").write_text("a line of text\n" * 2000)
    home = Home(tmp_path / "home")
    home.create()
    with pytest.raises(BadSettings, match="own text"):
        open_corpus(own, home, None)
    save_settings(home, {"data": str(tmp_path / "text")})
    assert len(open_corpus(own, home, None).held_out_batches(1)) == 1
