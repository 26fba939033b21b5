"""Processor time of a meeting: two real peers meet as often as possible, and each process reports its processor time.

    python -m benchmarks.meeting_cost [--seconds S]

Two real peers on loopback (supervisor, node, p2pd, trainer) with the demo's model in three fragments; only their inner steps sleep
(stepless_trainer.py). The first window has no meetings; in the second, every fragment is due again at once. A row is the processor time
(user and system) of a process in the second window beyond its rate in the first, per counted meeting, in which both sides take part.
`coding` is the cost of coding alone, measured in the same run: no transport can save it, and it makes runs on different machines
comparable. The aim for a small meeting is less than 10 ms per side.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.step_rate import BenchedPeer, running
from benchmarks.stepless_trainer import FLAG, MOVE, NUM_TOKENS
from gossamer.optim.fragment_codec import FragmentCodec
from gossamer.peer.machine.config import NODE, TRAINER
from gossamer.peer.model.model import build_model
from gossamer.peer.model.plan import fragment_codecs
from gossamer.protocol.run.manifest import Manifest, need_text

CALM_S = 8.0
STEPS = 100_000_000
PARTS = ("node", "p2pd", "coding thread", "training thread")
AIM_MS = 10.0
FRAGMENT_MB = 0.16  # three of the default model


@dataclass(frozen=True, slots=True)
class Used:
    """Processor seconds of each part of a peer and its number of meetings, at one time."""

    at_s: float
    seconds: Mapping[str, float]
    steps: int
    meetings: int
    refused: int

    @classmethod
    def of(cls, peer: BenchedPeer) -> Used:
        """Return the current readings of a peer."""
        node, trainer = psutil.Process(peer.supervisor.children.pid(NODE)), peer.supervisor.children.pid(TRAINER)
        daemons = [child for child in node.children() if child.name() == "p2pd"]
        threads = threads_s(trainer)
        seconds = {
            "node": sum(threads_s(node.pid).values()),
            "p2pd": sum(sum(threads_s(daemon.pid).values()) for daemon in daemons),
            "training thread": threads.pop(trainer),
            "coding thread": sum(threads.values()),
        }
        meetings = peer.status.meetings
        return cls(time.monotonic(), seconds, peer.status.tokens // NUM_TOKENS, meetings["completed"], meetings["refused"])


def threads_s(pid: int) -> dict[int, float]:
    """Return the processor seconds of each thread of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}


def cost_ms(calm: tuple[Used, Used], busy: tuple[Used, Used]) -> dict[str, float]:
    """Return milliseconds per meeting of each part beyond its idle rate, per step for the trainer's thread, per second for the others."""
    num_meetings = busy[1].meetings - busy[0].meetings
    costs = {}
    for part in PARTS:
        idle, used = (after.seconds[part] - before.seconds[part] for before, after in (calm, busy))
        calm_span, span = (
            after.steps - before.steps if part == "training thread" else after.at_s - before.at_s for before, after in (calm, busy)
        )
        costs[part] = 1000 * (used - idle / calm_span * span) / num_meetings
    return costs


def coding_ms(manifest: Manifest) -> float:
    """Return the milliseconds of one side's coding of a fragment on one thread: sketch, encode, gap; mean over the fragments."""
    torch.set_num_threads(1)
    model = build_model(manifest.model, 0)
    codecs = fragment_codecs(manifest, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    return sum(map(_coding_ms, codecs)) / len(codecs)


def _coding_ms(codec: FragmentCodec) -> float:
    one = torch.randn(codec.fragment.numel)
    other = one + MOVE * torch.randn_like(one)
    times_s = []
    for _ in range(20):
        start_s = time.thread_time()
        sketch = codec.sketch(one, 1)
        partner_sketch = codec.sketch(other, 1)
        half_s = time.thread_time()
        encoded = codec.encode(one, 1, sketch, partner_sketch)
        sent_s = time.thread_time()
        partner = codec.encode(other, 1, partner_sketch, sketch)
        decode_s = time.thread_time()
        codec.gap(encoded, partner.payload)
        times_s.append((half_s - start_s) / 2 + (sent_s - half_s) + (time.thread_time() - decode_s))
    return 1000 * sorted(times_s)[len(times_s) // 2]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures: milliseconds of processor time, mean of both sides."""

    meetings: int
    meetings_per_second: float
    refused: int
    cost_ms: Mapping[str, float]  # per meeting, by part
    idle_ms_per_second: Mapping[str, float]  # in the calm window
    coding_ms: float

    @classmethod
    def of(cls, calm: tuple[list[Used], list[Used]], busy: tuple[list[Used], list[Used]], coding: float) -> Figures:
        """Return the difference of two windows, each of two readings of both peers."""
        sides = [cost_ms((calm[0][side], calm[1][side]), (busy[0][side], busy[1][side])) for side in (0, 1)]
        calm_s = calm[1][0].at_s - calm[0][0].at_s
        idle = {part: sum(calm[1][side].seconds[part] - calm[0][side].seconds[part] for side in (0, 1)) / 2 for part in PARTS}
        num_meetings = busy[1][0].meetings - busy[0][0].meetings
        return cls(
            num_meetings,
            num_meetings / (busy[1][0].at_s - busy[0][0].at_s),
            sum(busy[1][side].refused - busy[0][side].refused for side in (0, 1)),
            {part: sum(side[part] for side in sides) / 2 for part in PARTS},
            {part: 1000 * seconds / calm_s for part, seconds in idle.items()},
            coding,
        )


async def measure(folder: Path, seconds: float) -> Figures:
    """Let two peers meet for some seconds."""
    first, second = BenchedPeer(folder / "first", 1), BenchedPeer(folder / "second", 1)
    peers = (first, second)
    for peer in peers:
        peer.programs[TRAINER] = "benchmarks.stepless_trainer"
    job = {"run": {"total_steps": STEPS}, "outer": {"inner_steps": 1}, "fragments": {"max_fragment_mb": FRAGMENT_MB}}
    signed = first.found(Manifest.checked(job))
    async with running(first):
        await first.invite(second, signed)
        async with running(second):
            await second.until(lambda status: status.own_steps, "first step of the joiner")
            await asyncio.sleep(CALM_S)
            calm = await window(peers, seconds / 2)
            for peer in peers:
                (peer.home.path / FLAG).touch()
            await first.until(lambda status: status.meetings["completed"] > 5, "meeting")
            busy = await window(peers, seconds)
    return Figures.of(calm, busy, coding_ms(need_text(signed.manifest())))


async def window(peers: tuple[BenchedPeer, BenchedPeer], seconds: float) -> tuple[list[Used], list[Used]]:
    """Return readings before and after a window."""
    before = [Used.of(peer) for peer in peers]
    await asyncio.sleep(seconds)
    return before, [Used.of(peer) for peer in peers]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meeting-cost-") as folder:
        figures = asyncio.run(measure(Path(folder), given.seconds))
    print(f"{figures.meetings} meetings, {figures.meetings_per_second:.1f} a second, {figures.refused} refused; both sides' mean")
    print(f"{'':<18}{'ms a meeting':>13}{'of coding':>11}{'ms a second, calm':>19}")
    total_ms = sum(figures.cost_ms.values())
    for name, cost, idle in (
        *((part, figures.cost_ms[part], figures.idle_ms_per_second[part]) for part in PARTS),
        ("together", total_ms, sum(figures.idle_ms_per_second.values())),
        ("coding alone", figures.coding_ms, 0.0),
    ):
        print(f"{name:<18}{cost:>13.1f}{cost / figures.coding_ms:>10.1f}x{idle:>19.1f}")
    print(f"together {total_ms:.1f} ms, the aim is {AIM_MS:g}")


if __name__ == "__main__":
    main()
