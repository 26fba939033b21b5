"""What judging messages costs honest swarms, where it should be nothing. Attacks: `python -m tests.attacks`.

    python -m benchmarks.gate [--seeds N ...] [--only NAME ...]

Four peers with Muon, real meetings with `modulo4`, under conditions that drive them apart. `refused` counts meetings in which the merge
gate or the probe of a side refused the message. `longest` is the largest gap relative to the merge gate's limit: above 1 it was refused.
`left` is the smallest allowance, in lengths of the weights. `loss` is the mean held-out loss, and `cost` how many per cent it lies above
that of the same swarm in which nobody judges anything. Six minutes of a core for each seed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gossamer.optim.fragments import scatter
from gossamer.peer.simulator.choices import scenario, setting
from gossamer.peer.simulator.hostile import members
from gossamer.peer.simulator.methods import method, pair_rule
from gossamer.peer.simulator.pairs import Floor, Gossip, Matcher, PairPeer, matcher
from gossamer.peer.simulator.population import Population, populate
from gossamer.peer.simulator.scenario import Scenario
from gossamer.peer.simulator.texts import load_texts
from gossamer.peer.simulator.training import held_out_losses
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.fragment_state import FragmentState, Lengths, MergeGate
from gossamer.protocol.run.manifest import Manifest
from tests.peer.open_gates import OpenGate, open_gates

BASE = "method=noloco codec=modulo4 batch_size=2 sequence_length=64"
EVAL_BATCHES = 128
MODEL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}  # the demo's, smaller
Apart = Callable[[Fraction, int, int], bool]  # (now, one, other): they cannot meet
Paused = Callable[[Fraction, int], bool]  # (now, peer): it makes no steps


# ---------------------------------------------------------------------- swarms


@dataclass(frozen=True, slots=True)
class Trouble:
    """A swarm's settings, and its disturbance."""

    settings: str
    apart: Apart = lambda now, one, other: False
    paused: Paused = lambda now, peer: False
    transfers: Mapping[int, tuple[int, int]] = field(
        default_factory=dict
    )  # at this time, the second peer takes over the first one's weights


def alone(who: int, start: int, stop: int) -> Apart:
    """Separate one peer from all others for a while; it continues to train."""
    return lambda now, one, other: start <= now < stop and (one == who) != (other == who)


def split(start: int, stop: int) -> Apart:
    """Separate the first two peers from the others for a while."""
    return lambda now, one, other: start <= now < stop and (one < 2) != (other < 2)


def paused(who: set[int], start: int, stop: int) -> Paused:
    """Stop the steps of some peers for a while."""
    return lambda now, peer: start <= now < stop and peer in who


HONEST: Mapping[str, Trouble] = {
    "equal peers, every 2": Trouble("steps=80 inner_steps=2"),
    "equal peers, every 5": Trouble("steps=80 inner_steps=5"),
    "equal peers, every 25": Trouble("steps=100 inner_steps=25"),
    "AdamW, speeds 4:1": Trouble("steps=80 inner_steps=5 speeds=4:1 optimizer=adamw learning_rate=1.5e-3"),
    "the papers' outer step, speeds 4:1": Trouble("steps=80 inner_steps=5 speeds=4:1 alpha=0.5 beta=0.7 gamma=0.7"),
    "texts of their own": Trouble("steps=80 inner_steps=5 skew=0.5"),
    "five peers, only texts of their own": Trouble("peers=5 steps=80 inner_steps=5 skew=1.0"),
    "speeds 4:1": Trouble("steps=80 inner_steps=5 speeds=4:1"),
    "speeds 8:1": Trouble("steps=80 inner_steps=5 speeds=8:1"),
    "speeds 8:1:1:1": Trouble("steps=80 inner_steps=5 speeds=8:1:1:1"),
    "two peers": Trouble("peers=2 steps=80 inner_steps=5"),
    "speeds 8:1, every 25": Trouble("steps=100 inner_steps=25 speeds=8:1"),
    "speeds 4:1, meetings take 4 steps": Trouble("steps=80 inner_steps=5 speeds=4:1 delay=4"),
    "a third away at any time": Trouble("steps=80 inner_steps=5 drop_out=0.3"),
    "speeds 4:1, a fifth away": Trouble("steps=80 inner_steps=5 speeds=4:1 drop_out=0.2"),
    "one alone, steps 0 to 55": Trouble("steps=100 inner_steps=5", alone(0, 0, 55)),
    "one alone, steps 40 to 95": Trouble("steps=120 inner_steps=5", alone(0, 40, 95)),
    "both of two alone, steps 0 to 90": Trouble("peers=2 steps=120 inner_steps=5", alone(0, 0, 90)),
    "one stands still, steps 40 to 140": Trouble("steps=170 inner_steps=5", paused=paused({0}, 40, 140)),
    "in two halves, steps 40 to 110": Trouble("steps=140 inner_steps=5", split(40, 110)),
    "joins with weights 5 steps old": Trouble("steps=80 inner_steps=5", alone(3, 0, 45), transfers={40: (0, 3)}),
    "three join at step 55 from the seed": Trouble("steps=100 inner_steps=10", paused=paused({1, 2, 3}, 0, 55)),
}


class Parted:
    """A matcher that never pairs separated peers."""

    def __init__(self, inner: Matcher, apart: Apart) -> None:
        self._inner = inner
        self._apart = apart

    def arrange(self, now: Fraction, arrived: Sequence[int], floor: Floor) -> None:
        """Arrange the meetings of peers that are not separated."""
        self._inner.arrange(now, arrived, Walls(floor, partial(self._apart, now)))

    def note_outer_step(self, peer: int, fragment: int, num_steps: int = 0, *, is_met: bool = True) -> None:
        """Forward to the real matcher."""
        self._inner.note_outer_step(peer, fragment, num_steps, is_met=is_met)


class Walls:
    """A floor on which some peers are separated."""

    def __init__(self, floor: Floor, apart: Callable[[int, int], bool]) -> None:
        self.is_free = floor.is_free
        self.begin = floor.begin
        self.always_calls = floor.always_calls
        self.take_solo_step = floor.take_solo_step
        self._floor = floor
        self._apart = apart

    def step_gap(self, one: int, two: int) -> int:
        """Return the difference of the global steps; for separated peers one that is too large to meet."""
        return 1 << 30 if self._apart(one, two) else self._floor.step_gap(one, two)


class WatchedGate(MergeGate):
    """A gate that records its judgements."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[float] = []  # each gap in limits
        self.least_left = 2.0  # allowance, in lengths of the weights

    def judge(self, gap: float, own: Lengths) -> str:
        """Judge, and record it."""
        self.limits.append(gap / max(1e-9, self.limit(own)))
        return super().judge(gap, own)

    def accept(self, gap: float, own: Lengths, kept: float = 1.0, most: float = 1.0, place: str = "") -> None:
        """Accept, and record it."""
        super().accept(gap, own, kept, most, place)
        self.least_left = min(self.least_left, (self.state()["allowance"] or 0.0) / own.message)


@dataclass(frozen=True, slots=True)
class Trained:
    """A disturbed swarm at its end."""

    peers: Sequence[PairPeer]
    population: Population
    loss: float  # held out, nats per token, mean


def train(trouble: Trouble, seed: int, *, judges: bool = True) -> Trained:
    """Train a disturbed swarm, with or without its judging messages."""
    small = Manifest.checked({"model": {"config": Manifest().model.config | MODEL}})
    made: Scenario = scenario(small, dict(setting(text) for text in f"peers=4 {BASE} seed={seed} {trouble.settings}".split()))
    transfers = dict(trouble.transfers)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(made.manifest.tokenizer)
        texts = load_texts(made, tokenizer, None, Path(folder))
        torch.manual_seed(seed)
        population = populate(made, tokenizer, texts, torch.device("cpu"), method("noloco").schedules(made))

        def cannot_meet(now: Fraction, one: int, other: int) -> bool:
            return trouble.apart(now, one, other) or trouble.paused(now, one) or trouble.paused(now, other)

        parted = Parted(matcher(made, len(population.layout.codecs)), cannot_meet)
        table = Gossip(population, pair_rule(made), parted, members(population))
        for member in table.peers:
            for fragment in member.fragments:
                fragment.gate = WatchedGate()
        if not judges:
            open_gates(table.peers)
        for now, arrived in made.steps_at_own_rates():
            here = [peer for peer in arrived if not trouble.paused(now, peer)]
            for peer in here:
                table.peers[peer].inner_step(made.step_tokens)
            for time in [time for time in transfers if time <= now]:
                source, joiner = transfers.pop(time)
                take_over(table.peers[source], table.peers[joiner], judges=judges)
            table.boundary(now, here)
        loss = statistics.fmean(held_out_losses(population.replicas, texts.held_out, EVAL_BATCHES))
    return Trained(table.peers, population, loss)


def take_over(source: PairPeer, joiner: PairPeer, *, judges: bool) -> None:
    """Adopt a source's state as a joiner does."""
    for theirs, mine in zip(source.fragments, joiner.fragments, strict=True):
        put(mine, theirs.slow, joiner)
        mine.replace(mine.slow, mine.momentum)
        mine.gate = WatchedGate() if judges else OpenGate()
    joiner.replica.global_step = source.replica.global_step


def put(fragment: FragmentState, values: Tensor, peer: PairPeer) -> None:
    """Set a fragment's slow and fast weights."""
    fragment.slow = values.clone()
    scatter(fragment.codec.fragment, fragment.slow, peer.replica.parameters)


# ---------------------------------------------------------------------- tables


def print_honest(name: str, seeds: Sequence[int]) -> None:
    """Print a row of the first table."""
    trained = [train(HONEST[name], seed) for seed in seeds]
    gates = [part.gate for one in trained for peer in one.peers for part in peer.fragments if isinstance(part.gate, WatchedGate)]
    meetings, refused = (sum(getattr(one.population.traffic, each) for one in trained) for each in ("completed", "refused"))
    longest, left = max(max(gate.limits, default=0.0) for gate in gates), min(gate.least_left for gate in gates)
    ungated = statistics.fmean(train(HONEST[name], seed, judges=False).loss for seed in seeds)
    loss = statistics.fmean(one.loss for one in trained)
    print(f"{name:<40}{meetings:>9}{refused:>9}{longest:>9.2f}{left:>7.2f}{loss:>8.3f}{100 * (loss / ungated - 1):>+8.2f}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=list(HONEST), metavar="NAME")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'honest':<40}{'meetings':>9}{'refused':>9}{'longest':>9}{'left':>7}{'loss':>8}{'cost %':>8}")
    for name in [name for name in HONEST if name in given.only]:
        print_honest(name, given.seeds)


if __name__ == "__main__":
    main()
