"""`peer status`: everything that the contract names, in words and as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from tests.cli.running import Running
from tests.cli.shell import Shell

KEYS = {"state", "reason", "since", "run_id", "peer_id", "step", "total_steps", "tokens", "loss", "peers_seen"}
KEYS |= {"meetings", "bytes", "lane_counts", "version"}


def test_json_is_one_object_with_the_documented_keys(shell: Shell) -> None:
    said = Running(shell).during(lambda: shell("status", "--json"))
    answer = json.loads(said.out)
    assert said.code == 0
    assert set(answer) >= KEYS
    assert set(answer["meetings"]) == {"completed", "solo", "refused", "failed"}
    assert set(answer["bytes"]) == {"sent", "received"}


def test_words_give_the_reason_beside_the_state(shell: Shell) -> None:
    peer = Running(shell)
    since_s, way_out = time.time() - 125, "ends when enough others have joined"
    peer.status = replace(peer.status, state="waiting", reason="waiting for peers: 0 seen, 2 wanted", since=since_s, way_out=way_out)
    said = peer.during(lambda: shell("status"))
    first, blank = said.out.splitlines()[:2]
    assert first == "waiting for 2 min: waiting for peers: 0 seen, 2 wanted; ends when enough others have joined"
    assert not blank
    assert peer.status.peer_id in said.out


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
def test_watching_ends_with_the_peer(shell: Shell, monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    peer, pauses = Running(shell), 0

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            peer.stop(is_killed=is_killed)

    monkeypatch.setattr("cli.status.time.sleep", pause)
    said = peer.during(lambda: shell("status", "--watch"))
    assert (said.code, said.err) == (0, "")
    assert [request["verb"] for request in peer.asked] == ["status", "status"]


def test_nobody_runs(shell: Shell) -> None:
    said = shell("status")
    assert said.code == 2
    assert "no peer is running" in said.complaint[0]


def test_watch_and_json_do_not_go_together(shell: Shell) -> None:
    assert shell("status", "--watch", "--json").code == 2


def test_health_is_an_exit_code(shell: Shell) -> None:
    """0 or 1, as Docker wants it, and the reason in words."""
    peer = Running(shell)
    assert peer.during(lambda: shell("status", "--healthy")).code == 0
    peer.trouble = "starting: the trainer ended (killed by SIGKILL)"
    said = peer.during(lambda: shell("status", "--healthy"))
    assert said.code == 1
    assert said.complaint[0] == peer.trouble
    said = shell("status", "--healthy")
    assert said.code == 1
    assert "no peer is running" in said.complaint[0]
