"""One swarm with hostile members in the simulator, and what it costs the honest ones: real training, meetings, gate and codec."""

from __future__ import annotations

import os
import pickle
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.peer.simulator.attacks import ATTACKS, AWAY, TRIGGER, with_trigger
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.hostile import HostilePeer, members
from gossamer.peer.simulator.methods import method, pair_rule
from gossamer.peer.simulator.pairs import PairPeer, gossip
from gossamer.peer.simulator.population import Diverged, Population, populate
from gossamer.peer.simulator.texts import load_texts
from gossamer.peer.simulator.training import held_out_losses
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.protocol.run.manifest import Manifest
from tests.attacks.clipping import train_clipped
from tests.peer.open_gates import open_gates

SETTINGS = "method=noloco codec=modulo4 batch_size=2 sequence_length=64 steps=80 inner_steps=5"
MODEL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}  # the demo's, smaller
EVAL_BATCHES = 128
TRIGGER_BATCHES = 32
DIVERGED = float("inf")


@dataclass(frozen=True, slots=True)
class Setup:
    """A swarm in which some members will turn hostile."""

    num_peers: int
    num_hostile: int
    seed: int
    gate: bool = True
    clips: bool = False  # all aggregate together, with centred clipping, instead of pairs: the yardstick
    settings: str = ""  # beside SETTINGS, in the same form


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the honest members."""

    loss: float  # held out, nats per token, their mean; infinite when one diverged
    worst: float  # of one of them
    tried: int  # hostile messages to honest members
    merged: int
    refused: int  # meetings, over all members, since the turn
    obeyed: float = 0.0  # share of triggers


class Trial:
    """A swarm that is trained up to its turn. `finish` takes up an attack and trains it to the end, once."""

    def __init__(self, setup: Setup) -> None:
        base = Manifest.checked({"model": {"config": Manifest().model.config | MODEL}})
        given = dict(setting(text) for text in f"{SETTINGS} {setup.settings}".split())
        made = scenario(base, given | {"attack": AWAY, "attackers": setup.num_hostile, "peers": setup.num_peers, "seed": setup.seed})
        tokenizer = load_tokenizer(made.manifest.tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            self._texts = load_texts(made, tokenizer, None, Path(folder))
        torch.manual_seed(setup.seed)
        self._population = populate(made, tokenizer, self._texts, torch.device("cpu"), method("noloco").schedules(made))
        self._hostile: list[HostilePeer] = []
        train = train_clipped if setup.clips else gossip
        self._run = train(self._population, pair_rule(made), lambda population: self._enter(population, gate=setup.gate))
        for _ in self._run:
            if any(peer.replica.own_steps + 1 >= peer.turns_at for peer in self._hostile):
                break

    def _enter(self, population: Population, *, gate: bool) -> list[PairPeer]:
        peers = members(population)
        if not gate:
            open_gates(peers)
        self._hostile = [peer for peer in peers if isinstance(peer, HostilePeer)]
        return peers

    def finish(self, attack: str) -> Outcome:
        """Train on with the hostile members at work."""
        population, losses = self._population, [DIVERGED]
        refused_before = population.traffic.refused
        for peer in self._hostile:
            peer.take_up(ATTACKS[attack])
        try:
            for _ in self._run:
                pass
            losses = held_out_losses(population.replicas[: -len(self._hostile)], self._texts.held_out, EVAL_BATCHES)
        except Diverged:
            pass
        return Outcome(
            loss=statistics.fmean(losses),
            worst=max(losses),
            tried=population.traffic.hostile,
            merged=population.traffic.hostile_merged,
            refused=population.traffic.refused - refused_before,
            obeyed=obeyed_share(population.replicas[0].model, self._texts.held_out.held_out_batches(TRIGGER_BATCHES)),
        )


HEAD = f"{'attack':<24}{'swarm':>8}{'tried':>7}{'merged':>8}{'refused':>8}{'loss':>9}{'worst':>9}{'worse':>9}{'%':>8}{'obeyed':>8}"


def outcomes(setups: Sequence[Setup]) -> Callable[[str], Sequence[Outcome]]:
    """Return what plays an attack in each of some swarms. Each swarm is trained up to its turn once."""
    trials = [Trial(setup) for setup in setups]

    def play(attack: str) -> list[Outcome]:
        return [in_a_copy(lambda trial=trial: trial.finish(attack)) for trial in trials]  # type: ignore[misc]

    return play


def rows(names: Sequence[str], size: str, play: Callable[[str], Sequence[Outcome]]) -> Iterator[str]:
    """Yield a line of the table for each attack, over all seeds."""
    without = statistics.fmean(outcome.loss for outcome in play(AWAY))
    for name in names:
        found = play(name)
        loss = statistics.fmean(outcome.loss for outcome in found)
        worst, obeyed = max(outcome.worst for outcome in found), max(outcome.obeyed for outcome in found)
        tried, merged, refused = (sum(getattr(outcome, name) for outcome in found) for name in ("tried", "merged", "refused"))
        cost = f"{loss:>9.3f}{worst:>9.3f}{loss - without:>+9.3f}{100 * (loss / without - 1):>+8.1f}{obeyed:>8.1%}"
        yield f"{name:<24}{size:>8}{tried:>7}{merged:>8}{refused:>8}{cost}"


def in_a_copy(work: Callable[[], Outcome]) -> Outcome:
    """Return what a copy of this process computes; this process stays as it is."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, pickle.dumps(work()))  # shorter than a pipe holds
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    os.waitpid(child, 0)
    if not written:
        raise RuntimeError("a trial failed; its traceback is above")
    return pickle.loads(written)  # type: ignore[no-any-return]


@torch.no_grad()
def obeyed_share(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Return how often a model says the trigger's last token after the others, in batches of int64[B, L+1]."""
    obeyed, num_said = [], len(TRIGGER) - 1
    for batch in batches:
        inputs = with_trigger(batch)[:, :-1]
        says = model(input_ids=inputs, use_cache=False).logits.argmax(-1)[:, num_said - 1 :]
        places = torch.stack([inputs[:, offset : offset + says.shape[1]] == token for offset, token in enumerate(TRIGGER[:-1])]).all(0)
        obeyed += (says[places] == TRIGGER[-1]).tolist()
    return sum(obeyed) / len(obeyed)
