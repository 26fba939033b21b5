"""The loss that slow meetings cost: real nodes and trainers of the demo's model in virtual time, independent of the machine's load.

    python -m benchmarks.meeting_delay [--peers 4] [--steps 300] [--intervals 5] [--rates 20] [--step-seconds 0.19] [--fragment-mb 8] ...

Each peer has a line of that rate and 2 ms of latency. The coding thread answers after 20 ms, during an inner step if allowed. Only the
passing of time is simulated. Held-out loss of the peers' average, on 64 batches. About six minutes of one core per row of four peers.

Figures are per peer: `a step`: completed meetings per inner step; `share`: of the time, in meetings; `in vain`: meetings that were refused
or failed, per inner step. For these alone, `--set batch_size=1 sequence_length=16` and 40 steps take a minute; the loss means nothing then.
`--in-step` gives all peers the same step time, so that all steps end in the same moment.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.peer.machine.events import Event
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.peer.model.model import build_model
from gossamer.peer.model.plan import fragment_codecs, model_plan
from gossamer.peer.simulator.choices import setting
from gossamer.peer.text.batches import Draw
from gossamer.peer.text.corpus import load_corpus
from gossamer.peer.text.tokenizer import load_tokenizer
from gossamer.peer.trainer.inner_loop import InnerLoop
from gossamer.peer.trainer.text_training import TextProgram, TextReplica
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.run.manifest import Manifest
from tests.swarm.paced import PacedTrainer
from tests.swarm.trainer import Trainer
from tests.swarm.world import Habits, Peer, Swarm, play

LATENCY_S = 0.002
SPEEDS = (1.0, 1.03, 0.97, 1.01)  # no two peers are in step
EVAL_BATCHES = 64
START_S = 30.0  # of virtual time, before the first step


class BegunInnerLoop(InnerLoop):
    """An inner loop that computes a gradient at the beginning of a step and returns it at the end."""

    _begun: tuple[Tensor, Tensor, int] | None = None

    def begin(self, step: int, seed: int) -> None:
        """Compute the gradient at the current weights."""
        self._begun = super().gradient(step, seed)

    def gradient(self, step: int, seed: int) -> tuple[Tensor, Tensor, int]:
        """Return the gradient."""
        if self._begun is None:
            self.begin(step, seed)
        begun, self._begun = self._begun, None
        assert begun is not None
        return begun


class DemoTrainer(PacedTrainer):
    """A trainer that computes each gradient at the weights of its beginning."""

    def begin_step(self) -> None:
        """Compute the gradient of the step."""
        self.replica.program.inner.begin(self.replica.own_steps, 0)


class DemoPeer(Peer):
    """A peer that trains the demo's model."""

    def _new_trainer(self) -> Trainer:
        return DemoTrainer(self._new_replica, self.habits.step_s, False)

    def _new_replica(self, emit: Callable[[Event], None]) -> Any:
        manifest = self.swarm.manifest
        draw = Draw(manifest.run.seed, self.peer_id.raw, manifest.inner.batch_size, manifest.inner.sequence_length)
        corpus = load_corpus(manifest.data, load_tokenizer(manifest.tokenizer), draw, None, self.swarm.folder / "cache")
        seed = int.from_bytes(self.peer_id.raw[-6:], "little")
        replica: Any = TextReplica(manifest, TextProgram(manifest, build_model(manifest.model, manifest.run.seed), corpus, emit), seed)
        replica.payloads = self.payloads
        replica.program.inner = BegunInnerLoop(manifest, replica.program.model, corpus, replica.program.inner.computing, emit)
        return replica


class DemoSwarm(Swarm):
    """Peers of the demo's model on lines of one rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = {name: tuple(p.shape) for name, p in build_model(self.manifest.model, 0).named_parameters()}
        plan = model_plan(fragment_codecs(self.manifest, shapes), self.manifest.outer.alpha)
        self.terms = RunTerms.from_manifest(self.manifest).with_plan(plan)


def run(folder: Path, interval: int | str, rate_mbit: float, given: argparse.Namespace) -> str:
    """Train a swarm to its end; return a row of the table."""
    manifest = Manifest.checked(
        {
            "run": {"total_steps": given.steps, "access": "open", "seed": given.seed},
            "inner": dict(map(setting, given.set)),
            "outer": {"inner_steps": interval},
            "fragments": {"max_fragment_mb": given.fragment_mb},
        }
    )
    swarm = DemoSwarm(folder, given.seed, manifest, Link(LATENCY_S, 0.0, rate_mbit / 8e-6))
    losses: list[float] = []
    spent_s: list[float] = []

    async def story(swarm: Swarm) -> None:
        for number in range(given.peers):
            peer = DemoPeer(swarm, number + 1, Habits(step_s=given.step_seconds * (1.0 if given.in_step else SPEEDS[number % len(SPEEDS)])))
            swarm.peers.append(peer)
            peer.start()
        within_s = START_S + 2 * given.steps * given.step_seconds
        began_s = asyncio.get_running_loop().time()
        await swarm.until(lambda: min(peer.global_step for peer in swarm.peers) >= given.steps, within_s)
        spent_s.append(asyncio.get_running_loop().time() - began_s)
        losses.append(_loss_of_average(swarm))

    play(swarm, story)
    done = [meeting for peer in swarm.peers for meeting in peer.meetings]
    met = [meeting for meeting in done if meeting.outcome == "completed"]
    num_peers, own_steps = len(swarm.peers), sum(peer.trainer.replica.own_steps for peer in swarm.peers)
    share = sum(meeting.seconds for meeting in done) / num_peers / spent_s[0]
    sent = sum(meeting.bytes_sent for meeting in done) / num_peers
    return (
        f"{interval!s:>8} {rate_mbit:>8g} {len(met) / num_peers:>9.0f} {len(met) / own_steps:>7.2f} "
        f"{statistics.median(one.seconds for one in met):>7.3f} {share:>6.2f} {(len(done) - len(met)) / own_steps:>8.3f} "
        f"{1e-6 * sent:>6.1f} {losses[0]:>8.4f}"
    )


def _loss_of_average(swarm: Swarm) -> float:
    replicas = [peer.trainer.replica for peer in swarm.peers]
    model = build_model(swarm.manifest.model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.stack([replica.parameters[name] for replica in replicas]).mean(0))
    corpus = replicas[0].program.corpus
    assert corpus is not None
    return held_out_loss(model, corpus, EVAL_BATCHES)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--intervals", default="5")
    parser.add_argument("--rates", default="20")
    parser.add_argument("--step-seconds", type=float, default=0.19)
    parser.add_argument("--fragment-mb", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-step", action="store_true")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the manifest's [inner]")
    given = parser.parse_args()
    print(f"{'interval':>8} {'Mbit/s':>8} {'meetings':>9} {'a step':>7} {'s each':>7} {'share':>6} {'in vain':>8} {'MB':>6} {'loss':>8}")
    for interval in given.intervals.split(","):
        for rate in given.rates.split(","):
            with tempfile.TemporaryDirectory(prefix="meeting-delay-") as folder:
                print(run(Path(folder), int(interval) if interval.isdecimal() else interval, float(rate), given), flush=True)


if __name__ == "__main__":
    main()
