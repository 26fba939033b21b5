"""The README's three shells: a host and two joining peers; host restart, pause, leave, stop and export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gossamer.cli.local_swarm import LocalPeer, LocalSwarm
from tests.cli.shell import Shell
from tests.peer.family import everybody, family, gone
from tests.peer.waiting import wait_until

LOCAL = ("--listen", "127.0.0.1", "--threads", "1", "--devices", "cpu")
TWO = ("--devices", "cpu:2")  # overrides an option in LOCAL
MANIFEST = """
[run]
total_steps = 100000
[outer]
inner_steps = 8
deadline_s = 5.0
"""


def completed(peer: LocalPeer) -> int:
    peer.refresh()
    return int(peer.status["meetings"]["completed"]) if peer.status else 0


def steps(peer: LocalPeer) -> int:
    peer.refresh()
    return int(peer.status["own_steps"]) if peer.status else 0


def state(peer: LocalPeer) -> str:
    peer.refresh()
    return str(peer.status.get("state", ""))


def reason(peer: LocalPeer) -> str:
    peer.refresh()
    return str(peer.status.get("reason", ""))


def give_way(*peers: LocalPeer) -> None:
    """Lower the priority of these peers' trainers, which would otherwise starve starting processes."""
    for peer in peers:
        family(peer.home)["trainer"].nice(10)


def readable_by_others(home: Path) -> Iterator[str]:
    """Yield what other users could read in a home if they could enter it."""
    for path in home.iterdir():
        if path.lstat().st_mode & 0o077:
            yield path.name


def trained_checkpoint(peer: LocalPeer) -> int:
    """Return the step count of the newest checkpoint."""
    return max((int(path.name[5:13]) for path in (peer.home / "checkpoints").glob("step-*")), default=0)


@pytest.mark.timeout(240)
def test_a_swarm_survives_its_host_and_readmits_it(swarm: LocalSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "run.toml"
    manifest.write_text(MANIFEST)
    first = swarm.start("first", ["host", str(manifest), *LOCAL, "--checkpoint-every", "5"])
    invite = first.invite()
    give_way(first)
    second, third = (swarm.start(name, ["join", invite, *LOCAL, *devices]) for name, devices in (("second", TWO), ("third", ())))
    for peer in (first, second, third):
        wait_until(lambda peer=peer: completed(peer) > 0, f"meeting of {peer.name}", 60)
    give_way(second, third)

    saved = wait_until(lambda: trained_checkpoint(first), "checkpoint of the host", 60)
    killed, *orphans = everybody(first.home)
    killed.kill()
    assert gone(orphans, 10), "something of the killed host lives on"
    first.kill()
    swarm.peers.remove(first)

    before = completed(second)
    wait_until(lambda: completed(second) > before + 2, "meeting without the host", 60)
    back = swarm.start("first", ["host", *LOCAL])
    wait_until(lambda: steps(back) >= saved, "host going on from its checkpoint", 60)
    wait_until(lambda: completed(back) > 0, "meeting with the host that is back", 60)
    give_way(back)

    shell = Shell(third.home, capsys)
    assert shell("config", "only-idle", "true").code == 0
    wait_until(
        lambda: reason(third).startswith("other processes use the machine") and "trainer" not in family(third.home),
        "third paused, its memory free",
        60,
    )
    assert shell("pause", "2h").code == 0
    assert state(third) == "paused" and reason(third).startswith("paused by the operator until")
    paused_at, before = steps(third), completed(second)
    other_day = f"{datetime.now() + timedelta(days=3):%a} 00:00-00:01".lower()
    assert shell("config", "schedule", other_day).code == 0
    assert shell("config", "only-idle", "false").code == 0
    assert f"stays paused: outside the hours of the schedule {other_day} until" in shell("resume").complaint[0]
    wait_until(lambda: completed(second) > before, "meeting without the one that is paused", 60)
    assert shell("config", "--unset", "schedule").code == 0
    wait_until(lambda: state(third) == "training" and steps(third) > paused_at, "third going on from where it saved", 60)

    assert not list(readable_by_others(second.home)) and not list(readable_by_others(third.home))
    runtime = Path(json.loads((second.home / "running.json").read_text())["control"]).parent
    assert Shell(second.home, capsys)("leave").code == 0
    wait_until(lambda: not second.refresh(), "clean leave", 15)  # refresh raises unless the exit code is 0
    assert not runtime.exists()
    for peer in (third, back):
        peer.ask_to_stop()
    for peer in (third, back):
        wait_until(lambda peer=peer: not peer.refresh(), "clean stop on SIGTERM", 15)

    shell = Shell(third.home, capsys)  # in this process, which has imported torch already
    assert 0 < json.loads(shell("eval", "--json", "--tokens", "8192").out)["loss"] < 5
    assert shell("export", tmp_path / "model", "--tokens", 4096).code == 0
    assert (tmp_path / "model" / "config.json").is_file()
