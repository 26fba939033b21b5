"""Unusable training text and an occupied home: one error line with a hint, exit code 2, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.manifest import Manifest, SignedManifest


def host(home: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "gossamer.cli.main", "host", "--alone", "--threads", "1", "--home", str(home), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def test_unusable_training_text_is_rejected(tmp_path: Path) -> None:
    """The trainer detects it, two processes below the command. tests/peer/text tests the other kinds of unusable text."""
    text = tmp_path / "short.txt"
    text.write_text("hello\n")
    code, output = host(tmp_path / "home", "--data", str(text))
    assert code == 2
    assert output[-2].startswith("error: ")
    assert "one batch" in output[-2]
    assert output[-1].startswith("hint: ")
    assert not Home(tmp_path / "home").running.exists()


def test_a_misspelt_codec_leaves_the_home_unused(tmp_path: Path) -> None:
    code, output = host(tmp_path, "--codec", "modul4")
    assert code == 2
    assert 'codec.name = "modul4"' in output[-2]
    assert "modulo4" in output[-1]
    assert not Home(tmp_path).manifest.exists()


def test_a_model_that_does_not_fit_is_rejected_before_allocation(tmp_path: Path) -> None:
    """The model takes a terabyte, more than any test machine has."""
    manifest = tmp_path / "manifest.toml"
    model = {"hidden_size": 65536, "intermediate_size": 65536, "num_hidden_layers": 1, "num_attention_heads": 64, "vocab_size": 200_000}
    manifest.write_text("[model.config]\n" + "\n".join(f"{key} = {value}" for key, value in model.items()))
    code, output = host(tmp_path / "home", str(manifest))
    assert code == 2
    assert "this run needs" in output[-2] and "for weights and their gradients" in output[-2]
    assert "here would fit" in output[-1]
    assert not Home(tmp_path / "home").manifest.exists(), "the home is free for a run that fits"


def test_the_same_identity_does_not_run_twice(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    identity = Identity.load_or_create(home.identity)
    home.manifest.write_bytes(SignedManifest.sign(Manifest().with_host(identity.peer_id), identity).to_bytes())
    with home.locked():
        code, output = host(tmp_path)
    assert code == 2
    assert "already runs" in output[-2]
    assert "peer leave" in output[-1]
