"""The time to join a running run, by line rate: from the first request to the first meeting that counts.

    python -m benchmarks.joining [--rates 2 5 20] [--alone 60] [--model 125M]

A host of the demo's model, or of a model of 125 million parameters (benchmarks/real_model.py), trains alone for `--alone` steps, then a
second peer joins. Real processes, each peer on a core of its own, in a network namespace on a line of that rate both ways
(benchmarks/side_by_side/network.py). As root, on an idle machine of two cores; one to two minutes per rate, three with the large model
(`--rates 0 100 20 --alone 20`; 0: no limit). `state` is the time from the first request until the weights have arrived, `met` until the
first counted meeting with tokens of the joiner, `aim` 1.5 times the time that 2.6 bytes per parameter take on the line, and 5 s. `host` is
the host's step rate meanwhile over its rate before, `filled` the rate of the state's bytes, `cores` the processor time of the host's node
and p2pd per second of it: without a limit at least 800 Mbit/s with less than one core, by the large model's state.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from benchmarks import real_model
from benchmarks.meeting_cost import threads_s
from benchmarks.side_by_side.job import Job
from benchmarks.side_by_side.network import network
from benchmarks.side_by_side.peers import RunningPeer, start_one, wait_for_invite
from benchmarks.side_by_side.processes import ProcessGroup, process_group
from benchmarks.side_by_side.systems import GOSSAMER, SYSTEMS
from gossamer.peer.machine.events import Event, MeetingDone, StateTransferred, StepDone, read_events
from gossamer.peer.machine.status import has_stepped
from gossamer.peer.model.model import num_parameters
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest, need_text

AIM_BYTES, AIM_TIMES, AIM_S = 2.6, 1.5, 5.0
LATE_S = 600.0  # beside twice the aim
LOOK_S = 0.2
STEPS = 100_000  # the run does not end meanwhile
GAP_STEPS = 200  # of the large model's clocks at most
BEFORE_S = 10.0  # of the host's steps at least, to compare with
MODELS: Final[dict[str, Callable[[], Manifest]]] = {
    "demo": lambda: need_text(Job().manifest().manifest()),
    "125M": lambda: real_model.manifest(STEPS, real_model.WIDTH, GAP_STEPS),
}


@dataclass(frozen=True, slots=True)
class Joined:
    """The times of one join."""

    state_s: float
    met_s: float
    states: int
    refused: int  # meetings that a gate did
    host_share: float
    filled_mbit: float  # of the line, by the first state
    cores: float  # of the host's node and p2pd meanwhile


def join(manifest: Manifest, mbit_per_s: float, num_alone: int, folder: Path) -> Joined:
    """Let a peer join a host on lines of this rate. Raises TimeoutError without a meeting, BadSettings for a peer that cannot start."""
    job = Job(num_peers=2, total_steps=STEPS)
    file = folder / "manifest.toml"
    file.write_text(manifest.to_toml())
    with network(2, mbit_per_s) as lines, ExitStack() as stack:
        groups = [stack.enter_context(process_group(str(line.number))) for line in lines]

        def start(number: int, *words: str) -> RunningPeer:
            with core(number):
                return start_one(SYSTEMS[GOSSAMER], job, lines[number], groups[number], folder, words)

        host = start(0, "host", str(file))
        invite = wait_for_invite(host)
        until(host, lambda: host.follower.own_steps >= num_alone, LATE_S)
        networking, used = networking_pids(groups[0]), []
        joiner = start(1, "join", invite)

        def has_joined() -> bool:
            used.append((time.time(), cpu_s(networking)))
            return has_met(joiner)

        until(joiner, has_joined, LATE_S + 2 * aim_s(manifest, mbit_per_s))
        happened = list(read_events(joiner.home.events))
        met = met_at(happened)
        assert met is not None
        until(host, lambda: host.follower.reports[-1].ts >= met, LATE_S)  # a joining may be over between two reports
        return measured(list(read_events(host.home.events)), happened, met, used)


def networking_pids(group: ProcessGroup) -> list[int]:
    """Return the ids of a peer's node and p2pd."""
    commands = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in group.pids()}
    return [pid for pid, command in commands.items() if "gossamer.peer.node" in command or "p2pd" in command.split()[0]]


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor seconds of processes so far."""
    return sum(sum(threads_s(pid).values()) for pid in pids)


@contextmanager
def core(number: int) -> Iterator[None]:
    """Bind the processes started inside the context to core `number`: two peers stand for two machines."""
    cores = sorted(os.sched_getaffinity(0))
    if number >= len(cores):
        raise BadSettings(f"this needs a core for each peer, and has {len(cores)}", hint="run it on a machine with two")
    os.sched_setaffinity(0, {cores[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def aim_s(manifest: Manifest, mbit_per_s: float) -> float:
    """Return the longest acceptable time of a join on a line of this rate."""
    line_s = AIM_BYTES * num_parameters(manifest.model) * 8 / (mbit_per_s * 1e6) if mbit_per_s else 0.0
    return AIM_TIMES * line_s + AIM_S


def until(peer: RunningPeer, is_so: Callable[[], bool], within_s: float) -> None:
    """Wait until a condition holds. Raises TimeoutError, or RuntimeError for a peer that has ended."""
    late_s = time.monotonic() + within_s
    while not is_so():
        peer.refresh()
        if peer.follower.is_over:
            raise RuntimeError(f"a peer ended: {peer.follower.reason}")
        if time.monotonic() > late_s:
            raise TimeoutError("nobody joined in time")
        time.sleep(LOOK_S)


def has_met(peer: RunningPeer) -> bool:
    """Return whether a peer had such a meeting; reads its whole log only if it may have."""
    return peer.follower.meetings["completed"] > 0 and met_at(list(read_events(peer.home.events))) is not None


def met_at(events: Sequence[Event]) -> float | None:
    """Return the time of the first counted meeting with tokens of this peer; None if there is none yet."""
    began = next((event.ts for event in events if isinstance(event, StepDone) and has_stepped(event)), None)
    met = (event.ts for event in events if isinstance(event, MeetingDone) and event.outcome == "completed")
    return None if began is None else next((ts for ts in met if ts > began), None)


def measured(host: Sequence[Event], joiner: Sequence[Event], met: float, used: Sequence[tuple[float, float]]) -> Joined:
    """Summarize both peers' events.

    `met` is the time of the joiner's first counted meeting; `used`: times, with the processor seconds of the host's node and p2pd by then.
    Raises BadSettings for a joiner that took no weights.
    """
    states = [event for event in joiner if isinstance(event, StateTransferred)]
    if not states:
        raise BadSettings("the joiner needed no weights: the host was too few steps ahead", hint="raise --alone; 20 is enough")
    asked = states[0].ts - states[0].seconds
    before_s = max(BEFORE_S, met - asked)
    refused = sum(isinstance(event, MeetingDone) and event.outcome == "gated" for event in itertools.chain(host, joiner))
    host_share = rate(host, asked, met) / rate(host, asked - before_s, asked)
    seconds, cpu = zip(*used, strict=True)
    begun_s, ended_s = np.interp((asked, states[0].ts), seconds, cpu)
    filled_mbit, cores = 8e-6 * states[0].fetched_bytes / states[0].seconds, float(ended_s - begun_s) / states[0].seconds
    return Joined(states[0].seconds, met - asked, len(states), refused, host_share, filled_mbit, cores)


def rate(events: Sequence[Event], from_s: float, to_s: float) -> float:
    """Return a peer's steps per second between two times, interpolated between its reports of about every second."""
    reports = [event for event in events if isinstance(event, StepDone) and has_stepped(event)]
    from_s = max(from_s, reports[0].ts)
    before, after = np.interp((from_s, to_s), [report.ts for report in reports], [report.step for report in reports])
    return float(after - before) / (to_s - from_s)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=[2.0, 5.0, 20.0], metavar="MBIT")
    parser.add_argument("--alone", type=int, default=60, metavar="STEPS")
    parser.add_argument("--model", choices=MODELS, default="demo")
    given = parser.parse_args()
    manifest = MODELS[given.model]()
    print(f"{'Mbit/s':>8} {'state s':>8} {'met s':>8} {'aim s':>8} {'states':>7} {'gated':>6} {'host':>6} {'filled':>7} {'cores':>6}")
    for mbit_per_s in given.rates:
        with tempfile.TemporaryDirectory(prefix="joining-", ignore_cleanup_errors=True) as folder:
            one = join(manifest, mbit_per_s, given.alone, Path(folder))
        words = (
            f"{mbit_per_s:>8g} {one.state_s:>8.1f} {one.met_s:>8.1f} {aim_s(manifest, mbit_per_s):>8.1f} {one.states:>7} {one.refused:>6}"
        )
        print(f"{words} {100 * one.host_share:>5.0f}% {one.filled_mbit:>7.0f} {one.cores:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
