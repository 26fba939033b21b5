"""Processor time of moving a state between two real peers, per megabyte, by process and by way of requesting it.

    python -m benchmarks.transfer_cost [--width N] [--ways pieces chunks bulk]

Two real peers on loopback; their inner steps sleep (stepless_trainer.py). The second peer joins the run of the first once in each way and
takes its whole state. A row is the processor time (user and system) of a process from the first piece to the last, beyond its idle rate,
per megabyte. `pieces`: one request for each piece of 64 KiB; `chunks`: for runs of pieces up to a chunk of gRPC; `bulk`: for runs of up to
4 MiB, over a bulk stream. The aim is 9 ms per megabyte for all four processes at 100 Mbit/s or more.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import real_model
from benchmarks.meeting_cost import Used
from benchmarks.node_of_way import WAY, WAYS
from benchmarks.step_rate import BenchedPeer, running
from gossamer.peer.machine.config import NODE, TRAINER
from gossamer.peer.machine.events import StateTransferred, read_events

STEPS: Final = 100_000_000
GAP_STEPS: Final = 10  # a peer farther behind than a tenth of it takes a state
AHEAD_STEPS: Final = 3  # of the giver, when the taker joins
CALM_S: Final = 5.0
LATE_S: Final = 300.0
LOOK_S: Final = 0.01
AIM_MS: Final = 9.0
PARTS: Final = ("node", "p2pd")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one transfer."""

    megabytes: float
    seconds: float
    giver_node_ms: float  # per megabyte, as all of these
    giver_p2pd_ms: float
    taker_node_ms: float
    taker_p2pd_ms: float

    @property
    def all_ms(self) -> float:
        """Milliseconds of all four processes."""
        return self.giver_node_ms + self.giver_p2pd_ms + self.taker_node_ms + self.taker_p2pd_ms


async def measure(folder: Path, width: int, way: str) -> Cost:
    """Let a peer join in one way."""
    giver, taker = BenchedPeer(folder / "giver", 1), BenchedPeer(folder / "taker", 1)
    for peer in (giver, taker):
        peer.programs |= {TRAINER: "benchmarks.stepless_trainer", NODE: "benchmarks.node_of_way"}
        (peer.home.path / WAY).write_text(way)
    signed = giver.found(real_model.manifest(STEPS, width, GAP_STEPS))
    async with running(giver):
        await giver.invite(taker, signed)
        await until(lambda: giver.status.step >= AHEAD_STEPS)
        calm = Used.of(giver)
        await asyncio.sleep(CALM_S)
        calm_ms = used_ms(calm, began := Used.of(giver), per=began.at_s - calm.at_s)
        async with running(taker):
            await until(lambda: taker.status.reason.startswith("downloading weights"))
            before = Used.of(giver), Used.of(taker)
            await until(lambda: taker.status.reason.startswith("downloading weights: 100 %"))
            after = Used.of(giver), Used.of(taker)
            await taker.until(lambda status: status.own_steps, "step with the weights")
    done = next(event for event in read_events(taker.home.events) if isinstance(event, StateTransferred))
    megabytes, seconds = done.fetched_bytes / 1e6, after[0].at_s - before[0].at_s
    sides = [used_ms(before[side], after[side], per=megabytes) for side in (0, 1)]
    idle = {part: calm_ms[part] * seconds / megabytes for part in PARTS}
    costs = [side[part] - idle[part] for side in sides for part in PARTS]
    return Cost(megabytes, seconds, *costs)


def used_ms(before: Used, after: Used, per: float) -> dict[str, float]:
    """Return the milliseconds of each part between two readings, per something."""
    return {part: 1000 * (after.seconds[part] - before.seconds[part]) / per for part in PARTS}


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    late_s = time.monotonic() + LATE_S
    while not is_so():
        if time.monotonic() > late_s:
            raise TimeoutError("no transfer in time")
        await asyncio.sleep(LOOK_S)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384, help="of the model: 384 has a state of about 100 MB")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    given = parser.parse_args()
    costs = {}
    for way in given.ways:
        with tempfile.TemporaryDirectory(prefix="transfer-cost-") as folder:
            costs[way] = asyncio.run(measure(Path(folder), given.width, way))
    print(f"{'ms per MB':<10}{'giver node':>12}{'giver p2pd':>12}{'taker p2pd':>12}{'taker node':>12}{'all':>8}{'Mbit/s':>9}")
    for way, cost in costs.items():
        parts = (cost.giver_node_ms, cost.giver_p2pd_ms, cost.taker_p2pd_ms, cost.taker_node_ms)
        print(f"{way:<10}{''.join(f'{part:>12.1f}' for part in parts)}{cost.all_ms:>8.1f}{8 * cost.megabytes / cost.seconds:>9.0f}")
    print(f"the aim is {AIM_MS:g} ms per MB over a bulk stream")


if __name__ == "__main__":
    main()
