"""A program run over a real network: a bootstrap node of it, and `peer join`, which names the program to start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.cli.local_swarm import LocalSwarm, local_swarm
from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.run import Run
from tests.peer.waiting import wait_until

RUN = Run("cifar", 300, "images", source="https://example.org/cifar")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with local_swarm(tmp_path) as started:
        yield started


@pytest.mark.timeout(180)
def test_a_bootstrap_node_serves_it_and_join_names_its_program(swarm: LocalSwarm, tmp_path: Path) -> None:
    home = Home(tmp_path / "first")
    home.create()
    identity = Identity.load_or_create(home.identity)
    signed = SignedManifest.sign(RUN.manifest({"head.weight": (10, 128)}).with_host(identity.peer_id), identity)
    home.manifest.write_bytes(signed.to_bytes())
    first = swarm.start("first", ["bootstrap", "--listen", "127.0.0.1"])
    wait_until(lambda: first.refresh() and first.status.get("state") == "serving", "a bootstrap node that serves", 60)
    assert (first.status["unit"], first.status["program"]) == ("images", "cifar, source https://example.org/cifar")

    invite = Invite.issue(identity, signed.run_id, tuple(first.status["addresses"]), None, int(time.time()) + 3600).to_text()
    second = swarm.start("second", ["bootstrap", invite, "--listen", "127.0.0.1"])
    wait_until(lambda: second.refresh() and second.status.get("state") == "serving", "a second node, which fetched the manifest", 60)
    assert (Home(second.home).manifest).read_bytes() == home.manifest.read_bytes()

    joiner = Home(tmp_path / "joiner")
    command = [sys.executable, "-P", "-m", "gossamer.cli.main", "join", invite, "--listen", "127.0.0.1", "--home", str(joiner.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "error: this run trains a program of its members: cifar, source https://example.org/cifar",
        "hint: start that program with this invite",
    ]
    assert not joiner.running.exists()
