"""A Sybil attack in virtual time: one holder of an invite with many keys against four honest peers.

    python -m benchmarks.many_keys [--keys 6,100] [--attacks random,clone,result] [--seeds 0,1,2,3]

Real node and trainer of each peer, a tiny model, 30 s of attack after 40 steps. The keys use the honest peers' invite, or one of their
own. Aim: no honest peer adopts weights, no global step runs ahead, the run does not end, and over the seeds the loss of the honest peers'
mean is at most 1 % higher.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from gossamer.protocol.messages.messages import RunPhase
from tests.swarm.test_evidence import TOTAL_STEPS, After, Attack, after, mean_weights, random_weights

ATTACKS = {
    "random": (200, random_weights, False),
    "clone": (5000, mean_weights, False),
    "result": (TOTAL_STEPS, mean_weights, True),
}


def row(name: str, found: Sequence[After], honest: Sequence[After]) -> str:
    """Return one line of the table, over all seeds."""
    ahead = max(clock - own for run in found for clock, own in zip(run.clocks, run.own_steps, strict=True))
    ended = any(RunPhase.FINISH in run.phases for run in found)
    loss, usual = (statistics.mean(run.loss for run in runs) for runs in (found, honest))
    meetings = statistics.mean(sum(run.meetings) for run in found)
    return (
        f"{name:<28}{sum(run.num_transfers for run in found):>12}{ahead:>14}{'yes' if ended else 'no':>8}"
        f"{sum(run.asked for run in found):>8}{meetings:>10.0f}{loss:>8.4f}{100 * (loss / usual - 1):>+8.2f} %"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", default="6,100")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--seeds", default="0,1,2,3")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    honest = [after(None, seed) for seed in seeds]
    print(f"{'attack':<28}{'took over':>12}{'clock ahead':>14}{'ended':>8}{'asked':>8}{'meetings':>10}{'loss':>8}")
    print(row("none", honest, honest), " ".join(f"{run.loss:.4f}" for run in honest), flush=True)
    for num_keys in map(int, given.keys.split(",")):
        for name in given.attacks.split(","):
            for own_invite in (False, True):
                ahead_steps, gives, finished = ATTACKS[name]
                found = [after(Attack(num_keys, own_invite, ahead_steps, gives, finished), seed) for seed in seeds]
                print(row(f"{name}, {num_keys} keys, {'own' if own_invite else 'the same'}", found, honest), flush=True)


if __name__ == "__main__":
    main()
