"""The cost of viewers: `python -m benchmarks.viewers URL PID...` reads a public page as browsers do, and prints processor time.

The processes are those of the page and of the peer that it asks; the first row is without viewers.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

import psutil

EVERY_S = 3.0  # as page/run.js


class Viewers:
    """Some viewers of one page, each on a thread with a connection of its own."""

    def __init__(self, url: str, number: int, seconds: float) -> None:
        self._address = urlsplit(url)
        self._until_s = time.monotonic() + seconds
        self.answers: Counter[int] = Counter()
        self.num_bytes = 0
        self.latencies_s: list[float] = []
        self._threads = [threading.Thread(target=self._view, args=(EVERY_S * place / number,)) for place in range(number)]

    def run(self) -> None:
        """Read the page until the time is over."""
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        time.sleep(max(0.0, self._until_s - time.monotonic()))

    def _view(self, wait_s: float) -> None:
        connection, tag = http.client.HTTPConnection(self._address.netloc, timeout=30), ""
        time.sleep(wait_s)
        while time.monotonic() < self._until_s:
            began_s = time.monotonic()
            try:
                connection.request("GET", "/live", headers={"Accept-Encoding": "gzip", "If-None-Match": tag})
                answer = connection.getresponse()
                self.num_bytes += len(answer.read())
                self.answers[answer.status] += 1
                self.latencies_s.append(time.monotonic() - began_s)
                tag = answer.headers.get("etag", "")
            except (http.client.HTTPException, ConnectionError):  # the page ends each connection after a minute
                connection.close()
            time.sleep(EVERY_S)


def spent_s(processes: list[psutil.Process]) -> float:
    """Return the processor time of processes so far."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def main() -> None:
    """Measure without viewers, then with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the public page")
    parser.add_argument("pids", type=int, nargs="+", help="whose processor time counts")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    processes = [psutil.Process(pid) for pid in given.pids]
    for number in (0, given.viewers):
        before_s, began_s, viewers = spent_s(processes), time.monotonic(), Viewers(given.url, number, given.seconds)
        viewers.run()
        passed_s = time.monotonic() - began_s
        share, answers = (spent_s(processes) - before_s) / passed_s, dict(viewers.answers)
        median_ms = 1000 * statistics.median(viewers.latencies_s) if viewers.latencies_s else 0.0
        rate = viewers.num_bytes / passed_s / 1000
        print(f"{number} viewers: {100 * share:.2f} % of a core, {rate:.1f} kB/s, {answers}, {median_ms:.1f} ms")


if __name__ == "__main__":
    main()
