"""Attacks on a swarm by its members: what each costs the honest ones.

    python -m tests.attacks [NAME ...] [--swarm 4:1 8:2 10:3] [--seeds 0 1 2] [--gate off | --clip | --real] [--settings "skew=0.5"]

Swarms of the simulator with real training, meetings, merge gate, probe, partner records and codec: 80 steps of a small model, a meeting of
each fragment about every 5 steps; hostile members turn after 40. `tried` counts hostile messages to honest members, `merged` those merged,
`refused` all refused meetings since the turn. `loss` is the honest members' held-out loss at the end, `worst` that of the worst one,
`worse` and `%` what `loss` lies above the same swarm whose hostile members meet nobody from their turn on. `obeyed` is the share of
triggers of the backdoor that the first member obeys.

`--gate off`: nobody judges anything. `--clip`: all members aggregate together with centred clipping. `--real`: real nodes, meetings and
exchanges in virtual time, which train a tiny model for 160 steps; it takes no `--settings`. All attacks on the three swarms take 40 minutes
of a core for each seed.
"""

from __future__ import annotations

import argparse

import torch

from gossamer.peer.simulator.attacks import ATTACKS
from gossamer.peer.simulator.scenario import known
from tests.attacks.real import real_outcomes
from tests.attacks.trial import HEAD, Setup, outcomes, rows


def swarm(text: str) -> tuple[int, int]:
    """Read PEERS:HOSTILE."""
    peers, _, hostile = text.partition(":")
    return int(peers), int(hostile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="NAME", type=lambda name: known(name, ATTACKS, "attack"), default=list(ATTACKS))
    parser.add_argument("--swarm", type=swarm, nargs="+", default=[(4, 1), (8, 2), (10, 3)], metavar="PEERS:HOSTILE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--gate", choices=["on", "off"], default="on")
    parser.add_argument("--settings", default="", help="of the scenario, NAME=VALUE with spaces between them")
    parser.add_argument("--clip", action="store_true", help="centred clipping over all deltas")
    parser.add_argument("--real", action="store_true", help="real peers in virtual time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    for num_peers, num_hostile in given.swarm:
        setups = [Setup(num_peers, num_hostile, seed, given.gate == "on", given.clip, given.settings) for seed in given.seeds]
        play = real_outcomes(setups) if given.real else outcomes(setups)
        for row in rows(given.attacks, f"{num_hostile} of {num_peers}", play):
            print(row, flush=True)


if __name__ == "__main__":
    main()
