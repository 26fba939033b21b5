"""What it costs a peer to be looked at: the share of its step rate that is left with page, terminal view and metrics open beside it.

    python -m benchmarks.watching --pairs 6 --seconds 30

One peer trains alone. Windows come in pairs, one with everything open and one with nothing, in turn first and second, so that a machine
that is busy with other things slows both alike. A pair's ratio is that of its step rates; processor seconds per step stand beside it, the
peer's own and those of what looks on.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from peer.machine.control_socket import ask
from protocol.errors import BadSettings

START_S = 180.0
SETTLE_S = 4.0  # after something was opened or closed
SCRAPE_S = 5.0
METRICS = 9464


@dataclass(frozen=True, slots=True)
class Window:
    """What one window showed."""

    steps_per_s: float
    cpu_s_per_step: float  # of the peer's processes
    watching_cpu_s_per_step: float


def main() -> None:
    """Measure, and print a line a pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a window")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, peer(Path(folder) / "home") as process:
        ratios = []
        for pair in range(given.pairs):
            order = (True, False) if pair % 2 else (False, True)
            seen = {is_watched: window(Path(folder) / "home", process, given.seconds, is_watched) for is_watched in order}
            ratios.append(seen[True].steps_per_s / seen[False].steps_per_s)
            print(f"pair {pair + 1}: ratio {ratios[-1]:.3f}, watched {seen[True]}, unwatched {seen[False]}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}, lowest {min(ratios):.3f}, highest {max(ratios):.3f} of {len(ratios)} pairs")


@contextlib.contextmanager
def peer(home: Path) -> Iterator[psutil.Popen]:
    """Run a peer that trains alone, on one thread, while inside."""
    options = ["--listen", "127.0.0.1", "--port", "0", "--threads", "1", "--device", "cpu", "--steps", "1000000"]
    command = [sys.executable, "-m", "cli.main", "host", *options, "--metrics", str(METRICS), "--home", str(home)]
    with psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + START_S
            while status(home).get("step", 0) < 20:
                if time.monotonic() > deadline_s or not process.is_running():
                    raise SystemExit("the peer did not begin to train")
                time.sleep(0.5)
            yield process
        finally:
            process.terminate()


def status(home: Path) -> dict[str, Any]:
    """Return the peer's status; nothing while it does not answer."""
    try:
        return ask(home, {"verb": "status"})
    except BadSettings:
        return {}


def window(home: Path, process: psutil.Popen, seconds: float, is_watched: bool) -> Window:
    """Count steps for so long, with or without being looked at."""
    with watched(home) if is_watched else contextlib.nullcontext([]) as lookers:
        time.sleep(SETTLE_S)
        before, own_s, other_s, started_s = steps(home), cpu_s([process]), cpu_s(lookers), time.monotonic()
        time.sleep(seconds)
        num_steps, passed_s = steps(home) - before, time.monotonic() - started_s
        return Window(num_steps / passed_s, (cpu_s([process]) - own_s) / num_steps, (cpu_s(lookers) - other_s) / num_steps)


def steps(home: Path) -> float:
    """Return the own steps of a peer, to less than the second between two of its words."""
    seen = status(home)
    first = seen["own_steps"]
    while (seen := status(home))["own_steps"] == first:  # so that each window begins and ends just after a word
        time.sleep(0.02)
    return float(seen["own_steps"])


@contextlib.contextmanager
def watched(home: Path) -> Iterator[list[psutil.Process]]:
    """Have a page open that reads its stream, and a Prometheus that scrapes, while inside. Gives the process of the page."""
    command = [sys.executable, "-m", "cli.main", "dashboard", str(home)]
    with psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as page:
        try:
            url = page.stdout.readline().decode().strip()
            with urllib.request.urlopen(url.replace("/?", "/live/peers?"), timeout=60) as stream, reading(stream):
                yield [page]
        finally:
            page.terminate()


@contextlib.contextmanager
def reading(stream: Any) -> Iterator[None]:
    """Take in what the page is told, and scrape the metrics, from threads of their own while inside."""
    stopped = threading.Event()
    threads = [threading.Thread(target=read, args=(stream, stopped)), threading.Thread(target=scrape, args=(stopped,))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def read(stream: Any, stopped: threading.Event) -> None:
    """Take in what the page is told."""
    while not stopped.is_set() and stream.readline():
        pass


def scrape(stopped: threading.Event) -> None:
    """Ask for the metrics as Prometheus does."""
    while not stopped.wait(SCRAPE_S):
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics", timeout=10) as answer:
            answer.read()


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the processor time of processes and their children."""
    total = 0.0
    for process in processes:
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
