"""A run of whole peers: its host has a public address, the others stand behind routers. Prints how they met and each one's
held-out loss at the end, to be compared with what `peer demo --peers 4 --steps 300` prints.

python -m tests.lab.swarm [--steps 300]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.lab.routers import CannotRun, Place, internet

KINDS = ("none", "port-restricted", "port-restricted", "symmetric")
INVITE_S, END_S = 120.0, 1200.0


def peer(place: Place, home: Path, *words: str) -> subprocess.Popen[str]:
    """Start a `peer` command in the namespace of a place."""
    out = (home.parent / f"{home.name}.out").open("w")
    return subprocess.Popen(
        place.inside(sys.executable, "-m", "gossamer.cli.main", *words, "--home", str(home)), stdout=out, stderr=out, text=True
    )


def status(place: Place, home: Path) -> dict[str, Any]:
    """Return the status of a peer."""
    command = [sys.executable, "-m", "gossamer.cli.main", "status", "--json", "--home", str(home)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout or "{}")


def held_out_loss(home: Path) -> float | None:
    """Evaluate the model that a peer has kept of the run."""
    command = [sys.executable, "-m", "gossamer.cli.main", "eval", "--json", "--home", str(home)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return round(float(json.loads(output)["loss"]), 4) if output else None


def train(folder: Path, places: tuple[Place, ...], steps: int, stack: ExitStack) -> None:
    homes = [folder / f"peer-{place.number}" for place in places]
    invite = folder / "invite"

    def start(place: Place, home: Path, *words: str) -> subprocess.Popen[str]:
        process = peer(place, home, *words, "--threads", "1", "--devices", "cpu")
        stack.callback(process.wait)
        stack.callback(process.terminate)
        return process

    num_others = str(len(places) - 1)
    running = [start(places[0], homes[0], "host", "--steps", str(steps), "--wait-for-peers", num_others, "--write-invite", str(invite))]
    until_s = time.monotonic() + INVITE_S
    while not invite.exists():
        if time.monotonic() > until_s or running[0].poll() is not None:
            raise TimeoutError(f"no invite: {(folder / 'peer-1.out').read_text()[-2000:]}")
        time.sleep(0.2)
    running += [start(place, home, "join", "--invite-file", str(invite)) for place, home in zip(places[1:], homes[1:], strict=True)]
    until_s = time.monotonic() + END_S
    last: dict[int, dict[str, Any]] = {}
    while any(process.poll() is None for process in running) and time.monotonic() < until_s:
        last |= {number: now for number, home in enumerate(homes) if (now := status(places[number], home)).get("loss") is not None}
        time.sleep(3)
    print("| peer | state | step | held-out loss | open connections by route | sent, MB |\n|---|---|---|---|---|---|")
    for number, place in enumerate(places):
        now = last.get(number, {})
        loss, sent = held_out_loss(homes[number]), now.get("bytes", {}).get("sent", 0) / 1e6
        print(f"| {place.kind} | {now.get('state')} | {now.get('step')} | {loss} | {now.get('routes')} | {sent:.1f} |")


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=300)
    given = options.parse_args()
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
            train(folder, stack.enter_context(internet(KINDS)), given.steps, stack)
    except CannotRun as error:
        print(f"no lab on this machine: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
