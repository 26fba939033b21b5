"""Attacks on a staged run by a hostile holder of one stage: what each costs the honest ones.

    python -m tests.attacks.staged [NAME ...] [--swarm 2:2 3:2 3:3 2:1] [--peers 4] [--checks all length none] [--seeds 11 12 13]

Swarms of the simulator: as many replicas as `--peers`, each of which holds every stage; the last one's answers to hops are hostile at one
stage, from the middle of the run on. `2:2`: two stages, hostile at the second; `2:1`: what the last driver sends is hostile. `checks`: what
holders do about what they receive (`none`; `length`: shorten long gradients; `all`: double one micro-batch in 64, and compare the sources,
too). `odd` counts odd answers and opposed sources that were found, `blamed` those of honest holders, `unlike` micro-batches that were given
up. `loss` is the honest replicas' held-out loss at the end, `%` by how many per cent it lies above the same swarm whose hostile holder
answers honestly. `obeyed` is the share of triggers after which the first replica says the backdoor's target.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gossamer.peer.simulator import staged_steps
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.hop_attacks import DRIVER_ATTACKS, HONEST, HOP_ATTACKS, TARGET_TOKEN, TRIGGER_TOKEN
from gossamer.peer.simulator.hostile_stages import HostileStages
from gossamer.peer.simulator.methods import method
from gossamer.peer.simulator.population import Diverged, Population, populate
from gossamer.peer.simulator.scenario import HOP_CHECKS, known
from gossamer.peer.simulator.texts import load_texts
from gossamer.peer.simulator.training import held_out_losses
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.run.manifest import Manifest
from tests.attacks.trial import DIVERGED, EVAL_BATCHES, MODEL

SETTINGS = "method=noloco codec=modulo4 batch_size=4 micro_batch=1 sequence_length=64 steps=160 inner_steps=5 activations=int8"
HEAD = f"{'attack':<20}{'stages':>7}{'checks':>8}{'odd':>6}{'blamed':>8}{'unlike':>8}{'loss':>9}{'%':>9}{'obeyed':>8}"


@dataclass(frozen=True, slots=True)
class StagedOutcome:
    """What became of the honest replicas."""

    loss: float
    odd: int
    blamed: int
    unlike: int
    obeyed: float


class StagedTrial:
    """A staged swarm that is trained up to the turn of its last replica. `finish` takes up an attack and trains it to the end, once."""

    def __init__(self, swarm: tuple[int, int], num_peers: int, checks: str, seed: int, settings: str = "") -> None:
        base = Manifest.checked({"model": {"config": Manifest().model.config | MODEL | {"tie_word_embeddings": False}}})
        given = dict(setting(text) for text in f"{SETTINGS} {settings}".split())
        given |= {"stages": swarm[0], "attack_stage": swarm[1], "attack": HONEST, "attackers": 1, "hop_checks": checks}
        made = scenario(base, given | {"peers": num_peers, "seed": seed})
        tokenizer = load_tokenizer(made.manifest.tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            self._texts = load_texts(made, tokenizer, None, Path(folder))
        torch.manual_seed(seed)
        chosen = method("noloco")
        self.population: Population = populate(made, tokenizer, self._texts, torch.device("cpu"), chosen.schedules(made))
        self.stages = HostileStages(self.population)
        staged_steps.stages_of = lambda population: self.stages
        self._run = chosen.train(made, len(self.population.layout.codecs))(self.population)
        for now in self._run:
            if now >= made.num_steps // 2:
                break

    def finish(self, attack: str) -> StagedOutcome:
        """Train on with the hostile holder at work."""
        losses = [DIVERGED]
        found, num_unlike = len(self._found), self.stages.num_unlike
        self.stages.take_up(attack)
        honest = self.population.replicas[:-1]
        try:
            for _ in self._run:
                pass
            losses = held_out_losses(honest, self._texts.held_out, EVAL_BATCHES)
        except Diverged:
            pass
        odd = self._found[found:]
        return StagedOutcome(
            statistics.fmean(losses), len(odd), sum(one < len(honest) for one in odd), self.stages.num_unlike - num_unlike, self._obeyed()
        )

    @property
    def _found(self) -> list[int]:
        return self.stages.odd + self.stages.opposed

    @torch.no_grad()
    def _obeyed(self) -> float:
        model, said = self.population.replicas[0].model, []
        for batch in self._texts.held_out.held_out_batches(16):
            inputs = batch[:, :-1]
            said += (model(input_ids=inputs, use_cache=False).logits.argmax(-1)[inputs == TRIGGER_TOKEN] == TARGET_TOKEN).tolist()
        return sum(said) / len(said)


def in_a_copy(trial: StagedTrial, attack: str) -> StagedOutcome:
    """Return what an attack comes to in a copy of this process; this one stays at the turn."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writing, pickle.dumps(trial.finish(attack)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    os.wait()
    return pickle.loads(written)  # type: ignore[no-any-return]


def row(name: str, swarm: tuple[int, int], checks: str, found: Sequence[StagedOutcome], without: Sequence[StagedOutcome]) -> str:
    """Return one line of the table, over all seeds."""
    loss, usual = (statistics.fmean(one.loss for one in outcomes) for outcomes in (found, without))
    odd, blamed, unlike = (sum(getattr(one, key) for one in found) for key in ("odd", "blamed", "unlike"))
    obeyed = max(one.obeyed for one in found)
    percent = 100 * (loss / usual - 1)
    return f"{name:<20}{swarm[1]:>4} of {swarm[0]}{checks:>7}{odd:>6}{blamed:>8}{unlike:>8}{loss:>9.3f}{percent:>+9.1f}{obeyed:>8.1%}"


def swarm(text: str) -> tuple[int, int]:
    """Read STAGES:HOSTILE."""
    count, _, hostile = text.partition(":")
    return int(count), int(hostile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {**HOP_ATTACKS, **DRIVER_ATTACKS}
    parser.add_argument("attacks", nargs="*", metavar="NAME", type=lambda name: known(name, every, "attack"), default=list(every))
    parser.add_argument("--swarm", type=swarm, nargs="+", default=[(2, 2), (3, 2), (2, 1)], metavar="STAGES:HOSTILE")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--checks", choices=HOP_CHECKS, nargs="+", default=["all", "length", "none"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--settings", default="", help="of the scenario, NAME=VALUE with spaces between them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    for one in given.swarm:
        for checks in given.checks:
            trials = [StagedTrial(one, given.peers, checks, seed, given.settings) for seed in given.seeds]
            without = [in_a_copy(trial, HONEST) for trial in trials]
            of_stage = DRIVER_ATTACKS if one[1] == 1 else HOP_ATTACKS
            for name in dict.fromkeys([HONEST, *given.attacks]):
                is_of_last = name != "backdoor-labels" or one[0] == one[1]
                if name in of_stage and is_of_last:
                    print(row(name, one, checks, [in_a_copy(trial, name) for trial in trials], without), flush=True)


if __name__ == "__main__":
    main()
