"""Every verb on a program run: it works, or says in one sentence why not and what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.cli.figures import COLUMNS, columns, line
from gossamer.cli.page.peers import shown
from gossamer.cli.status import description
from gossamer.peer.machine.events import RunKnown, StateChanged, StepDone
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, of_events
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.run import Run
from tests.cli.running import ADDRESS, Running
from tests.cli.shell import Shell
from tests.peer.program_homes import RUN, program_home, program_manifest

WORDS = "cifar, source https://example.org/cifar, revision 1a2b3c"
HOST = Identity(b"h" * 32)


@pytest.fixture
def home(shell: Shell) -> Home:
    return program_home(shell.home, program_manifest())


@pytest.mark.parametrize("arguments", [["host"], ["join"], ["service", "install"]], ids=" ".join)
def test_what_starts_a_trainer_names_the_program_to_start(shell: Shell, home: Home, arguments: Sequence[str]) -> None:
    result = shell(*arguments)
    assert result.code == 2
    assert result.complaint == (
        f"this run trains a program of its members: {WORDS}",
        "start that program again with this home folder: it continues the run",
    )
    assert not home.running.exists()


@pytest.mark.parametrize("verb", ["host", "simulate"])
def test_the_manifest_of_a_program_run_is_no_file_for_a_text_run(shell: Shell, tmp_path: Path, verb: str) -> None:
    (tmp_path / "run.toml").write_text(program_manifest().to_toml())
    result = shell(verb, tmp_path / "run.toml")
    assert result.code == 2
    assert result.complaint[0] == "this is the manifest of a program run, and a text run is wanted"
    assert "the program itself hosts its run" in result.complaint[1]


def test_eval_and_compare_say_who_measures(shell: Shell, home: Home, tmp_path: Path) -> None:
    result = shell("eval", "--json")
    assert (result.code, result.out) == (2, "")
    assert WORDS in result.complaint[0] and "the program measures it" in result.complaint[1]


def test_export_writes_the_tensors(shell: Shell, home: Home, tmp_path: Path) -> None:
    result = shell("export", tmp_path / "out")
    assert result.code == 0
    assert "held-out loss: not measured (the program measures it)" in result.err
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert shell("export", tmp_path / "out", "--tokens", "3").code == 2


def test_invites_are_written_and_taken_back(shell: Shell) -> None:
    home = program_home(shell.home, program_manifest(Run("cifar", 300)))
    written = Invite.from_text(shell("invite", "--also", f"{ADDRESS}/p2p/{HOST.peer_id}").out)
    assert written.run_id == SignedManifest.from_bytes(home.manifest.read_bytes()).run_id
    assert "the invite is revoked" in shell("revoke", written.to_text()).out


def training() -> Status:
    step = StepDone(5, 9, 640, 2.5, 0.1, 128.0, 1.0, 0.0, 1.0, 0.0)
    return of_events([RunKnown.of(program_manifest(RUN)), StateChanged("training", ""), step])


def test_the_status_counts_in_the_runs_unit(shell: Shell) -> None:
    peer = Running(shell)
    peer.status = replace(training(), peer_id=peer.status.peer_id)
    text = peer.during(lambda: shell("status")).out
    assert f"program    {WORDS}\n" in text
    assert "640 images in 5 steps" in text and "128 images/s now" in text
    assert "token" not in text and "nats" not in text
    answer = json.loads(peer.during(lambda: shell("status", "--json")).out)
    assert (answer["unit"], answer["program"], answer["tokens"]) == ("images", WORDS, 640)


def test_a_text_run_reads_as_before() -> None:
    text = description(replace(training(), unit="tokens", program="").to_json(), 0.0)
    assert "640 tokens in 5 steps" in text and "program" not in text
    assert columns("tokens") == COLUMNS


def test_the_progress_counts_in_the_runs_unit() -> None:
    assert "128 images/s" in line("peer-1", training().to_json())
    assert [new for new, old in zip(columns("images"), COLUMNS, strict=True) if new != old] == ["images/s"]


def test_the_page_shows_the_program(shell: Shell, home: Home) -> None:
    home.status.write_text(json.dumps(training().to_json()))
    peer = shown(home.path)
    assert peer["rows"]["program"] == WORDS and peer["status"]["unit"] == "images"
