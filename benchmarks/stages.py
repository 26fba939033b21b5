"""Staged runs of real peers on this machine, beside one peer that holds the whole model.

    python -m benchmarks.stages [--model demo|25M|125M|350M] [--stages 2] [--steps N] [--micro-batch N] [--line MBIT | --devices gpu]

First one peer trains the whole model on as many threads as there are stages, two at least. Then one holder for each stage trains it, with
one thread each. *tokens/s* are between the tenth step and the last. *training*, *coding* and *node*: processor time of a peer, in
milliseconds for 1,000 tokens. The sentences below compare the run's tokens/s with those of the whole model, and with what the slowest stage
could compute with a core to itself, or its line carry; and the bytes on the first holder's lanes with those that the manifest counts.
`--line`: each holder in a network namespace on a line of that rate both ways (as root). Needs an idle machine; the model `demo` takes a
minute, `25M` four, `125M` in three stages ten. `--devices gpu`: the whole model has the GPU alone, then all holders share it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.side_by_side.job import Job
from benchmarks.side_by_side.network import network
from benchmarks.side_by_side.peers import RunningPeer, start_one, wait_for_invite
from benchmarks.side_by_side.processes import process_group
from benchmarks.side_by_side.systems import GOSSAMER, SYSTEMS
from gossamer.cli.local_swarm import LocalSwarm, local_swarm
from gossamer.peer.machine import status
from gossamer.peer.machine.events import HopsCarried, NodeSpent, StepDone, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import has_stepped
from gossamer.peer.model.stages import manifest_cuts
from gossamer.peer.trainer.stage_loop import stage_terms
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.messages.terms import StageTerms
from gossamer.protocol.run.manifest import Manifest, StagedManifest

WARM_STEPS: Final = 10  # not counted: compilation, first lanes, growing windows
LOOK_S: Final = 0.5
LATE_S: Final = 1800.0
LOCAL: Final = ("--listen", "127.0.0.1", "--port", "0")


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its batches."""

    width: int
    blocks: int
    vocabulary: int
    batch_size: int
    sequence_length: int
    steps: int

    def manifest(self, stages: int, micro_batch: int, steps: int) -> Manifest:
        """Return the run of this model in so many stages."""
        heads = max(4, self.width // 64)
        config = {
            "hidden_size": self.width, "intermediate_size": self.width * 43 // 16, "num_hidden_layers": self.blocks,
            "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.sequence_length, "tie_word_embeddings": False,
        }  # fmt: skip
        tables = {
            "run": {"name": "stages", "total_steps": steps},
            "model": {"config": config},
            "inner": {"batch_size": self.batch_size, "sequence_length": self.sequence_length},
        }
        return Manifest.checked(tables | ({"stages": {"count": stages, "micro_batch": micro_batch}} if stages > 1 else {}))


SIZES: Final = {
    "demo": Size(128, 4, 256, batch_size=8, sequence_length=128, steps=120),
    "25M": Size(512, 8, 256, batch_size=8, sequence_length=128, steps=40),
    "125M": Size(768, 12, 26_048, batch_size=4, sequence_length=128, steps=24),
    "350M": Size(1024, 26, 32_000, batch_size=16, sequence_length=1024, steps=60),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One peer between two of its reports; processor time in seconds for a token."""

    name: str
    tokens_per_s: float
    training_s: float
    coding_s: float
    node_s: float


def measured(name: str, home: Path) -> Measured:
    """Read what a peer has told of its steps. Raises BadSettings for a run that ended too early."""
    events = list(read_events(Home(home).events))
    reports = [event for event in events if isinstance(event, StepDone) and has_stepped(event) and event.step >= WARM_STEPS]
    if len(reports) < 2:
        raise BadSettings(f"{name} ended too soon after step {WARM_STEPS}, from which on it is measured", hint="raise --steps")
    first, last = reports[0], reports[-1]
    tokens, seconds = last.tokens - first.tokens, last.ts - first.ts
    spent = [event for event in events if isinstance(event, NodeSpent)]
    before, after = (min(spent, key=lambda event: abs(event.ts - report.ts), default=None) for report in (first, last))
    return Measured(
        name,
        tokens / seconds,
        (last.training_cpu_s - first.training_cpu_s) / tokens,
        (last.coding_cpu_s - first.coding_cpu_s) / tokens,
        (after.cpu_s - before.cpu_s) / max(1e-9, after.ts - before.ts) * seconds / tokens if before and after else 0.0,  # alone: no node
    )


def whole(manifest: Manifest, folder: Path, devices: str, num_threads: int) -> Measured:
    """Train the whole model with one peer."""
    file = written(manifest, folder)
    with local_swarm(folder) as swarm:
        swarm.start("whole", ["host", str(file), "--alone", *LOCAL, "--devices", devices, "--threads", str(num_threads)])
        until_over(swarm)
    return measured("whole model", folder / "whole")


def staged(manifest: StagedManifest, folder: Path, devices: str) -> list[Path]:
    """Train with one holder for each stage, on loopback; return their homes, the first stage's first."""
    file, count = written(manifest, folder), manifest.stages.count
    options = (*LOCAL, "--devices", devices, "--threads", "1")
    with local_swarm(folder) as swarm:
        first = swarm.start("holder-1", ["host", str(file), *options, "--wait-for-peers", str(count - 1)])
        invite = first.invite()
        for number in range(2, count + 1):
            swarm.start(f"holder-{number}", ["join", invite, *options])
        until_over(swarm)
        return in_order((peer.home for peer in swarm.peers), count)


def in_order(homes: Iterable[Path], count: int) -> list[Path]:
    """Return homes in the order of their stages. Raises BadSettings where a stage had no holder."""
    held = ((status.of_events(list(read_events(Home(home).events))).stage, home) for home in homes)  # as "2 of 3"; empty: none
    found = {int(stage.partition(" ")[0]): home for stage, home in held if stage}
    if len(found) < count:
        raise BadSettings(f"of {count} stages only {sorted(found)} had a holder", hint="run it again on an idle machine")
    return [home for _, home in sorted(found.items())]


def on_lines(manifest: StagedManifest, folder: Path, mbit_per_s: float) -> list[Path]:
    """Train with one holder for each stage, each on a line of that rate; return their homes, the first stage's first."""
    file, count = written(manifest, folder), manifest.stages.count
    job = Job(num_peers=count, total_steps=manifest.run.total_steps)
    with network(count, mbit_per_s) as lines, ExitStack() as stack:
        groups = [stack.enter_context(process_group(str(line.number))) for line in lines]

        def start(number: int, *words: str) -> RunningPeer:
            return start_one(SYSTEMS[GOSSAMER], job, lines[number], groups[number], folder, words)

        peers = [start(0, "host", str(file), "--wait-for-peers", str(count - 1))]
        invite = wait_for_invite(peers[0])
        peers += [start(number, "join", invite) for number in range(1, count)]
        wait_for(lambda: refreshed(peers))
        return in_order((peer.home.path for peer in peers), count)


def refreshed(peers: Sequence[RunningPeer]) -> bool:
    """Look at peers on lines; return whether all have ended. Raises RuntimeError for one that has failed."""
    for peer in peers:
        peer.refresh()
        if peer.follower.state == "failed":
            raise RuntimeError(f"a peer failed: {peer.follower.reason}")
    return all(peer.follower.is_over for peer in peers)


def written(manifest: Manifest, folder: Path) -> Path:
    """Write the manifest into a folder."""
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / "manifest.toml"
    file.write_text(manifest.to_toml())
    return file


def until_over(swarm: LocalSwarm) -> None:
    """Wait until all peers have ended. Raises ChildFailed, TimeoutError."""
    wait_for(lambda: not swarm.refresh())


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    late_s = time.monotonic() + LATE_S
    while not is_so():
        if time.monotonic() > late_s:
            raise TimeoutError(f"the run takes longer than {LATE_S:.0f} s")
        time.sleep(LOOK_S)


def allowed(holders: Sequence[Measured], token_bytes: float, mbit_per_s: float) -> float:
    """Return the tokens/s that the slowest stage could compute alone on a core, or that its line could carry one way."""
    computed = min(1 / holder.training_s for holder in holders)
    num_hops = 2 if len(holders) > 2 else 1  # a middle holder sends one hop up, and the answer of another one down
    return min(computed, mbit_per_s * 125_000 / (num_hops * token_bytes) if mbit_per_s else computed)


def over_count(first: Path, terms: StageTerms) -> float:
    """Return the bytes on the lanes of a holder of the first stage, over those that its hops count. Raises BadSettings for none."""
    carried = [event for event in read_events(Home(first).events) if isinstance(event, HopsCarried) and event.outcomes.get("trained")]
    if not carried:
        raise BadSettings("the first stage ended before it reported a trained micro-batch", hint="raise --steps")
    last = carried[-1]
    counted = last.outcomes["trained"] * (terms.forward_bytes + terms.value_bytes) + last.outcomes.get("measured", 0) * terms.forward_bytes
    return (last.sent + last.received) / counted


def table(alone: Measured, holders: Sequence[Measured]) -> str:
    """Return the table."""
    rows = [f"{'':<16}{'tokens/s':>10}{'training':>10}{'coding':>8}{'node':>8}"]
    for one in (alone, *holders):
        cpu = "".join(f"{1e6 * seconds:>{width}.1f}" for seconds, width in ((one.training_s, 10), (one.coding_s, 8), (one.node_s, 8)))
        rows.append(f"{one.name:<16}{one.tokens_per_s:>10.0f}{cpu}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="demo")
    parser.add_argument("--stages", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--micro-batch", type=int, default=2, metavar="SEQUENCES")
    parser.add_argument("--line", type=float, default=0.0, metavar="MBIT", help="0: loopback")
    parser.add_argument("--devices", default="cpu", metavar="NAME", help="of the whole model and, on loopback, of the holders")
    given = parser.parse_args(arguments)
    if given.line and given.devices != "cpu":
        parser.error("--line measures holders on CPUs: leave --devices out")
    size = SIZES[given.model]
    steps = given.steps or size.steps
    manifest = size.manifest(given.stages, given.micro_batch, steps)
    assert isinstance(manifest, StagedManifest)
    terms = stage_terms(manifest, manifest_cuts(manifest)[0])
    tokens = given.micro_batch * size.sequence_length
    with tempfile.TemporaryDirectory(prefix="stages-", ignore_cleanup_errors=True) as place:
        alone = whole(size.manifest(1, given.micro_batch, steps), Path(place) / "whole", given.devices, max(2, given.stages))
        folder = Path(place) / "staged"
        homes = on_lines(manifest, folder, given.line) if given.line else staged(manifest, folder, given.devices)
        holders = [measured(f"stage {number} of {given.stages}", home) for number, home in enumerate(homes, 1)]
        bytes_over_count = over_count(homes[0], terms)
    print(table(alone, holders))
    run = holders[0].tokens_per_s
    may = allowed(holders, terms.forward_bytes / tokens, given.line)
    print(f"{run / alone.tokens_per_s:.2f} of the whole model's tokens/s, {run / may:.2f} of what the slowest stage's core or line allows")
    print(f"{bytes_over_count:.3f} of the bytes counted, {(terms.token_bytes + 2 * terms.value_bytes) / tokens:.0f} for a token and hop")
    return 0


if __name__ == "__main__":
    sys.exit(main())
