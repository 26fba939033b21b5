"""How far NoLoCo's peers spread under pure noise, beside the values derived from the paper's equations.

    python -m benchmarks.variance

Every peer's inner steps are replaced by noise of variance 1; V is the stationary variance of the slow weights over the peers
(docs/concepts/mathematics.md). Runs the real message and outer step (optim/noloco), peers in random pairs. About a minute on one core.
"""

from __future__ import annotations

import torch

from gossamer.optim.noloco import NoLoCo

FINITE = ((4, 0.43), (8, 0.81), (16, 1.05), (32, 1.18), (64, 1.24))
LARGE = ((0.0, 1.00, 0.49), (0.3, 0.91, 0.77), (0.5, 0.75, 1.31), (0.5, 0.70, 1.312), (0.7, 0.51, 3.20), (0.9, 0.19, 25.8))


def spread(peers: int, values: int, rounds: int, rule: NoLoCo) -> float:
    """Return the mean over `rounds` of the variance over peers, after a start of a quarter as many."""
    generator = torch.Generator().manual_seed(0)
    slow, momentum = torch.zeros(2, peers, values)
    total = 0.0
    for number in range(-rounds // 4, rounds):
        fast = slow + torch.randn(peers, values, generator=generator)
        sent = rule.message(slow, fast, 0.5)
        left, right = torch.randperm(peers, generator=generator).view(2, -1)
        partner = torch.empty(peers, dtype=torch.int64)
        partner[left], partner[right] = right, left
        slow, momentum = rule.pair_step(slow, momentum, fast, 0.5, sent[partner] - sent)
        if number >= 0:
            total += float(slow.var(0, correction=0).mean())
    return total / rounds


def show(what: str, expected: float, measured: float) -> None:
    """Print one row."""
    print(f"{what:48}{expected:10.3f}{measured:10.3f}{measured / expected - 1:+9.1%}", flush=True)


def main() -> None:
    """Print the two tables."""
    torch.set_num_threads(1)
    print(f"{'V / sigma^2, beta 0.7':48}{'expected':>10}{'measured':>10}{'off by':>9}")
    for peers, expected in FINITE:
        show(f"{peers} peers, alpha 0.5, gamma 0.7", expected, spread(peers, 8192 // peers, 80_000 // peers, NoLoCo()))
    for alpha, gamma, expected in LARGE:
        rounds = 4000 if alpha == 0.9 else 400
        show(f"many peers, alpha {alpha}, gamma {gamma}", expected, spread(1024, 16, rounds, NoLoCo(alpha, 0.7, gamma)))


if __name__ == "__main__":
    main()
