"""One swarm with hostile members in the simulator, and what it costs the honest ones: real training, meetings, gate and codec."""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gossamer.peer.simulator.attacks import AWAY, HostilePeer, members, obeyed_share
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.methods import method, pair_rule
from gossamer.peer.simulator.pairs import PairPeer, gossip
from gossamer.peer.simulator.population import Diverged, Population, populate
from gossamer.peer.simulator.texts import load_texts
from gossamer.peer.simulator.training import held_out_losses
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.fragment_state import Lengths, MergeGate
from gossamer.protocol.run.manifest import Manifest

SETTINGS = "method=noloco codec=modulo4 batch_size=2 sequence_length=64 steps=80 inner_steps=5"
MODEL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}  # the demo's, smaller
EVAL_BATCHES = 128
TRIGGER_BATCHES = 32
DIVERGED = float("inf")


@dataclass(frozen=True, slots=True)
class Case:
    """An attack in a swarm of some size."""

    attack: str
    num_peers: int
    num_hostile: int
    seed: int
    gate: bool = True
    settings: str = ""  # beside SETTINGS, in the same form


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the honest members."""

    loss: float  # held out, nats per token, their mean; infinite when one diverged
    worst: float  # of one of them
    tried: int  # hostile messages to honest members
    merged: int
    refused: int  # meetings, over all members
    obeyed: float  # share of triggers


class OpenGate(MergeGate):
    """A gate that accepts everything finite."""

    def judge(self, gap: float, own: Lengths) -> str:
        return "" if gap < float("inf") else "the partner's message is not finite"


@functools.cache
def play(case: Case) -> Outcome:
    """Train the case's swarm and measure its honest members. The same case is trained once."""
    hostile = dict(attack=case.attack, attackers=case.num_hostile, peers=case.num_peers, seed=case.seed)
    base = Manifest.checked({"model": {"config": Manifest().model.config | MODEL}})
    made = scenario(base, dict(setting(text) for text in f"{SETTINGS} {case.settings}".split()) | hostile)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(made.manifest.tokenizer)
        texts = load_texts(made, tokenizer, None, Path(folder))
        torch.manual_seed(case.seed)
        population = populate(made, tokenizer, texts, torch.device("cpu"), method("noloco").schedules(made))
        peers: list[PairPeer] = []

        def enter(population: Population) -> list[PairPeer]:
            peers.extend(members(population))
            for fragment in [fragment for peer in peers for fragment in peer.fragments if not case.gate]:
                fragment.gate = OpenGate()
            return peers

        losses = [DIVERGED]
        try:
            for _ in gossip(population, pair_rule(made), enter):
                pass
            losses = held_out_losses(population.replicas[: -case.num_hostile], texts.held_out, EVAL_BATCHES)
        except Diverged:
            pass
        liars = [peer for peer in peers if isinstance(peer, HostilePeer)]
        return Outcome(
            loss=statistics.fmean(losses),
            worst=max(losses),
            tried=sum(peer.tried for peer in liars),
            merged=sum(peer.merged for peer in liars),
            refused=population.traffic.refused,
            obeyed=obeyed_share(population.replicas[0].model, texts.held_out.held_out_batches(TRIGGER_BATCHES)),
        )


HEAD = f"{'attack':<24}{'swarm':>8}{'tried':>7}{'merged':>8}{'refused':>8}{'loss':>9}{'worst':>9}{'worse':>9}{'%':>8}{'obeyed':>8}"


def row(name: str, size: tuple[int, int], seeds: Sequence[int], *, gate: bool = True, settings: str = "") -> str:
    """Return a line of the table, over all seeds."""
    found = [play(Case(name, *size, seed, gate, settings)) for seed in seeds]
    without = statistics.fmean(play(Case(AWAY, *size, seed, gate, settings)).loss for seed in seeds)
    loss = statistics.fmean(outcome.loss for outcome in found)
    worst, obeyed = max(outcome.worst for outcome in found), max(outcome.obeyed for outcome in found)
    tried, merged, refused = (sum(getattr(outcome, name) for outcome in found) for name in ("tried", "merged", "refused"))
    cost = f"{loss:>9.3f}{worst:>9.3f}{loss - without:>+9.3f}{100 * (loss / without - 1):>+8.1f}{obeyed:>8.1%}"
    return f"{name:<24}{f'{size[1]} of {size[0]}':>8}{tried:>7}{merged:>8}{refused:>8}{cost}"
