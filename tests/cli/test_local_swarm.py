"""Children of the demo: watched, reported when they die, and always stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gossamer.cli.local_swarm import LocalPeer, LocalSwarm, local_swarm
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status
from gossamer.peer.supervisor.children import ChildFailed
from gossamer.protocol.errors import ExitCode


def wait_ended(peer: LocalPeer) -> None:
    peer.wait_stopped()


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each child be a program that would run for a minute, whatever it is told."""
    script = tmp_path / "sleeper"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_child_that_ends_with_success_has_stopped(tmp_path: Path) -> None:
    peer = LocalPeer("peer-1", tmp_path, ["id"])
    wait_ended(peer)
    assert not peer.refresh()
    assert peer.status == {}


def test_the_last_status_of_a_child_is_what_it_has_written(tmp_path: Path) -> None:
    written = Status().to_json() | {"state": "done"}
    Home(tmp_path).status.write_text(json.dumps(written))
    peer = LocalPeer("peer-1", tmp_path, ["id"])
    wait_ended(peer)
    assert not peer.refresh() and peer.status == written


def test_a_childs_home_is_its_owners_alone(tmp_path: Path) -> None:
    peer = LocalPeer("peer-1", tmp_path / "home", ["id"])
    wait_ended(peer)
    assert not peer.refresh() and (tmp_path / "home").stat().st_mode & 0o077 == 0


def test_an_operator_error_of_a_child_is_reported_unchanged(tmp_path: Path) -> None:
    peer = LocalPeer("peer-2", tmp_path, ["join", "nonsense"])
    wait_ended(peer)
    with pytest.raises(ChildFailed, match="^peer-2: .*an invite starts with gossamer1") as caught:
        peer.refresh()
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    assert "peer invite" in caught.value.hint


def test_any_other_failure_of_a_child_is_reported_with_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'out of cheese' >&2\necho 'error: internal' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    peer = LocalPeer("peer-2", tmp_path, ["host"])
    wait_ended(peer)
    with pytest.raises(
        ChildFailed, match="peer-2 stopped with exit code 1; the end of its log:\n  out of cheese\n  error: internal"
    ) as caught:
        peer.refresh()
    assert caught.value.exit_code is ExitCode.OUR_FAULT
    assert str(tmp_path) in caught.value.hint


def test_a_host_that_ends_without_an_invite_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="no-such.toml"):
        LocalPeer("peer-1", tmp_path, ["host", "no-such.toml"]).invite()


def test_everything_is_stopped_whatever_happens(tmp_path: Path, sleeper: None) -> None:
    started: list[LocalSwarm] = []
    with pytest.raises(KeyboardInterrupt), local_swarm(tmp_path) as swarm:
        started.append(swarm)
        swarm.start("peer-1", ["host"])
        swarm.start("peer-2", ["join"])
        assert swarm.refresh()
        raise KeyboardInterrupt
    assert len(started[0].peers) == 2  # that both are gone, the leak check at the end of each test sees


@pytest.mark.usefixtures("signals_of_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_to_the_demo_stops_the_children_too(number: signal.Signals, tmp_path: Path, sleeper: None) -> None:
    with pytest.raises(KeyboardInterrupt), local_swarm(tmp_path) as swarm:
        swarm.start("peer-1", ["host"])
        signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_DFL


DEMO = """
import sys
from pathlib import Path
from gossamer.cli.local_swarm import local_swarm
with local_swarm(Path(sys.argv[1])) as swarm:
    swarm.start("peer-1", ["logs", "--follow"])
    print("started", flush=True)
    sys.stdin.read()
"""


def test_the_peers_of_a_killed_demo_end(tmp_path: Path) -> None:
    """Here by a verb that runs on and loads little; on its SIGTERM a whole peer leaves: tests/peer/supervisor/test_supervisor_real.py."""
    home = Home(tmp_path / "peer-1")
    home.create()
    home.log.touch()
    demo = subprocess.Popen([sys.executable, "-c", DEMO, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with demo:
        assert demo.stdout and demo.stdout.readline() == b"started\n"
        [peer] = psutil.Process(demo.pid).children()
        demo.kill()
    assert not psutil.wait_procs([peer], timeout=30)[1]


def test_a_demo_under_nohup_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with local_swarm(tmp_path):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stubborn"
    script.write_text("#!/bin/sh\ntrap '' TERM\necho ready\nwhile :; do sleep 1; done\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr("gossamer.cli.local_swarm.STOP_S", 0.5)
    with local_swarm(tmp_path) as swarm:
        assert swarm.start("peer-1", ["host"]).invite() == "ready"
