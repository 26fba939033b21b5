"""A model of 125 million parameters from manifest to export, with two peers of this machine: the duration of each stage.

    python -m benchmarks.real_model [--steps N] [--width N] [--gap STEPS] [--line RATE] [--folder DIR]

The commands of docs/guide/train-a-real-model.md in order, on the CPU: real processes, one peer hosts a run, another joins it later, both on
lines of `--line`, to the end of the run; then `peer eval` and `peer export`. Batches are tiny (two sequences of 128 bytes), because a CPU
trains a thousand times slower than a GPU: the figures are about the machinery, not the loss. `state` is the time from the first request to
the complete state, `join` from there to the first counted meeting. `held` is the peak memory of all processes of a peer, with shared memory
counted once. Expect twenty minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gossamer.peer.machine.events import CheckpointSaved, Event, FragmentSynced, MeetingDone, StateTransferred, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.room import held_bytes
from gossamer.peer.trainer.need import run_need
from gossamer.protocol.run.manifest import Manifest

PEER: Final = (sys.executable, "-m", "gossamer.cli.main")
LOOK_S: Final = 2.0
LATE_S: Final = 3600.0
WIDTH: Final = 768  # of the guide's model


def host_steps(gap_steps: int) -> int:
    """Return after how many steps of the host alone another joins, so that it has a state to fetch."""
    return gap_steps // 10 + 8


def manifest(steps: int, width: int, gap_steps: int) -> Manifest:
    """Return the guide's run with small batches; clocks may be so far apart."""
    heads = width // 64
    model = {
        "hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": 12, "num_attention_heads": heads,
        "num_key_value_heads": heads, "vocab_size": 50_304, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    return Manifest.checked(
        {
            "run": {"name": "real", "total_steps": steps},
            "model": {"config": model},
            "inner": {"optimizer": "adamw", "learning_rate": 3e-4, "batch_size": 2, "sequence_length": 128},
            "outer": {"max_clock_gap_steps": gap_steps, "deadline_s": 120.0},
        }
    )


class Shell:
    """One peer's processes and what they held."""

    def __init__(self, home: Path, *words: str) -> None:
        self.home = Home(home)
        self.began_s = time.time()
        self.most_bytes = 0
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (home / "shell.log").open("wb") as log:
            self._process = subprocess.Popen([*PEER, *words, "--home", str(home)], stdout=log, stderr=log)  # noqa: S603

    def look(self) -> dict[str, Any]:
        """Return the status, and note the memory. Raises RuntimeError for a peer that has failed."""
        if self._process.poll():
            raise RuntimeError(f"a peer ended with {self._process.returncode}: {(self.home.path / 'shell.log').read_text()[-2000:]}")
        self.most_bytes = max(self.most_bytes, held_bytes(self._process.pid))
        output = run("status", "--json", "--home", str(self.home.path))
        return dict(json.loads(output)) if output else {}

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End it, if it has not ended."""
        if not self.has_ended:
            self._process.terminate()
            self._process.wait(timeout=300)

    def events(self) -> list[Event]:
        """Return what it told."""
        return list(read_events(self.home.events))


def run(*words: str) -> str:
    """Run a command and return its stdout, empty where it failed."""
    return subprocess.run([*PEER, *words], capture_output=True, text=True, check=False).stdout  # noqa: S603


def until(shells: Sequence[Shell], is_so: Any) -> None:
    """Look at peers until the first one's status shows something. Raises TimeoutError."""
    late_s = time.monotonic() + LATE_S
    while not is_so([shell.look() for shell in shells]):
        if time.monotonic() > late_s:
            raise TimeoutError("the run is late")
        time.sleep(LOOK_S)


@contextlib.contextmanager
def both(folder: Path, line: str, job: Manifest) -> Iterator[tuple[Shell, Shell]]:
    """Have one peer host the run and another join it under way."""
    folder.mkdir(parents=True, exist_ok=True)
    file, invite = folder / "real.toml", folder / "invite"
    file.write_text(job.to_toml())
    limits = ("--threads", "1", "--listen", "127.0.0.1", "--max-upload", line, "--max-download", line)
    shells = [Shell(folder / "host", "host", str(file), "--write-invite", str(invite), *limits)]
    try:
        until(shells, lambda found: found[0].get("step", 0) >= host_steps(job.outer.max_clock_gap_steps))
        shells.append(Shell(folder / "joiner", "join", "--invite-file", str(invite), *limits))
        yield shells[0], shells[1]
    finally:
        for shell in shells:
            shell.stop()


def first(events: Sequence[Event], *kinds: type[Event]) -> float:
    """Return when something was first told of, Unix seconds."""
    return next((event.ts for event in events if isinstance(event, kinds)), float("nan"))


def figures(host: Shell, joiner: Shell, last: dict[str, Any], job: Manifest) -> dict[str, float]:
    """Return what the two peers' events and the joiner's last status say."""
    happened = joiner.events()
    counted = [event for event in happened if isinstance(event, MeetingDone) and event.outcome == "completed"]
    saved = [event for shell in (host, joiner) for event in shell.events() if isinstance(event, CheckpointSaved)]
    states = [event for event in happened if isinstance(event, StateTransferred)]
    started_s = states[0].ts - states[0].seconds
    need = run_need(job, "cpu")
    return {
        "parameters": need.num_params,
        "join, s": counted[0].ts - started_s,
        "state, s": states[0].seconds,
        "state, MB": states[0].num_bytes / 1e6,
        "all synced after, s": max(event.ts for event in happened if isinstance(event, FragmentSynced)) - started_s,
        "fragments synced": sum(isinstance(event, FragmentSynced) for event in happened),
        "meetings that counted": len(counted),
        "a meeting, s": statistics.median(event.seconds for event in counted),
        "a meeting at most, s": max(event.seconds for event in counted),
        "a meeting at most, MB": max(event.bytes_sent for event in counted) / 1e6,
        "an inner step, s": (last["train_seconds"] - last["blocked_seconds"]) / max(1, last["own_steps"]),
        "blocked, %": 100 * last["blocked_seconds"] / last["train_seconds"],
        "a checkpoint, MB": saved[-1].num_bytes / 1e6,
        "a checkpoint, written in s": statistics.median(event.seconds for event in saved),
        "a checkpoint, stopped for s": max(event.stopped_s for event in saved),
        "held, host, GB": host.most_bytes / 1e9,
        "held, joiner, GB": joiner.most_bytes / 1e9,
    }


def measure(folder: Path, line: str, job: Manifest) -> dict[str, float]:
    """Go through all of it."""
    with both(folder, line, job) as (host, joiner):
        last: dict[str, Any] = {}

        def are_done(found: list[dict[str, Any]]) -> bool:
            last.update(found[1] if found[1].get("train_seconds") else {})
            return host.has_ended and joiner.has_ended

        until((host, joiner), are_done)
        found = figures(host, joiner, last, job)
    began_s = time.monotonic()
    evaluated = json.loads(run("eval", "--home", str(joiner.home.path), "--json"))
    found |= {"held-out loss": evaluated["loss"], "eval, s": time.monotonic() - began_s}
    began_s = time.monotonic()
    run("export", str(folder / "model"), "--home", str(joiner.home.path), "--tokens", "0")
    size = sum(file.stat().st_size for file in (folder / "model").iterdir())
    return found | {"export, s": time.monotonic() - began_s, "export, MB": size / 1e6}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=WIDTH, help="768: 124 million parameters; 256: 22 million")
    parser.add_argument("--gap", type=int, default=40, help="how many steps clocks may be apart; a tenth and eight later the other joins")
    parser.add_argument("--line", default="20 Mbit/s")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="real-", dir=Path.cwd()) as place:
        found = measure(given.folder or Path(place), given.line, manifest(given.steps, given.width, given.gap))
    for name, value in found.items():
        print(f"{name:<28}{value:>12.4g}")


if __name__ == "__main__":
    main()
