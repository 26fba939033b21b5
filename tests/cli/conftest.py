from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.shell import Shell


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
