"""`peer service`: the files and what systemd is told; a script stands in for systemd, which no test machine runs."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from gossamer.peer.machine.home import Home
from gossamer.peer.machine.states import changed
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.machine.systemd import unit_file
from gossamer.peer.machine.units import duration_s
from gossamer.peer.supervisor.children import BYTES_PER_PARAM, LEAVE_S, SAVES, SLOW_DISK_BYTES_PER_S
from gossamer.protocol.errors import ExitCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from tests.cli.shell import Shell
from tests.docker.test_files import PEERS, understood

HOST = Identity(b"h" * 32)


def invite() -> str:
    bootstraps = (f"/ip4/127.0.0.1/tcp/4001/p2p/{HOST.peer_id}",)
    return Invite.issue(HOST, b"r" * 32, bootstraps, None, int(time.time()) + 3600).to_text()


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that notes what it is told; returns its notes. It fails where a file `refuses` lies beside them."""
    notes, program = tmp_path / "told", tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
echo "$*" >> {notes}
[ -e {tmp_path}/refuses ] && echo "Failed to connect to bus: No medium found" >&2 && exit 1
[ "$2" = show ] && printf "ActiveState=failed\\nSubState=failed\\nNRestarts=3\\n"
exit 0
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return notes


def unit_of(shell: Shell) -> dict[str, str]:
    lines = unit_file(shell.home).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_install_writes_the_unit_and_starts_it(shell: Shell, systemctl: Path) -> None:
    result = shell("service", "install", invite())
    assert result.code == 0, result.err
    assert result.out == unit_file(shell.home).read_text()
    told = ["--user show-environment", "--user daemon-reload"]
    assert systemctl.read_text().splitlines() == [*told, f"--user enable --now {unit_file(shell.home).name}"]
    assert "loginctl enable-linger" in result.err
    assert Home(shell.home).invite.read_text().strip().startswith("gossamer1")  # so the unit holds no secret
    assert "gossamer1" not in result.out


def test_the_unit_starts_peer_join_in_this_home(shell: Shell, systemctl: Path) -> None:
    shell("service", "install", invite())
    started = shlex.split(unit_of(shell)["ExecStart"])
    assert started[1:4] == ["-P", "-m", "gossamer.cli.main"]
    understood(started[4:])
    assert started[-1] == str(shell.home) == unit_of(shell)["ReadWritePaths"]


def test_the_unit_limits_restarts(shell: Shell, systemctl: Path) -> None:
    shell("service", "install", invite())
    unit = unit_of(shell)
    assert (unit["Restart"], unit["StartLimitBurst"]) == ("on-failure", "3")
    final = {ExitCode(int(code)) for code in unit["RestartPreventExitStatus"].split()}
    assert final == {ExitCode.BAD_INPUT, ExitCode.REFUSED_BY_RUN, ExitCode.VERSION_MISMATCH}


def test_a_stop_leaves_a_large_model_the_time_to_save(shell: Shell, systemctl: Path) -> None:
    billion_s = SAVES * 10**9 * BYTES_PER_PARAM / SLOW_DISK_BYTES_PER_S
    shell("service", "install", invite())
    for grace in (unit_of(shell)["TimeoutStopSec"], *(service["stop_grace_period"] for service in PEERS.values())):
        assert duration_s(grace) > billion_s + sum(LEAVE_S.values())


def test_printing_changes_nothing(shell: Shell, systemctl: Path) -> None:
    result = shell("service", "install", "--print")
    assert "ExecStart=" in result.out
    assert not systemctl.exists()
    assert not unit_file(shell.home).exists()
    assert not shell.home.exists()


def test_a_home_with_spaces_and_signs_stays_one_argument(tmp_path: Path, systemctl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = Shell(tmp_path / "my $home%i", capsys)("service", "install", "--print").out.splitlines()
    [start] = [line for line in unit if line.startswith("ExecStart=")]
    assert start.endswith(f'--home "{tmp_path}/my $$home%%i"')
    assert f'ReadWritePaths="{tmp_path}/my $home%%i"' in unit, "only a command expands variables"


def test_two_homes_have_two_services() -> None:
    homes = ["/home/a/.gossamer", "/home/a/second", "/home/a/gossamer", "/home/a/\u00e4", "/home/a/\u00f6", f"/home/{'long/' * 60}a"]
    files = {unit_file(Path(home)) for home in homes}
    assert len(files) == len(homes) and max(len(file.name) for file in files) < 255


def test_a_service_of_an_earlier_release_keeps_its_name(shell: Shell, systemctl: Path) -> None:
    shell("service", "install", invite())
    earlier = unit_file(shell.home).parent / f"gossamer-{re.sub('[^A-Za-z0-9]+', '-', str(shell.home)).strip('-')}.service"
    unit_file(shell.home).rename(earlier)
    assert unit_file(shell.home) == earlier
    assert shell("service", "remove").code == 0 and not earlier.exists()


def test_remove_stops_it_and_leaves_the_home(shell: Shell, systemctl: Path) -> None:
    shell("service", "install", invite())
    systemctl.unlink()
    name = unit_file(shell.home).name
    assert shell("service", "remove").code == 0
    assert systemctl.read_text().splitlines() == [f"--user disable --now {name}", "--user daemon-reload"]
    assert not unit_file(shell.home).exists()
    assert Home(shell.home).identity.exists()


@pytest.mark.parametrize("action", ["remove", "status"])
def test_a_missing_service_is_reported(shell: Shell, systemctl: Path, action: str) -> None:
    result = shell("service", action)
    assert result.code == 2
    assert "no service is installed" in result.complaint[0]


def test_install_needs_a_run(shell: Shell, systemctl: Path) -> None:
    assert "holds no run" in shell("service", "install").complaint[0]
    assert not unit_file(shell.home).exists()


def test_a_machine_whose_systemd_refuses(shell: Shell, systemctl: Path) -> None:
    (systemctl.parent / "refuses").touch()
    result = shell("service", "install", invite())
    assert result.code == 2
    assert "No medium found" in result.complaint[0]
    assert "systemctl --user show-environment" in result.complaint[1]
    assert result.out == "" and not unit_file(shell.home).exists() and not shell.home.exists()


def test_a_machine_without_systemd(shell: Shell, systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(systemctl.parent / "nothing"))
    result = shell("service", "install", invite())
    assert "no systemd" in result.complaint[0]
    assert "containers.md" in result.complaint[1]


def test_service_status_shows_the_last_state_of_a_failed_peer(shell: Shell, systemctl: Path) -> None:
    """From the status that the peer wrote last: its events may be a hundred megabytes, or deleted."""
    shell("service", "install", invite())
    assert "has not written a status yet" in shell("service", "status").out
    assert json.loads(shell("service", "status", "--json").out)["state"] is None
    failed = changed("failed", "the trainer failed 3 times in a row: killed by SIGKILL")
    Home(shell.home).status.write_text(json.dumps(apply(Status(), failed).to_json()))
    result = shell("service", "status")
    assert "failed (failed), started again 3 times" in result.out
    assert "the trainer failed 3 times in a row: killed by SIGKILL" in result.out
    answer = json.loads(shell("service", "status", "--json").out)
    assert (answer["state"], answer["systemd"]["ActiveState"]) == ("failed", "failed")


def test_service_status_names_a_unit_of_another_release(shell: Shell, systemctl: Path) -> None:
    shell("service", "install", invite())
    assert "another release" not in shell("service", "status").err
    unit = unit_file(shell.home)
    unit.write_text(unit.read_text().replace("gossamer.cli.main", "cli.main"))
    assert "`peer service install` renews it" in shell("service", "status").err


def test_a_running_peer_is_not_installed_as_a_service(shell: Shell, systemctl: Path) -> None:
    shell("id")
    with Home(shell.home).locked():
        assert "already runs" in shell("service", "install", invite()).complaint[0]
