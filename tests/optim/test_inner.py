from __future__ import annotations

import pytest
import torch

from optim.inner import InnerSettings, build_adamw, learning_rate, set_learning_rate

SETTINGS = InnerSettings(total_steps=1000, learning_rate=1e-3, final_fraction=0.1, warmup_steps=100, rewarm_steps=20)


def test_a_founder_warms_up_then_follows_a_cosine() -> None:
    rates = [learning_rate(step, step, SETTINGS) for step in range(1100)]
    assert 0 < rates[0] < 2e-5
    assert all(before < after for before, after in zip(rates[:100], rates[1:101], strict=True))
    assert rates[100] == pytest.approx(1e-3)
    assert rates[550] == pytest.approx(0.55e-3)
    assert all(before >= after for before, after in zip(rates[100:], rates[101:], strict=False))
    assert rates[1000] == rates[1099] == pytest.approx(1e-4)


def test_a_joiner_ramps_up_to_the_clocks_rate() -> None:
    rates = [learning_rate(500 + step, step, SETTINGS) for step in range(40)]
    assert rates[0] < 0.1 * rates[20]
    assert rates[20] == learning_rate(520, 520, SETTINGS)
    assert rates[39] == learning_rate(539, 539, SETTINGS)


def test_a_joiner_during_warm_up_is_never_ahead_of_the_run() -> None:
    assert all(learning_rate(step, step // 2, SETTINGS) <= learning_rate(step, step, SETTINGS) for step in range(200))


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, 0, InnerSettings(total_steps=10, warmup_steps=0, rewarm_steps=0)) == 2e-3


def test_a_run_shorter_than_its_warm_up_still_has_a_rate() -> None:
    assert learning_rate(5, 5, InnerSettings(total_steps=5, warmup_steps=50)) > 0


@pytest.mark.parametrize(
    "change", [{"total_steps": 0}, {"learning_rate": 0.0}, {"final_fraction": 1.5}, {"beta2": 1.0}, {"warmup_steps": -1}]
)
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        InnerSettings(**{"total_steps": 10, **change})  # type: ignore[arg-type]


def test_norms_and_biases_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_adamw(model.named_parameters(), SETTINGS)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.1, 0.0, 0.0, 0.0]


def test_frozen_parameters_are_left_out() -> None:
    layer = torch.nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    groups = build_adamw(layer.named_parameters(), SETTINGS).param_groups
    assert [len(group["params"]) for group in groups] == [1]


def test_setting_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_adamw(torch.nn.Linear(4, 4).named_parameters(), SETTINGS)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
