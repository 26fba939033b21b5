"""Programs that use the library, as real processes in real swarms: the example, and a small regression."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home
from gossamer.peer.model.checkpoint import load_latest
from gossamer.protocol.run.manifest import SignedManifest
from tests.api.forked import ROOT, ForkedProgram, Forks, environment
from tests.peer.waiting import wait_until

PROGRAM = str(Path(__file__).with_name("small_program.py"))
SLOW = ("--pause-s", "0.01")
STEPS = 120  # of an example's run
LONG = ("--steps", "1000000", *SLOW)  # paced: it takes no core from what starts meanwhile


class Started:
    """A program with what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProgram, printed: Path) -> None:
        self.process, self.printed = process, printed

    def lines(self) -> list[str]:
        return self.printed.read_text().splitlines()

    def find(self, beginning: str) -> str:
        return next((line for line in self.lines() if line.startswith(beginning)), "")

    def says(self, beginning: str, within_s: float = 60.0) -> str:
        assert wait_until(lambda: self.find(beginning) or self.process.poll() is not None, beginning, within_s)
        assert self.find(beginning), self.printed.read_text()
        return self.find(beginning).removeprefix(beginning).strip()

    def end(self) -> str:
        """Wait for its last line; return it."""
        assert self.process.wait(90) == 0, self.printed.read_text()
        return self.lines()[-1]


class Programs:
    """Starts programs, and kills what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Started] = []

    def start(self, command: list[str], stdin: Path | None = None) -> Started:
        """Start a command as a user would."""
        printed = self._printed()
        with printed.open("wb") as out, (stdin or Path(os.devnull)).open("rb") as given:
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=subprocess.STDOUT, env=environment())
        return self._noted(Started(process, printed))

    def _printed(self) -> Path:
        (self.folder / "out").mkdir(exist_ok=True)
        return self.folder / "out" / f"{len(self.started)}.out"

    def _noted(self, started: Started) -> Started:
        self.started.append(started)
        return started


class ForkedPrograms(Programs):
    """Starts programs in a process that has imported torch."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        super().__init__(folder)
        self._forks = forks

    def fork(self, *command: str, **environment: str) -> Started:
        return self.fork_reading(Path(os.devnull), *command, **environment)

    def fork_reading(self, typed: Path, /, *command: str, **environment: str) -> Started:
        printed = self._printed()
        return self._noted(Started(self._forks.start(command, environment, printed, typed), printed))

    def small(self, home: str, *options: str) -> Started:
        return self.fork(PROGRAM, str(self.folder / home), *options)


def shortened(example: str, folder: Path) -> Path:
    """Copy a program of examples/, with a run of STEPS steps."""
    program, num_changes = re.subn(r"(STEPS = |steps=)300\b", rf"\g<1>{STEPS}", (ROOT / "examples" / example).read_text())
    assert num_changes == 1
    (folder / example).write_text(program)
    return folder / example


@contextmanager
def all_ended(programs: Programs) -> Iterator[Programs]:
    family: list[psutil.Process] = []
    try:
        yield programs
    finally:
        for one in programs.started:
            with suppress(psutil.NoSuchProcess):
                family += psutil.Process(one.process.pid).children(recursive=True)
            one.process.kill()
            one.process.wait()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, 10)


@pytest.fixture
def programs(tmp_path: Path, forks: Forks) -> Iterator[ForkedPrograms]:
    started = ForkedPrograms(tmp_path, forks)
    with all_ended(started):
        yield started


@pytest.mark.timeout(240)
def test_the_images_example_ends_alike_as_a_file_and_from_stdin(programs: ForkedPrograms, tmp_path: Path) -> None:
    script = shortened("images.py", tmp_path)
    host = programs.fork(str(script), str(tmp_path / "first"))
    invite = host.says("gossamer1")
    guest = programs.start([sys.executable, "-P", "-", str(tmp_path / "second"), f"gossamer1{invite}"], stdin=script)
    assert host.end() == guest.end()
    assert host.lines()[-1].startswith("held-out loss ") and f"{STEPS} steps" in host.lines()[-1]


RUN_NOTEBOOK = """
import json, os, sys
os.makedirs(sys.argv[2])
os.chdir(sys.argv[2])
cells = json.load(open(sys.argv[1]))["cells"]
names = {"__name__": "__main__"}
for cell in cells:
    if cell["cell_type"] == "code":
        exec(cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]), names)
"""


@pytest.mark.timeout(240)
def test_the_cells_of_the_notebook_host_and_join_a_run(programs: ForkedPrograms, tmp_path: Path) -> None:
    program, notebook = tmp_path / "run_notebook.py", shortened("notebook.ipynb", tmp_path)
    program.write_text(RUN_NOTEBOOK)

    def start(folder: str, answer: str) -> Started:
        typed = tmp_path / f"{folder}.typed"
        typed.write_text(answer + "\n")
        return programs.fork_reading(typed, str(program), str(notebook), str(tmp_path / folder))

    host = start("first", "")
    guest = start("second", "gossamer1" + host.says("invite: gossamer1"))
    assert host.end() == guest.end().removeprefix("invite: ")  # the question has no line of its own
    assert host.lines()[-1].startswith("held-out loss ") and host.lines()[-1].endswith(f"{STEPS} steps of the run")


@pytest.mark.timeout(240)
def test_two_programs_meet_and_end_alike_and_one_that_was_killed_goes_on(programs: ForkedPrograms, tmp_path: Path) -> None:
    host = programs.small("host", "--steps", "600", "--peers", "1", *SLOW)
    guest = programs.small("guest", "--invite", host.says("invite"), *SLOW)
    guest.says("trains")
    guest.process.kill()
    wait_until(lambda: not Home(tmp_path / "guest").holder(), "end of the killed program's peer", 10.0)
    again = programs.small("guest", "--go-on", *SLOW)
    assert int(again.says("joined at")) > 0
    steps, digest, loss = host.end().split()[1:]
    assert again.end().split()[1:] == [steps, digest, loss] and steps == "600"
    assert float(loss) < 0.05


@pytest.mark.timeout(120)
def test_a_forked_child_does_not_keep_the_peer_of_a_killed_program(programs: ForkedPrograms, tmp_path: Path) -> None:
    host = programs.small("host", "--fork", *LONG)
    host.says("trains")
    (child,) = [one for one in psutil.Process(host.process.pid).children() if one.cmdline() == psutil.Process(host.process.pid).cmdline()]
    host.process.kill()
    try:
        wait_until(lambda: not Home(tmp_path / "host").holder(), "end of the peer", 10.0)
        assert child.is_running()
    finally:
        child.kill()


@pytest.mark.timeout(120)
def test_pause_holds_step_and_leave_ends_batches(programs: ForkedPrograms, tmp_path: Path) -> None:
    host, home = programs.small("host", *LONG), tmp_path / "host"
    host.says("trains")
    assert ask(home, {"verb": "pause"})["state"] == "paused"
    wait_until(lambda: ask(home, {"verb": "status"})["reason"] == "paused by the operator", "last step and save before the pause")
    before = ask(home, {"verb": "status"})
    wait_until(
        lambda: ask(home, {"verb": "status"})["processor_seconds"]["node"] > before["processor_seconds"]["node"], "a later report", 60.0
    )
    assert ask(home, {"verb": "status"})["own_steps"] == before["own_steps"]
    ask(home, {"verb": "resume"})
    wait_until(lambda: ask(home, {"verb": "status"})["own_steps"] > before["own_steps"], "steps after the pause")
    ask(home, {"verb": "leave"})
    assert int(host.end().split()[1]) > before["own_steps"]
    assert Home(home).last_status()["state"] == "left"
    assert not Home(home).holder()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("signals_of_a_terminal")
def test_ctrl_c_saves_and_leaves(programs: ForkedPrograms, tmp_path: Path) -> None:
    host = programs.small("host", *LONG)
    host.says("trains")
    host.process.send_signal(signal.SIGINT)
    assert host.process.wait(60) != 0
    assert host.lines()[-1] == "KeyboardInterrupt"
    assert Home(tmp_path / "host").last_status()["state"] == "left"
    again = programs.small("host", *LONG)
    assert int(again.says("joined at")) >= 20


@pytest.mark.timeout(120)
def test_a_program_whose_supervisor_dies_says_so(programs: ForkedPrograms, tmp_path: Path) -> None:
    host = programs.small("host", *LONG)
    host.says("trains")
    supervisor = int(Home(tmp_path / "host").holder().split()[1])
    os.kill(supervisor, signal.SIGKILL)
    assert host.process.wait(60) != 0
    assert "the supervisor has ended with exit code -9" in "\n".join(host.lines()[-2:])


@pytest.mark.timeout(120)
def test_a_program_that_diverges_ends_and_keeps_its_good_checkpoints(programs: ForkedPrograms, tmp_path: Path) -> None:
    host = programs.small("host", "--diverges-at", "35", *LONG)
    assert host.process.wait(60) != 0
    assert "10 batches in a row gave no finite loss" in "\n".join(host.lines()[-2:]) and host.lines()[-1].startswith("hint: ")
    home = Home(tmp_path / "host")
    loaded = load_latest(home.checkpoints, SignedManifest.from_bytes(home.manifest.read_bytes()).run_id)
    assert loaded is not None and loaded.contents.step <= 36
    assert all(bool(tensor.isfinite().all()) for tensor in loaded.contents.tensors.values())
    assert home.last_status()["state"] == "failed"


@pytest.mark.timeout(120)
def test_another_model_is_refused_with_both_digests_and_the_first_name(programs: ForkedPrograms) -> None:
    host = programs.small("host", *LONG)
    other = programs.small("guest", "--width", "33", "--invite", host.says("invite"))
    assert other.process.wait(60) != 0
    words = "\n".join(other.lines()[-2:])
    assert "another model than the run's: 0.bias is [33] here, [32] in the run" in words and "hint: " in words
