from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.peer.machine.home import Home
from gossamer.peer.model.model import build_model
from gossamer.peer.model.weights import fast_weights, load_trained, mean_weights, set_weights, slow_weights
from gossamer.protocol.errors import BadManifest, BadSettings
from tests.peer.trained_homes import tiny_manifest, trained_home, weights_from

MANIFEST = tiny_manifest()


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_fast_and_slow_weights_come_back_by_name(tmp_path: Path) -> None:
    trained = load_trained(trained_home(tmp_path, MANIFEST, fast_seed=2, slow_seed=3))
    assert trained.manifest == MANIFEST
    assert same(fast_weights(trained.checkpoint), weights_from(MANIFEST, 2))
    assert same(slow_weights(trained), weights_from(MANIFEST, 3))


def test_a_home_without_a_run_or_a_checkpoint_is_explained(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="holds no run") as caught:
        load_trained(Home(tmp_path))
    assert "--home" in caught.value.hint
    home = trained_home(tmp_path, MANIFEST, fast_seed=2)
    for path in home.checkpoints.iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(BadSettings, match="no checkpoint yet"):
        load_trained(home)
    home.manifest.write_bytes(b"garbage")
    with pytest.raises(BadManifest):
        load_trained(home)


def test_the_mean_is_taken_in_float64() -> None:
    weights = [{"x": torch.tensor([1e8, 1.0])}, {"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([-1e8, 3.0])}]
    mean = mean_weights(weights)["x"]
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, torch.tensor([1 / 3, 2.0]))
    assert weights[0]["x"].tolist() == [1e8, 1.0]
    with pytest.raises(ValueError, match="of no models"):
        mean_weights([])


def test_every_parameter_needs_a_weight() -> None:
    model = build_model(MANIFEST.model, 0)
    set_weights(model, weights_from(MANIFEST, 5))
    assert same(dict(model.named_parameters()), weights_from(MANIFEST, 5))
    with pytest.raises(KeyError):
        set_weights(model, {})
