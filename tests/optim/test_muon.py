from __future__ import annotations

import copy

import pytest
import torch

from optim.inner import InnerSettings, build_adamw, set_learning_rate
from optim.muon import Muon, build_muon, orthogonalized

SETTINGS = InnerSettings(total_steps=100, learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)


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
    torch.testing.assert_close(orthogonalized(matrix), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(orthogonalized(matrix.T), expected.T, atol=1e-4, rtol=1e-4)


def test_singular_values_end_near_one() -> None:
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.25


def test_steps_are_those_of_torchs_muon() -> None:
    parameter = torch.nn.Parameter(torch.randn(24, 40, generator=torch.Generator().manual_seed(2)))
    twin = torch.nn.Parameter(parameter.detach().clone())
    ours = Muon([{"params": [parameter], "weight_decay": 0.1, "orthogonal": True}], SETTINGS)
    theirs = torch.optim.Muon([twin], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
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
    optimizer = build_muon(model.named_parameters(), SETTINGS)
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
    one, two = build_muon(model.named_parameters(), SETTINGS), build_adamw(twin.named_parameters(), SETTINGS)
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
    optimizer = build_muon(model.named_parameters(), SETTINGS)
    first = train(model, optimizer, 1)
    train(model, optimizer, 60)
    twin = copy.deepcopy(model)
    resumed = build_muon(twin.named_parameters(), SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 40, seed=9) < 0.2 * first
    train(twin, resumed, 40, seed=9)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_learning_rate_reaches_both_parts() -> None:
    model = Small()
    optimizer = build_muon(model.named_parameters(), SETTINGS)
    before = copy.deepcopy(model)
    set_learning_rate(optimizer, 0.0)
    train(model, optimizer, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_closures_are_refused() -> None:
    with pytest.raises(ValueError, match="closure"):
        build_muon(Small().named_parameters(), SETTINGS).step(lambda: 0.0)
