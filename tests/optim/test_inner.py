from __future__ import annotations

import copy
import math

import pytest
import torch

from gossamer.optim.inner import (
    OPTIMIZERS,
    InnerSettings,
    Muon,
    build_optimizer,
    divide_parameters,
    learning_rate,
    orthogonalized,
    set_learning_rate,
)

SETTINGS = InnerSettings(total_steps=1000, learning_rate=1e-3, final_fraction=0.1, warmup_steps=100, rewarm_steps=20)
MUON_SETTINGS = InnerSettings(total_steps=100, learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)


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
    "change", [{"total_steps": 0}, {"learning_rate": 0.0}, {"final_fraction": 1.5}, {"beta2": 1.0}, {"momentum": 1.0}, {"warmup_steps": -1}]
)
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        InnerSettings(**{"total_steps": 10, **change})  # type: ignore[arg-type]


def test_norms_and_biases_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_optimizer("adamw", model.named_parameters(), SETTINGS)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.1, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_are_left_out(name: str) -> None:
    layer = torch.nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    groups = build_optimizer(name, layer.named_parameters(), SETTINGS).param_groups
    assert [len(group["params"]) for group in groups] == [1]


def test_setting_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer("adamw", torch.nn.Linear(4, 4).named_parameters(), SETTINGS)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("muon", Muon)])
def test_every_name_builds_its_optimizer(name: str, kind: type[torch.optim.Optimizer]) -> None:
    assert isinstance(build_optimizer(name, torch.nn.Linear(4, 4).named_parameters(), SETTINGS), kind)
    assert {"adamw", "muon"} == OPTIMIZERS.keys()


def test_an_unknown_name_is_refused_with_suggestions() -> None:
    with pytest.raises(ValueError, match="did you mean adamw"):
        build_optimizer("adam", [], SETTINGS)


def slow_newton_schulz(matrix: list[list[float]]) -> list[list[float]]:
    """Five quintic steps in plain Python floats."""

    def times(p: list[list[float]], q: list[list[float]]) -> list[list[float]]:
        return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*q, strict=True)] for row in p]

    size = sum(x * x for row in matrix for x in row) ** 0.5
    x = [[value / size for value in row] for row in matrix]
    for _ in range(5):
        gram = times(x, [list(column) for column in zip(*x, strict=True)])
        square = times(gram, gram)
        inner = [[-4.7750 * g + 2.0315 * s for g, s in zip(*rows, strict=True)] for rows in zip(gram, square, strict=True)]
        correction = times(inner, x)
        x = [[3.4445 * a + b for a, b in zip(*rows, strict=True)] for rows in zip(x, correction, strict=True)]
    return x


@pytest.mark.parametrize("shape", [(4, 4), (3, 7)])
def test_orthogonalization_matches_the_oracle(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(slow_newton_schulz(matrix.tolist()))
    torch.testing.assert_close(orthogonalized(matrix[None])[0], expected, atol=1e-4, rtol=1e-4)
    stack = torch.stack([matrix, 2 * matrix, -matrix])
    torch.testing.assert_close(orthogonalized(stack), torch.stack([expected, expected, -expected]), atol=1e-4, rtol=1e-4)


def test_singular_values_end_near_one() -> None:
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(matrix[None])[0])
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.25


def test_steps_are_those_of_torchs_muon() -> None:
    parameter = torch.nn.Parameter(torch.randn(24, 40, generator=torch.Generator().manual_seed(2)))
    twin = torch.nn.Parameter(parameter.detach().clone())
    ours = Muon([{"params": [parameter], "weight_decay": 0.1, "orthogonal": True}], MUON_SETTINGS)
    theirs = torch.optim.Muon([twin], lr=1e-2, weight_decay=0.1, momentum=MUON_SETTINGS.momentum, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        gradient = torch.randn(24, 40, generator=generator)
        parameter.grad, twin.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    moved = (twin - parameter).detach().norm() / (5 * 1e-2 * 0.2 * 24**0.5 * 40**0.5)
    assert float(moved) < 0.02  # torch's runs in bf16


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def train(model: Small, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> float:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        tokens = torch.randint(0, 10, (32,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_only_matrices_inside_blocks_are_orthogonalized() -> None:
    model = Small()
    optimizer = build_optimizer("muon", model.named_parameters(), MUON_SETTINGS)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = {names[id(p)]: (group["orthogonal"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert kinds == {
        "embed.weight": (False, 0.1),
        "layers.0.weight": (True, 0.1),
        "layers.0.bias": (False, 0.0),
        "layers.1.weight": (True, 0.1),
        "layers.1.bias": (False, 0.0),
        "norm.weight": (False, 0.0),
        "norm.bias": (False, 0.0),
        "head.weight": (False, 0.1),
    }


def test_everything_else_steps_like_adamw() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 10))
    twin = copy.deepcopy(model)
    one, two = (
        build_optimizer("muon", model.named_parameters(), MUON_SETTINGS),
        build_optimizer("adamw", twin.named_parameters(), MUON_SETTINGS),
    )
    for _ in range(10):
        tokens = torch.randint(0, 10, (16,))
        for net, optimizer in ((model, one), (twin, two)):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(tokens), tokens).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_it_learns_and_resumes_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = build_optimizer("muon", model.named_parameters(), MUON_SETTINGS)
    first = train(model, optimizer, 1)
    train(model, optimizer, 60)
    twin = copy.deepcopy(model)
    resumed = build_optimizer("muon", twin.named_parameters(), MUON_SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 40, seed=9) < 0.2 * first
    train(twin, resumed, 40, seed=9)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_learning_rate_reaches_both_parts() -> None:
    model = Small()
    optimizer = build_optimizer("muon", model.named_parameters(), MUON_SETTINGS)
    before = copy.deepcopy(model)
    set_learning_rate(optimizer, 0.0)
    train(model, optimizer, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_work_is_divided_evenly_among_optimizers(name: str) -> None:
    shapes = {"embed.weight": (512, 64), "norm.weight": (64,)}
    shapes |= {f"layers.{number}.{kind}.weight": (64, 64) for number in range(6) for kind in "qkv"}
    shares = divide_parameters(name, shapes, 3)
    assert sorted(key for share in shares for key in share) == sorted(shapes)
    values = [sum(math.prod(shapes[key]) for key in share) for share in shares]
    if name == "muon":  # six matrices each, whichever rank has the embedding
        assert [sum("layers" in key for key in share) for share in shares] == [6, 6, 6]
    else:
        assert max(values) <= 1.1 * sum(values) / 3
    assert divide_parameters(name, shapes, 1) == [list(shapes)]


def test_closures_are_refused() -> None:
    with pytest.raises(ValueError, match="closure"):
        build_optimizer("muon", Small().named_parameters(), MUON_SETTINGS).step(lambda: 0.0)
