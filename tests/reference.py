"""The float64 oracle: the papers' outer steps, one coordinate at a time, slow and obvious on purpose.

Everything is plain Python floats in the papers' own letters: phi slow weight, theta fast weight, delta momentum. Nothing here is
shared with `optim`, so that a mistake cannot be made twice the same way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Replica:
    """One coordinate of one peer."""

    phi: float
    delta: float
    theta: float


def noloco_two_tensor(group: list[Replica], alpha: float, beta: float, gamma: float) -> list[Replica]:
    """NoLoCo Eq. 1-3 (arXiv 2506.10911) with +beta, as its code has it; both Delta and phi cross the wire."""
    n = len(group)
    mean_big_delta = sum(r.theta - r.phi for r in group) / n
    mean_phi = sum(r.phi for r in group) / n
    return [_moved(r, alpha * r.delta + beta * mean_big_delta - gamma * (r.phi - mean_phi)) for r in group]


def noloco_one_tensor(group: list[Replica], alpha: float, beta: float, gamma: float) -> list[Replica]:
    """The same through u = beta*Delta + gamma*phi alone (docs/concepts/mathematics.md)."""
    u = [beta * (r.theta - r.phi) + gamma * r.phi for r in group]
    mean_u = sum(u) / len(u)
    return [_moved(r, alpha * r.delta + beta * (r.theta - r.phi) + mean_u - own) for r, own in zip(group, u, strict=True)]


def noloco_token_weighted(i: Replica, j: Replica, tokens: tuple[int, int], alpha: float, beta: float, gamma: float) -> list[Replica]:
    """Design section 4 in the two-tensor form: each side's pseudo-gradient g = phi - theta counts by its tokens."""
    total = sum(tokens)
    w = [t / total if total else 0.5 for t in tokens]
    descent = beta * (w[0] * (i.phi - i.theta) + w[1] * (j.phi - j.theta))
    mean_phi = (i.phi + j.phi) / 2
    return [_moved(r, alpha * r.delta - descent - gamma * (r.phi - mean_phi)) for r in (i, j)]


def solo(r: Replica, alpha: float, beta: float) -> Replica:
    """NoLoCo with n = 1."""
    return noloco_two_tensor([r], alpha, beta, 1.0)[0]


def diloco_heavy_ball(group: list[Replica], learning_rate: float, momentum: float) -> list[Replica]:
    """DiLoCo as the NoLoCo paper runs it: Polyak momentum. All phi and delta must be equal."""
    mean_big_delta = sum(r.theta - r.phi for r in group) / len(group)
    return [_moved(r, momentum * r.delta + learning_rate * mean_big_delta) for r in group]


def diloco_nesterov(phi: float, v: float, thetas: list[float], learning_rate: float, momentum: float) -> tuple[float, float]:
    """DiLoCo (arXiv 2311.08105) with Nesterov as in torch.optim.SGD: returns (phi', v')."""
    descent = sum(phi - theta for theta in thetas) / len(thetas)
    v = momentum * v + descent
    return phi - learning_rate * (descent + momentum * v), v


def _moved(r: Replica, delta: float) -> Replica:
    return Replica(r.phi + delta, delta, r.phi + delta)
