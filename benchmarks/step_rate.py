"""What the network costs the trainer: steps per second of one peer alone, and with its node or its network in trouble.

    python -m benchmarks.step_rate [--seconds S] [--rounds N] [--threads T] [--json]

Real processes on this machine, the demo job. `alone` trains without ever meeting anybody: the baseline, measured in every round.
`crashing` has a node that dies at each start, `killed` one that gets SIGKILL every ten seconds, `dead` one whose only partner was killed
after their first meeting and never answers again. The peer goes solo in all three, so the figures include its outer steps. The target
is 98 % or more of `alone`. Ratios are taken within a round, their median over the rounds. Other work on the machine makes the step rate
noise; the processor time of the trainer for one step, beside it, suffers much less from that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil

from peer.config import PeerConfig
from peer.home import Home
from peer.runtime import runtime_folder
from peer.status import Status
from peer.supervisor import NODE, PROGRAMS, TRAINER, Supervisor
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import Manifest, SignedManifest

MODES = ("alone", "crashing", "killed", "dead")
WARM_S = 3.0  # after the first step
KILL_S = 10.0
READY_S = 120.0
STEPS = 10_000_000


class BenchedPeer:
    """One peer in a temporary home, and how fast it steps."""

    def __init__(self, folder: Path, threads: int, *, alone: bool, programs: dict[str, str]) -> None:
        self.home = Home(folder)
        self.home.create()
        self.identity = Identity.load_or_create(self.home.identity)
        self.seen: list[tuple[float, int]] = []  # when, own steps
        config = PeerConfig(home=folder, alone=alone, num_threads=threads, device="cpu", listen_host="127.0.0.1")
        self.supervisor = Supervisor(config, self._watch, programs)
        self.status = self.supervisor.status

    def _watch(self, status: Status) -> None:
        if not self.seen or status.own_steps != self.seen[-1][1]:
            self.seen.append((time.monotonic(), status.own_steps))

    async def until(self, look: Callable[[Status], Any], what: str) -> None:
        """Wait until the status shows something."""
        until_s = time.monotonic() + READY_S
        while not look(self.status):
            if time.monotonic() > until_s:
                raise TimeoutError(f"no {what} in {READY_S:.0f} s: {self.status.state}, {self.status.reason}; see {self.home.log}")
            await asyncio.sleep(0.1)

    async def speed(self, seconds: float) -> dict[str, float]:
        """Measure steps per second, and processor seconds of the trainer per step, from a report, once it is warm, to another."""
        await asyncio.sleep(WARM_S)
        trainer = psutil.Process(self.supervisor.pid(TRAINER))
        (start_s, start), start_cpu_s = self.seen[-1], sum(trainer.cpu_times()[:2])
        await asyncio.sleep(seconds)
        (end_s, end), end_cpu_s = self.seen[-1], sum(trainer.cpu_times()[:2])
        num_steps = end - start
        return {"steps_per_second": num_steps / (end_s - start_s), "cpu_s_per_step": (end_cpu_s - start_cpu_s) / num_steps}

    def kill(self, *names: str) -> None:
        """End processes of it as a power cut would."""
        for name in names:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                psutil.Process(self.supervisor.pid(name)).kill()


@contextlib.asynccontextmanager
async def running(peer: BenchedPeer) -> AsyncIterator[BenchedPeer]:
    """Run a peer inside."""
    with runtime_folder(64 << 20) as runtime:
        work = asyncio.create_task(peer.supervisor.run(runtime))
        try:
            yield peer
        finally:
            peer.supervisor.leave("measured")
            await work


async def measure(mode: str, folder: Path, threads: int, seconds: float) -> dict[str, float]:
    """Return the trainer's speed and the share of time that it was blocked."""
    programs = PROGRAMS | ({NODE: "benchmarks.no_such_program"} if mode == "crashing" else {})
    peer = BenchedPeer(folder / "home", threads, alone=mode == "alone", programs=programs)
    manifest = Manifest.checked({"run": {"total_steps": STEPS}}).with_host(peer.identity.peer_id)
    signed = SignedManifest.sign(manifest, peer.identity)
    peer.home.manifest.write_bytes(signed.to_bytes())
    async with running(peer):
        await peer.until(lambda status: status.own_steps, "first step")
        if mode in ("killed", "dead"):
            await peer.until(lambda status: status.addresses, "node")
        if mode == "dead":
            await meet_once_and_lose(peer, signed, folder / "partner", threads)
        punisher = asyncio.create_task(punish(peer)) if mode == "killed" else None
        speed = await peer.speed(seconds)
        if punisher is not None:
            punisher.cancel()
        return speed | {"blocked": peer.status.blocked_seconds / peer.status.train_seconds}


async def punish(peer: BenchedPeer) -> None:
    """Kill the node again and again."""
    while True:
        peer.kill(NODE)
        await asyncio.sleep(KILL_S)


async def meet_once_and_lose(peer: BenchedPeer, signed: SignedManifest, folder: Path, threads: int) -> None:
    """Have a partner join, meet it, and kill it without a goodbye."""
    partner = BenchedPeer(folder, threads, alone=False, programs=dict(PROGRAMS))
    not_after_s = int(time.time()) + 3600
    invite = Invite.issue(peer.identity, signed.run_id, tuple(peer.status.addresses), None, not_after_s)
    partner.home.invite.write_text(invite.to_text() + "\n")
    async with running(partner):
        await peer.until(lambda status: status.meetings["completed"], "meeting")
        partner.kill(*PROGRAMS)
        partner.supervisor.leave("killed")


async def compare(rounds: int, threads: int, seconds: float) -> list[dict[str, dict[str, float]]]:
    """Measure every mode in every round, in turns."""
    results = []
    for number in range(rounds):
        result = {}
        first = number % len(MODES)
        for mode in MODES[first:] + MODES[:first]:  # in another order each time, so that a machine that heats up favours none
            with tempfile.TemporaryDirectory(prefix="step-rate-") as folder:
                result[mode] = await measure(mode, Path(folder), threads, seconds)
            print(f"round {number + 1}, {mode}: {result[mode]['steps_per_second']:.1f} steps/s", file=sys.stderr)
        results.append(result)
    return results


def summary(results: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return each mode's median rate, its median ratio to `alone`, and the blocked share."""
    table = {}
    for mode in MODES:
        ratios = [result[mode]["steps_per_second"] / result["alone"]["steps_per_second"] for result in results]
        table[mode] = {
            "steps_per_second": statistics.median(result[mode]["steps_per_second"] for result in results),
            "ratio": statistics.median(ratios),
            "lowest_ratio": min(ratios),
            "cpu_ratio": statistics.median(result["alone"]["cpu_s_per_step"] / result[mode]["cpu_s_per_step"] for result in results),
            "blocked": statistics.median(result[mode]["blocked"] for result in results),
        }
    return table


def main() -> None:
    """Print the table, or JSON with every single figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results = asyncio.run(compare(given.rounds, given.threads, given.seconds))
    table = summary(results)
    if given.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        print(json.dumps({"machine": machine, "threads": given.threads, "seconds": given.seconds, "summary": table, "rounds": results}))
        return
    print(f"{'mode':<10}{'steps/s':>9}{'of alone':>10}{'lowest':>9}{'by cpu time':>13}{'blocked':>9}")
    for mode, row in table.items():
        ratios = f"{row['ratio']:>10.1%}{row['lowest_ratio']:>9.1%}{row['cpu_ratio']:>13.1%}"
        print(f"{mode:<10}{row['steps_per_second']:>9.1f}{ratios}{row['blocked']:>9.2%}")


if __name__ == "__main__":
    main()
