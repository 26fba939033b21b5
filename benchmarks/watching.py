"""What it costs a peer to be looked at: the share of its step rate that is left with page, terminal view and metrics open beside it.

    python -m benchmarks.watching --pairs 6 --seconds 30

One peer trains alone. Windows come in pairs, one with everything open and one with nothing, in turn first and second, so that a
machine that is busy with other things slows both alike. A pair's ratio is that of its step rates. On a shared machine step rates are noise,
so beside it stands what watching takes of one core: of the supervisor, which answers, and of the page's own process. Where all cores train,
that is what the step rate loses, divided by the number of cores.
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

from gossamer.peer.machine.control_socket import ask
from gossamer.protocol.errors import BadSettings

START_S = 180.0
SETTLE_S = 4.0  # after something was opened or closed
SCRAPE_S = 5.0
METRICS = 9464


@dataclass(frozen=True, slots=True)
class Window:
    """What one window showed."""

    steps_per_s: float
    supervisor_ms_per_s: float  # processor time, which answers who looks on
    page_ms_per_s: float  # of the page's process

    def __str__(self) -> str:
        return f"{self.steps_per_s:.3f} steps/s, supervisor {self.supervisor_ms_per_s:.1f} ms/s, page {self.page_ms_per_s:.1f} ms/s"


def main() -> None:
    """Measure, and print a line a pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a window")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, peer(Path(folder) / "home") as process:
        pairs = []
        for pair in range(given.pairs):
            order = (True, False) if pair % 2 else (False, True)
            seen = {is_watched: window(Path(folder) / "home", process, given.seconds, is_watched) for is_watched in order}
            pairs.append((seen[True], seen[False]))
            print(f"pair {pair + 1}: watched {seen[True]}; unwatched {seen[False]}", flush=True)
    ratios = [watched.steps_per_s / unwatched.steps_per_s for watched, unwatched in pairs]
    print("ratios of step rates:", *(f"{ratio:.3f}" for ratio in ratios), f"median {statistics.median(ratios):.3f}")
    costs = [watched.page_ms_per_s + watched.supervisor_ms_per_s - unwatched.supervisor_ms_per_s for watched, unwatched in pairs]
    print(f"watching takes {statistics.median(costs) / 10:.2f} % of one core (median; {min(costs) / 10:.2f} to {max(costs) / 10:.2f})")


@contextlib.contextmanager
def peer(home: Path) -> Iterator[psutil.Popen]:
    """Run a peer that trains alone, on one thread, while inside."""
    options = ["--listen", "127.0.0.1", "--port", "0", "--threads", "1", "--devices", "cpu", "--steps", "1000000"]
    command = [sys.executable, "-m", "gossamer.cli.main", "host", *options, "--metrics", str(METRICS), "--home", str(home)]
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
    looked_at: contextlib.AbstractContextManager[list[psutil.Process]] = watched(home) if is_watched else contextlib.nullcontext([])
    with looked_at as lookers:
        time.sleep(SETTLE_S)
        before, supervisor_s, page_s, started_s = steps(home), own_cpu_s(process), sum(map(own_cpu_s, lookers)), time.monotonic()
        time.sleep(seconds)
        num_steps, passed_s = steps(home) - before, time.monotonic() - started_s
        used_s = own_cpu_s(process) - supervisor_s, sum(map(own_cpu_s, lookers)) - page_s
        return Window(num_steps / passed_s, *(1000 * used / passed_s for used in used_s))


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
    command = [sys.executable, "-m", "gossamer.cli.main", "dashboard", str(home)]
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


def own_cpu_s(process: psutil.Process) -> float:
    """Return the processor time of one process, without its children."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
