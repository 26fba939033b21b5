from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.cli import manifests
from gossamer.peer.machine.home import Home
from gossamer.peer.trainer.trial import Trial, reply_to
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.shell import ROOT, Shell, Start


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.delenv("GOSSAMER_HOME", raising=False)
    monkeypatch.delenv("GOSSAMER_INVITE", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return Shell(tmp_path / "home", capsys)


@pytest.fixture
def host(shell: Shell) -> Identity:
    """This peer, with a run that it hosts in its home."""
    shell("id")
    home = Home(shell.home)
    identity = Identity.load_or_create(home.identity)
    home.manifest.write_bytes(SignedManifest.sign(Manifest().with_host(identity.peer_id), identity).to_bytes())
    return identity


@pytest.fixture
def tries_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`peer init` and `peer host` try a run in this process, not in one that loads torch and transformers first."""
    monkeypatch.setattr(manifests, "_from_process", lambda trial: json.dumps(reply_to(Trial.model_validate_json(trial))))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `peer ARGUMENTS` as a process in the test's folder, with further variables in its environment."""
    started: list[subprocess.Popen[str]] = []

    def begun(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "gossamer.cli.main", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield begun
    for process in started:
        process.kill()
        process.communicate()
