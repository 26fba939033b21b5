"""A whole peer in real processes: supervisor, trainer, and where it matters the node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.events import CheckpointRejected, NodeRestarted, TrainerRestarted, read_events
from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.peer.family import everybody, family, gone
from tests.peer.small import small_manifest
from tests.peer.waiting import wait_until

ALONE = {"alone": True, "threads": 1, "devices": "cpu"}
LONG = {"total_steps": 1_000_000}
REAL_S = 80.0  # a trainer takes seconds to import torch, and the machine may be busy

pytestmark = pytest.mark.timeout(170)


class Peer:
    """A peer's home, and the process that runs from it."""

    def __init__(self, folder: Path, **run: Any) -> None:
        self.home = Home(folder / "home")
        self.home.create()
        self.text = folder / "text.txt"
        self.text.write_text("the quick brown fox jumps over the lazy dog, and so on and on; " * 400)
        manifest = small_manifest(data={"source": "text"}, run=run)
        self.home.manifest.write_bytes(signed(manifest, self.home).to_bytes())
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **settings: Any) -> subprocess.Popen[bytes]:
        given = json.dumps(ALONE | {"data": str(self.text)} | settings)
        command = [sys.executable, "-m", "tests.peer.peer_program", str(self.home.path), given]
        with (self.home.path / "output").open("wb") as output, (self.home.path / "errors").open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        return self.process

    def output(self) -> list[str]:
        return (self.home.path / "output").read_text().splitlines()

    def errors(self) -> str:
        return (self.home.path / "errors").read_text()

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(BadSettings):
            return ask(self.home.path, {"verb": "status"})
        return {}

    def trained(self, steps: int) -> dict[str, Any]:
        """Wait until the status tells of so many inner steps."""

        def look() -> dict[str, Any]:
            assert self.process is not None
            assert self.process.poll() is None, self.errors() + self.home.log.read_text()
            status = self.status()
            return status if status.get("own_steps", 0) >= steps and status["state"] == "training" else {}

        return wait_until(look, f"{steps} steps", REAL_S)

    def children(self) -> dict[str, psutil.Process]:
        """Its trainer, and its node where there is one."""
        return {name: process for name, process in family(self.home.path).items() if name != "peer"}

    def ranks(self) -> dict[str, psutil.Process]:
        """Its trainer, and the rank beside it."""
        children = self.children()
        return children | {"rank": children["trainer"].children()[0]}

    def runtime(self) -> Path:
        return Path(json.loads(self.home.running.read_text())["control"]).parent

    def wait(self, seconds: float = REAL_S) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def num(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in read_events(self.home.events))


def signed(manifest: Manifest, home: Home) -> SignedManifest:
    return SignedManifest.sign(manifest, Identity.load_or_create(home.identity))


@contextlib.contextmanager
def peer(folder: Path, **run: Any) -> Iterator[Peer]:
    one = Peer(folder, **run)
    try:
        yield one
    finally:
        if one.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def test_alone_it_trains_to_its_end(tmp_path: Path) -> None:
    with peer(tmp_path, total_steps=40) as one:
        one.start()
        assert one.wait() == 0, one.errors()
        assert one.output() == ["starting: building the model", "training: training alone (--alone)", "done: the run is over"]
        assert not one.home.running.exists()
        assert one.home.log.read_text() == ""
        assert [path.name for path in sorted(one.home.checkpoints.iterdir())][-1].startswith("step-00000040")


def test_sigterm_saves_and_leaves_nothing_behind_and_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    with peer(tmp_path, **LONG) as one:
        started = one.start(checkpoint_interval_steps=10)
        one.trained(15)
        with pytest.raises(BadSettings, match="there is no verb"):
            ask(one.home.path, {"verb": "nonsense"})
        twice = subprocess.run(started.args, capture_output=True, text=True, timeout=REAL_S, check=False)  # type: ignore[call-overload]
        assert twice.returncode == 2
        assert twice.stderr.startswith(f"error: a peer already runs from {one.home.path} (process {started.pid} ")
        assert twice.stderr.endswith(
            f"hint: stop it with `peer leave --home {one.home.path}`, or give this one its own folder with --home DIR\n"
        )
        runtime, children = one.runtime(), list(one.children().values())
        steps = one.status()["own_steps"]
        asked_s = time.monotonic()
        started.terminate()
        assert one.wait(10.0) == 0
        assert time.monotonic() - asked_s < 10.0
        assert gone(children, 0.0)
        assert not runtime.exists()
        assert not one.home.running.exists()
        assert one.output()[-2:] == ["leaving: SIGTERM: saving", "left: saved and stopped"]
        names = sorted(path.name for path in one.home.checkpoints.iterdir())
        assert step_of(names[-1]) >= steps
        (one.home.checkpoints / names[-1] / "header.json").write_text("damaged")
        one.start(checkpoint_interval_steps=10)
        status = one.trained(step_of(names[0]) + 1)
        assert status["reason"].startswith(f"went back to checkpoint {names[0]}: damaged are {names[-1]} (")
        assert one.num(CheckpointRejected) == 1


def step_of(name: str) -> int:
    return int(name.removeprefix("step-").split(".")[0])


def test_a_trainer_of_two_ranks_goes_on_from_its_checkpoint_and_a_killed_supervisor_takes_all_with_it(tmp_path: Path) -> None:
    with peer(tmp_path, **LONG) as one:
        started = one.start(checkpoint_interval_steps=5, devices="cpu:2")
        assert one.trained(10)["computing"]["devices"] == 2
        for killed, reason in (("trainer", "killed by SIGKILL"), ("rank", "rank 1 of the trainer, on cpu, was killed by signal 9")):
            steps, processes = one.status()["own_steps"], one.ranks()
            processes[killed].kill()
            wait_until(lambda reason=reason: f"starting: the trainer ended ({reason})" in str(one.output()), "restart", REAL_S)
            assert gone([processes["trainer"], processes["rank"]], 5.0)
            assert one.trained(steps + 1)["own_steps"] > steps
        assert one.num(TrainerRestarted) == 2
        children = list(one.ranks().values())
        started.kill()
        assert gone(children, 5.0)
        assert one.wait() == -signal.SIGKILL
        assert ask_fails(one.home.path)
        one.start()  # what the dead one left is no hindrance, nor how many devices it had
        one.trained(steps + 1)


def ask_fails(home: Path) -> bool:
    with pytest.raises(BadSettings, match="no peer is running"):
        ask(home, {"verb": "status"})
    return True


@pytest.mark.usefixtures("signals_of_a_terminal")
def test_two_interrupts_do_not_wait(tmp_path: Path) -> None:
    with peer(tmp_path, **LONG) as one:
        started = one.start()
        one.trained(3)
        runtime, children = one.runtime(), list(one.children().values())
        one.children()["trainer"].suspend()  # a trainer that cannot save now
        started.send_signal(signal.SIGINT)
        wait_until(lambda: any(line.startswith("leaving: Ctrl-C") for line in one.output()), "leaving", REAL_S)
        asked_s = time.monotonic()
        started.send_signal(signal.SIGINT)
        assert one.wait(5.0) == 130
        assert time.monotonic() - asked_s < 3.5  # less than a trainer is given
        assert gone(children, 0.0)
        assert not runtime.exists()


def test_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.peer.peer_program", "/proc/gossamer", json.dumps(ALONE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=REAL_S, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the home /proc/gossamer cannot be written to")
    assert "hint: choose another folder" in ended.stderr


def test_a_killed_node_costs_no_step_and_comes_back(tmp_path: Path) -> None:
    with peer(tmp_path, **LONG) as one:
        started = one.start(alone=False, listen="127.0.0.1")
        one.trained(5)
        wait_until(lambda: one.status().get("addresses"), "node", REAL_S)
        addresses = one.status()["addresses"]
        trainer, node = one.children()["trainer"], one.children()["node"]
        trainer.nice(10)  # it would take a core from the node that starts
        grandchildren = node.children(recursive=True)
        assert grandchildren  # p2pd
        node.kill()
        assert gone(grandchildren, 5.0)
        wait_until(lambda: one.num(NodeRestarted), "restart", REAL_S)
        steps = one.status()["own_steps"]
        one.trained(steps + 20)
        assert one.children()["trainer"].pid == trainer.pid
        wait_until(lambda: one.status().get("reason") == "no other peer in sight", "node", REAL_S)
        wait_until(lambda: one.status()["addresses"] == addresses, "the port that invites name", REAL_S)
        _, *children = everybody(one.home.path)
        started.terminate()
        assert one.wait(12.0) == 0
        assert gone(children, 0.0)
