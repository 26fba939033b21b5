"""Whether a peer keeps to its limits over the real transport, and still meets: the demo's job, a countdown that asks for far more.

    python -m benchmarks.upload_limit [--limit "1 Mbit/s"] [--seconds 60]

Two real peers on this machine. One of them is limited while it runs, first its upload, then its download. A row is one window: what the
sockets of its p2pd carried each way beside the limit, as the kernel counts (greetings, gossip, encryption and directory included,
headers of TCP and IP not), and how its meetings ended. Needs `ss` of iproute2. About four minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from gossamer.cli.local_swarm import LocalPeer, local_swarm
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.events import MeetingDone, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import rate_bytes_per_s

OPTIONS = ("--listen", "127.0.0.1", "--port", "0", "--devices", "cpu", "--threads", "1")
SETTLE_S = 15.0  # after a change, for what was under way and for the interval


@dataclass(frozen=True)
class Carried:
    """Bytes so far."""

    sent: int
    received: int


def carried(pid: int) -> Carried:
    """Return what the TCP connections of a process have carried to and from other processes than its own children."""
    lines = subprocess.run(["ss", "-tniHOp"], check=True, capture_output=True, text=True).stdout.splitlines()
    own = [line for line in lines if f"pid={pid}," in line]
    sent = sum(int(number) for line in own for number in re.findall(r"\bbytes_sent:(\d+)", line))
    received = sum(int(number) for line in own for number in re.findall(r"\bbytes_received:(\d+)", line))
    return Carried(sent, received)


def daemon_of(peer: LocalPeer) -> int:
    """Return the process id of a peer's p2pd."""
    supervisor = psutil.Process(json.loads(Home(peer.home).running.read_text())["pid"])
    return next(process.pid for process in supervisor.children(recursive=True) if process.name() == "p2pd")


def outcomes(peer: LocalPeer) -> Counter[str]:
    """Return how the meetings of a peer have ended so far."""
    return Counter(event.outcome for event in read_events(Home(peer.home).events) if isinstance(event, MeetingDone))


def window(name: str, peer: LocalPeer, seconds: float, limit_bytes_per_s: float) -> None:
    """Measure, and print a row."""
    pid, before, met = daemon_of(peer), Carried(0, 0), outcomes(peer)
    before, start_s = carried(pid), time.monotonic()
    time.sleep(seconds)
    after, passed_s = carried(pid), time.monotonic() - start_s
    up, down = ((now - then) / passed_s for now, then in ((after.sent, before.sent), (after.received, before.received)))
    ended = outcomes(peer) - met
    others = ", ".join(f"{number} {outcome}" for outcome, number in sorted(ended.items()) if outcome != "completed") or "none"
    rates = f"{up * 8e-6:>8.3f}{up / limit_bytes_per_s:>8.3f}{down * 8e-6:>10.3f}{down / limit_bytes_per_s:>8.3f}"
    print(f"{name:<18}{passed_s:>6.0f}{rates}{ended['completed']:>11}   {others}", flush=True)


def until_met(peer: LocalPeer, times: int) -> None:
    """Wait until a peer has met so often."""
    while outcomes(peer)["completed"] < times:
        peer.refresh()
        time.sleep(0.5)


def main() -> None:
    """Print a row for each window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="1 Mbit/s")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    limit = rate_bytes_per_s(given.limit)
    with tempfile.TemporaryDirectory(prefix="ul-") as folder, local_swarm(Path(folder)) as swarm:
        host = swarm.start("host", ["host", *OPTIONS, "--steps", "1000000", "--inner-steps", "2"])
        limited = swarm.start("limited", ["join", host.invite(), *OPTIONS])
        until_met(limited, 5)
        print(f"{'limited':<18}{'s':>6}{'up':>8}{'/limit':>8}{'down':>10}{'/limit':>8}{'completed':>11}   other meetings (rates in Mbit/s)")
        window("nothing", limited, given.seconds / 3, limit)
        for key in ("max_upload", "max_download"):
            ask(limited.home, {"verb": "set", "key": key, "value": given.limit})
            time.sleep(SETTLE_S)
            window(f"{key.removeprefix('max_')} {given.limit}", limited, given.seconds, limit)
            ask(limited.home, {"verb": "set", "key": key, "value": None})


if __name__ == "__main__":
    main()
