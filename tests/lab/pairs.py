"""`make lab`: connect peers behind each pair of router kinds, with one relay that both can reach. Print delay and route.

python -m tests.lab.pairs [--only "symmetric/full cone"] [--bulk] [--open 4]

With more open peers (--open), p2pd learns its outer address and punches holes; pairs that began through the relay are then waited for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gossamer.protocol.addresses import CIRCUIT
from gossamer.protocol.identity import Identity
from tests.lab.routers import KINDS, CannotRun, Place, internet

PORT = 4001
MEET_S = 60.0  # timeout


class Running:
    """A running peer of the lab, and its events so far."""

    def __init__(self, place: Place, home: Path, *options: str) -> None:
        home.mkdir(mode=0o700)
        self.place = place
        self.peer_id = str(Identity.load_or_create(home / "key").peer_id)
        self.address = f"/ip4/{place.public}/tcp/{PORT}/p2p/{self.peer_id}"
        self.lines: list[dict[str, Any]] = []
        command = place.inside(sys.executable, "-m", "tests.lab.lab_peer", str(home), str(PORT), *options)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def when(self, key: str, value: object = None) -> dict[str, Any] | None:
        """Return its first event of this kind."""
        return next((line for line in self.lines if key in line and value in (None, line[key])), None)

    def is_off_relay(self, partner: str) -> bool:
        """Return whether it has connected to a partner without a relay."""
        return any(line.get("met") == partner and line["route"] != "relayed" for line in self.lines)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))


@contextmanager
def pair(kinds: tuple[str, str], relays: int, bulk: bool, num_open: int = 0) -> Iterator[tuple[list[Running], Running, Running]]:
    """Start the relays and the open peers, then a peer behind a router of each kind once the relays work."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        places = stack.enter_context(internet((*(["none"] * (relays + num_open)), *kinds)))

        def start(place: Place, *options: str) -> Running:
            running = Running(place, folder / str(place.number), *options)
            stack.callback(running.stop)
            return running

        relay_hosts: list[Running] = []
        for place in places[:relays]:
            relay_hosts.append(start(place, "--relay", *_bootstraps(relay_hosts)))
            wait_for(lambda: relay_hosts[-1].when("relays", True), "no relay came up")
        for place in places[relays:-2]:
            start(place, *_bootstraps(relay_hosts))
        bootstraps = _bootstraps(relay_hosts)
        yield relay_hosts, start(places[-2], *bootstraps, *(["--bulk"] if bulk else [])), start(places[-1], *bootstraps)


def _bootstraps(relay_hosts: list[Running]) -> list[str]:
    return [word for relay_host in relay_hosts for word in ("--bootstrap", relay_host.address)]


def wait_for(condition: Any, otherwise: str) -> None:
    """Wait until a value is available. Raises TimeoutError with a message."""
    until_s = time.monotonic() + MEET_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(otherwise)
        time.sleep(0.05)


def meet(kinds: tuple[str, str], bulk: bool, num_open: int) -> str:
    """Connect a pair; return its row of the table."""
    with pair(kinds, 1, bulk, num_open) as (_, first, second):
        wait_for(lambda: first.when("up") and second.when("up"), "the two did not come up")
        both_up_s = max(float(up["at"]) for peer in (first, second) if (up := peer.when("up")))
        try:
            wait_for(lambda: first.when("met", second.peer_id) and second.when("met", first.peer_id), "")
            if bulk:
                wait_for(lambda: first.when("bulk", second.peer_id), "no bulk")
            if num_open:
                wait_for(lambda: first.is_off_relay(second.peer_id) and second.is_off_relay(first.peer_id), "")
        except TimeoutError:
            pass
        cells = [_met(first, second, both_up_s), _met(second, first, both_up_s)]
        rate = first.when("bulk", second.peer_id)
        failures = sum(
            "failed" in line and line["failed"] in (first.peer_id, second.peer_id) for peer in (first, second) for line in peer.lines
        )
        return f"| {kinds[0]} | {kinds[1]} | {' | '.join(cells)} | {failures} |" + (f" {rate['megabytes_per_s']:.0f} |" if rate else "")


def lose_a_relay() -> str:
    """Kill one of two relays; return the seconds until a peer behind a router has addresses of the other one alone."""
    with pair(("port-restricted", "symmetric"), 2, False) as (relay_hosts, first, second):
        wait_for(lambda: first.when("met", second.peer_id) and second.when("met", first.peer_id), "the two did not meet")
        wait_for(lambda: _latest(first), "no place at a relay")
        lost = next(relay_host for relay_host in relay_hosts if any(relay_host.peer_id in address for address in _latest(first)))
        num_lines, died_s = len(first.lines), time.time()

        def is_rid_of_it(latest: dict[str, Any]) -> bool:
            return bool(circuits := _circuits(latest)) and not any(lost.peer_id in address for address in circuits)

        lost.stop()
        wait_for(lambda: any(map(is_rid_of_it, first.lines[num_lines:])), "the dead relay was not given up")
        rid = next(latest for latest in first.lines[num_lines:] if is_rid_of_it(latest))
        return f"One relay of two died; after {rid['at'] - died_s:.1f} s the addresses named the other one alone."


def _latest(peer: Running) -> list[str]:
    return next(_circuits(latest) for latest in reversed(peer.lines) if "addresses" in latest)


def _circuits(latest: dict[str, Any]) -> list[str]:
    return [address for address in latest.get("addresses", ()) if CIRCUIT in address]


def _met(caller: Running, called: Running, since_s: float) -> str:
    met = [line for line in caller.lines if line.get("met") == called.peer_id]
    return ", ".join(f"{max(0.0, line['at'] - since_s):.1f} s {line['route']}" for line in met) or "not met"


def main() -> int:
    """Run the selected pairs. Exit code 1 if any pair did not connect."""
    options = argparse.ArgumentParser()
    options.add_argument("--only", help="two kinds with a slash between them")
    options.add_argument("--bulk", action="store_true", help="measure 64 MiB there and back too, in MB/s each way")
    options.add_argument("--open", type=int, default=0, help="so many more peers without a router")
    given = options.parse_args()
    every = [*itertools.combinations_with_replacement(KINDS, 2), ("port-restricted", "beside")]
    pairs = [tuple(given.only.split("/"))] if given.only else every
    try:
        print("| first | second | first calls | second calls | failed calls |" + (" MB/s |" if given.bulk else ""))
        print("|---|---|---|---|---|" + ("---|" if given.bulk else ""))
        rows = []
        for kinds in pairs:
            rows.append(meet(kinds, given.bulk, given.open))  # type: ignore[arg-type]
            print(rows[-1], flush=True)
        if not given.only:
            print(lose_a_relay())
    except CannotRun as error:
        print(f"no lab on this machine: {error}", file=sys.stderr)
        return 0
    return int(any(row.count("not met") == 2 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
