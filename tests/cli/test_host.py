"""`peer host`: which run it hosts, and the one line that others need."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.cli import manifests
from gossamer.cli.host import invite_line, run_to_host
from gossamer.cli.manifests import changed
from gossamer.cli.screen import PlainLines
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.peer.trainer.pins import pins
from gossamer.protocol.errors import BadSettings, OperatorError
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.shell import Shell


@pytest.fixture
def home(tmp_path: Path) -> Home:
    folder = Home(tmp_path / "home")
    folder.create()
    return folder


@pytest.fixture
def identity(home: Home) -> Identity:
    return Identity.load_or_create(home.identity)


def own(identity: Identity, steps: int = 800) -> Manifest:
    return changed(Manifest(), {"steps": steps}).with_host(identity.peer_id)


def test_an_empty_home_hosts_the_given_manifest(home: Home, identity: Identity) -> None:
    signed = run_to_host(home, identity, own(identity, 55), must_match=True)
    assert signed.manifest().run.total_steps == 55
    assert signed.host == identity.peer_id


def test_a_home_with_a_run_continues_it(home: Home, identity: Identity) -> None:
    held = SignedManifest.sign(own(identity, 55), identity)
    home.manifest.write_bytes(held.to_bytes())
    assert run_to_host(home, identity, own(identity), must_match=False) == held
    assert run_to_host(home, identity, own(identity, 55), must_match=True) == held


def test_a_home_with_a_run_refuses_another_run(home: Home, identity: Identity) -> None:
    home.manifest.write_bytes(SignedManifest.sign(own(identity, 55), identity).to_bytes())
    with pytest.raises(BadSettings, match="already holds another run") as caught:
        run_to_host(home, identity, own(identity, 56), must_match=True)
    assert "--home" in caught.value.hint


def test_a_run_that_was_joined_is_not_hosted(home: Home, identity: Identity) -> None:
    host = Identity(b"h" * 32)
    home.manifest.write_bytes(SignedManifest.sign(own(host), host).to_bytes())
    with pytest.raises(BadSettings, match="joined") as caught:
        run_to_host(home, identity, own(identity), must_match=False)
    assert "peer join" in caught.value.hint


def test_the_invite_is_printed_once_on_its_own_line(identity: Identity, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signed = SignedManifest.sign(own(identity), identity)
    written = tmp_path / "invite"
    line = invite_line(Home(tmp_path), identity, signed, written, 5)
    status = Status()
    drawn = PlainLines(io.StringIO())
    line(status, drawn)
    assert capsys.readouterr().out == ""
    status = replace(status, addresses=[f"/ip4/127.0.0.1/tcp/4001/p2p/{identity.peer_id}"])
    line(status, drawn)
    line(status, drawn)
    [text] = capsys.readouterr().out.splitlines()
    invite = Invite.from_text(text)
    assert (invite.run_id, invite.bootstraps) == (signed.run_id, tuple(status.addresses))
    assert written.read_text() == text + "\n"
    assert written.stat().st_mode & 0o077 == 0  # it is a secret


def test_an_invite_that_cannot_be_recorded_is_reported_and_not_given_out(
    identity: Identity, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Home(tmp_path).invites.mkdir()
    signed, screen = SignedManifest.sign(own(identity), identity), io.StringIO()
    status = replace(Status(), addresses=[f"/ip4/127.0.0.1/tcp/4001/p2p/{identity.peer_id}"])
    invite_line(Home(tmp_path), identity, signed, None, 5)(status, PlainLines(screen))
    assert capsys.readouterr().out == "" and "no invite could be written" in screen.getvalue()


def test_a_home_that_cannot_be_used_is_refused_before_the_run_is_tried(shell: Shell, tmp_path: Path) -> None:
    """A container with a read-only disk has no folder in which the trial could work."""
    (tmp_path / "run.toml").write_text(SMALL)
    shell.home.write_text("")
    result = shell("host", tmp_path / "run.toml")
    assert result.code == 2 and "is not a folder" in result.complaint[0]


@pytest.mark.parametrize("is_new", [True, False])
def test_ctrl_c_while_a_run_is_tried_leaves_no_new_home(is_new: bool, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(trial: str) -> str:
        assert shell.home.exists()
        raise KeyboardInterrupt

    if not is_new:
        shell("id")
    monkeypatch.setattr(manifests, "_from_process", interrupted)
    assert shell("host").code == 130
    assert shell.home.exists() is not is_new


@pytest.mark.usefixtures("tries_here")
def test_a_run_that_no_longer_fits_its_host_prints_no_invite_and_is_kept(shell: Shell) -> None:
    home = Home(shell.home)
    home.create()
    identity = Identity.load_or_create(home.identity)
    held = SignedManifest.sign(own(identity), identity).to_bytes()
    home.manifest.write_bytes(held)
    result = shell("host", "--max-memory", "570MB", "--listen", "127.0.0.1")
    assert (result.code, result.out) == (2, "")
    assert "(the setting max_memory = 570MB)" in result.complaint[0] and "raise max_memory" in result.complaint[1]
    assert home.manifest.read_bytes() == held and not home.invites.exists()


SMALL = "[model]\nconfig = {hidden_size = 64, num_hidden_layers = 1, num_attention_heads = 2, vocab_size = 100}\n"
OWN_TEXT = '[data]\nsource = "text"\n'
IMPOSSIBLE = [  # a manifest, options, parts of the error and of its hint
    ("codec", "", ("--codec", "zip"), 'codec.name = "zip"', "choose from fp32"),
    ("whole", "", ("--stage", "1"), "this run has no stages", "leave out --stage"),
    ("no such stage", "", ("--stages", "2", "--stage", "3"), "there is no stage 3: the model is cut into 2 stages", "from 1 to 2"),
    ("memory of a stage", "", ("--stages", "2", "--max-memory", "620 MB"), "no stage of this run fits: stage 1 of 2 needs ", "more stages"),
]


@pytest.mark.timeout(240)  # a process that loads torch and transformers
@pytest.mark.parametrize(("toml", "options", "error", "hint"), [row[1:] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE])
def test_a_run_that_cannot_train_is_refused_before_anything_is_written(
    toml: str, options: tuple[str, ...], error: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(toml)
    command = ["host", *([str(tmp_path / "run.toml")] if toml else []), *options]
    program = f"""
import sys
from gossamer.cli.main import run
code = run({[*command, "--home", str(tmp_path / "home")]!r})
print(code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"  # no invite
    *before, complaint, way_out = done.stderr.splitlines()
    assert before in ([], ["trying the run, which takes some seconds"])
    assert error in complaint and hint in way_out
    assert not (tmp_path / "home").exists()


UNTRAINABLE = [  # a manifest, settings, parts of the error and of its hint
    ("vocabulary", SMALL, {}, "the tokenizer has 256 tokens, the model knows 100", "set vocab_size to 256"),
    ("devices", "", {"devices": "cpu:99"}, "needs 99 processor cores", "choose cpu:"),
    ("memory", "", {"max_memory": "570MB"}, "and there are 570 MB (the setting max_memory = 570MB)", "a smaller model needs less"),
    ("disk", "", {"max_disk": "1MB"}, "of disk space, and there are 1.0 MB (the setting max_disk = 1MB)", "raise max_disk to"),
    ("text", OWN_TEXT, {"data": "texts"}, "holds 6 tokens", "give --data more text"),
]


@pytest.mark.parametrize(("toml", "options", "error", "hint"), [row[1:] for row in UNTRAINABLE], ids=[row[0] for row in UNTRAINABLE])
def test_what_the_trial_of_a_run_finds_wrong_is_said(
    toml: str, options: dict[str, str], error: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has loaded torch and transformers; the test above tries a run in the process that the command starts."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("hello")
    with pytest.raises(OperatorError, match=re.escape(error)) as caught:
        pins(Manifest.from_toml(toml), None, PeerConfig(home=tmp_path / "home", **options))
    assert hint in caught.value.hint
    assert not (tmp_path / "home").exists()
