"""What the simulation itself costs: the rate of 8 replicas beside one replica trained eight times as long.

    python -m benchmarks.simulate_rate [--peers N] [--steps S] [--rounds R] [--threads T] [--codec NAME] [--method NAME]

Tokens per second of training (measurements left out), the default model and text, the two by turns; the target is 80 %. Other work on
the machine makes that noise: so the median over the rounds counts, and the tokens per second of processor time stand beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from gossamer.peer.simulator.choices import scenario
from gossamer.peer.simulator.training import Venue, simulate
from gossamer.protocol.run.manifest import Manifest


def rates(venue: Venue, **choices: object) -> tuple[float, float]:
    """Return the tokens per second of one training, and per second of processor time (building and measuring included)."""
    started_s = time.process_time()
    result = simulate(scenario(Manifest(), choices), venue, lambda progress: None)
    return result.tokens / result.train_seconds, result.tokens / (time.process_time() - started_s)


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--method", default="noloco")
    parser.add_argument("--codec", default="modulo4")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    swarm = {"method": given.method, "codec": given.codec, "peers": given.peers, "steps": given.steps}
    alone = {"method": "local", "peers": 1, "steps": given.peers * given.steps}
    ratios, by_processor = [], []
    with tempfile.TemporaryDirectory() as folder:
        venue = Venue(Path(folder), device="cpu", num_eval_batches=1)
        for number in range(given.rounds):
            (together, together_cpu), (single, single_cpu) = rates(venue, **swarm), rates(venue, **alone)
            ratios.append(together / single)
            by_processor.append(together_cpu / single_cpu)
            print(f"round {number + 1}: {given.peers} replicas {together:8.0f} tokens/s, one {single:8.0f} tokens/s, {ratios[-1]:6.1%}")
    medians = statistics.median(ratios), statistics.median(by_processor)
    print(f"{given.method} with {given.codec}: median {medians[0]:.1%}, by processor time {medians[1]:.1%} (target 80 %)")


if __name__ == "__main__":
    main()
