"""The cost of failures for the trainer: step rate of a real peer with its node or network failing, over its own rate before.

    python -m benchmarks.step_rate [--seconds S] [--pairs N] [--threads T]

Real processes on this machine, the demo's model, one peer that takes solo steps. A pair is one calm window and one with a failure, next to
each other in the same run, so that slow changes of the machine cancel out. `nothing` is a pair of calm windows: the noise of the ratio.
`killed`: the node gets SIGKILL at the beginning of the window and is restarted in it. `crashing`: every node that is started dies. `dead`:
the only partner is killed after their first meeting and never answers again. The aim is 98 % or more. `cpu` is the same ratio in processor
time of the trainer per step, `blocked` the share of time at step boundaries over the whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gossamer.peer.machine.config import NODE, TRAINER, PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.machine.status import Status
from gossamer.peer.machine.units import UNLIMITED
from gossamer.peer.supervisor.children import PROGRAMS
from gossamer.peer.supervisor.supervisor import Supervisor
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest

MODES = ("nothing", "killed", "crashing", "dead")
CALM_S = 10.0  # after a node was started
READY_S = 120.0
STEPS = 10_000_000


@dataclass(frozen=True, slots=True)
class Window:
    """The step rate of a trainer in one window."""

    steps_per_second: float
    cpu_s_per_step: float  # processor time


class BenchedPeer:
    """One peer in a temporary home, and its step rate."""

    def __init__(self, folder: Path, threads: int, devices: str = "cpu", max_upload: str = UNLIMITED) -> None:
        self.home = Home(folder)
        self.home.create()
        self.identity = Identity.load_or_create(self.home.identity)
        self.seen: list[tuple[float, int]] = []  # when, own steps
        self.programs = dict(PROGRAMS)
        config = PeerConfig(home=folder, threads=threads, devices=devices, max_upload=max_upload, listen="127.0.0.1")
        self.supervisor = Supervisor(config, str(self.identity.peer_id), self._watch, self.programs)

    @property
    def status(self) -> Status:
        """Return the newest status."""
        return self.supervisor.status

    def _watch(self, status: Status) -> None:
        if not self.seen or status.own_steps != self.seen[-1][1]:
            self.seen.append((time.monotonic(), status.own_steps))

    def found(self, manifest: Manifest) -> SignedManifest:
        """Create a run with this peer as its first."""
        signed = SignedManifest.sign(manifest.with_host(self.identity.peer_id), self.identity)
        self.home.manifest.write_bytes(signed.to_bytes())
        return signed

    async def invite(self, other: BenchedPeer, signed: SignedManifest) -> None:
        """Invite another peer to the run, once the first step is made."""
        await self.until(lambda status: status.own_steps, "first step")
        invite = Invite.issue(self.identity, signed.run_id, tuple(self.status.addresses), None, int(time.time()) + 3600)
        other.home.invite.write_text(invite.to_text() + "\n")

    async def until(self, look: Callable[[Status], Any], what: str) -> None:
        """Wait until the status shows something."""
        until_s = time.monotonic() + READY_S
        while not look(self.status):
            if time.monotonic() > until_s:
                raise TimeoutError(f"no {what} in {READY_S:.0f} s: {self.status.state}, {self.status.reason}; see {self.home.log}")
            await asyncio.sleep(0.1)

    async def window(self, seconds: float) -> Window:
        """Measure from one report to another."""
        trainer = psutil.Process(self.supervisor.children.pid(TRAINER))
        (start_s, start), start_cpu_s = self.seen[-1], sum(trainer.cpu_times()[:2])
        await asyncio.sleep(seconds)
        (end_s, end), end_cpu_s = self.seen[-1], sum(trainer.cpu_times()[:2])
        return Window((end - start) / (end_s - start_s), (end_cpu_s - start_cpu_s) / (end - start))

    async def node(self) -> None:
        """Wait for a live node, and until it is idle."""
        pid, since_s, until_s = 0, time.monotonic(), time.monotonic() + READY_S
        while not pid or time.monotonic() - since_s < CALM_S:
            if self.supervisor.children.pid(NODE) != pid or not psutil.pid_exists(pid):
                pid, since_s = self.supervisor.children.pid(NODE), time.monotonic()
            if time.monotonic() > until_s:
                raise TimeoutError(f"no node in {READY_S:.0f} s; see {self.home.log}")
            await asyncio.sleep(0.1)

    def kill(self, *names: str) -> None:
        """Kill processes of the peer without warning."""
        for name in names:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                psutil.Process(self.supervisor.children.pid(name)).kill()


@contextlib.asynccontextmanager
async def running(peer: BenchedPeer) -> AsyncIterator[BenchedPeer]:
    """Run a peer inside the context."""
    with runtime_folder(64 << 20) as runtime:
        work = asyncio.create_task(peer.supervisor.run(runtime))
        try:
            yield peer
        finally:
            peer.supervisor.leave("measured")
            await work


async def measure(mode: str, folder: Path, given: argparse.Namespace) -> tuple[list[tuple[Window, Window]], float]:
    """Return pairs of a calm window and one in trouble, and the share of the run that the trainer was blocked."""
    peer = BenchedPeer(folder / "home", given.threads)
    signed = peer.found(Manifest.checked({"run": {"total_steps": STEPS}}))
    pairs = []
    async with running(peer):
        await peer.until(lambda status: status.own_steps, "first step")
        for number in range(given.pairs):
            await peer.node()
            calm = await peer.window(given.seconds)
            await TROUBLES[mode](peer, signed, folder / f"partner-{number}")
            pairs.append((calm, await peer.window(given.seconds)))
            peer.programs[NODE] = PROGRAMS[NODE]
        return pairs, peer.status.blocked_seconds / peer.status.train_seconds


async def nothing(peer: BenchedPeer, signed: SignedManifest, folder: Path) -> None:
    """Do nothing: the calm reference."""


async def kill(peer: BenchedPeer, signed: SignedManifest, folder: Path) -> None:
    """Kill the node once."""
    peer.kill(NODE)


async def crash(peer: BenchedPeer, signed: SignedManifest, folder: Path) -> None:
    """Kill every node that is started."""
    peer.programs[NODE] = "benchmarks.no_such_program"
    peer.kill(NODE)


async def meet_once_and_lose(peer: BenchedPeer, signed: SignedManifest, folder: Path) -> None:
    """Have a partner join, meet it, and kill it without a goodbye."""
    partner, met = BenchedPeer(folder, 1), peer.status.meetings["completed"]
    await peer.invite(partner, signed)
    async with running(partner):
        await peer.until(lambda status: status.meetings["completed"] > met, "meeting")
        partner.kill(*PROGRAMS)
        partner.supervisor.leave("killed")


TROUBLES = {"nothing": nothing, "killed": kill, "crashing": crash, "dead": meet_once_and_lose}


def row(pairs: list[tuple[Window, Window]], blocked: float) -> dict[str, float]:
    """Return the medians over the pairs."""
    ratios = [trouble.steps_per_second / calm.steps_per_second for calm, trouble in pairs]
    return {
        "steps_per_second": statistics.median(trouble.steps_per_second for _, trouble in pairs),
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
        "cpu_ratio": statistics.median(calm.cpu_s_per_step / trouble.cpu_s_per_step for calm, trouble in pairs),
        "blocked": blocked,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    table = {}
    for mode in MODES:
        print(f"measuring: {mode}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="step-rate-") as folder:
            table[mode] = row(*asyncio.run(measure(mode, Path(folder), given)))
    print(f"{'trouble':<10}{'steps/s':>9}{'of calm':>9}{'lowest':>9}{'highest':>9}{'cpu':>9}{'blocked':>9}")
    for mode, one in table.items():
        ratios = "".join(f"{one[key]:>9.1%}" for key in ("ratio", "lowest_ratio", "highest_ratio", "cpu_ratio"))
        print(f"{mode:<10}{one['steps_per_second']:>9.1f}{ratios}{one['blocked']:>9.2%}")


if __name__ == "__main__":
    main()
