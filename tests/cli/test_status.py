"""`peer status`: everything that the contract names, in words and as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from gossamer.cli.invite import bootstraps
from gossamer.cli.status import description
from gossamer.peer.machine.events import MonthCounted, OthersTrained, PeersSeen, StepsGivenUp
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.states import STATES, changed
from gossamer.peer.machine.status import Status, apply
from gossamer.protocol.identity import Identity
from tests.cli.running import Running
from tests.cli.shell import Shell

NOW_S = 10_000.0


def test_json_is_the_status_as_one_object(shell: Shell) -> None:
    peer = Running(shell)
    result = peer.during(lambda: shell("status", "--json"))
    assert result.code == 0 and json.loads(result.out).items() >= peer.status.to_json().items()


def test_the_first_line_is_one_sentence(shell: Shell) -> None:
    peer = Running(shell)
    since_s, way_out = time.time() - 125, "ends when enough others have joined"
    peer.status = replace(peer.status, state="waiting", reason="waiting for peers: 0 seen, 2 wanted", since=since_s, way_out=way_out)
    result = peer.during(lambda: shell("status"))
    first, blank = result.out.splitlines()[:2]
    assert first == "waiting for 2 min: waiting for peers: 0 seen, 2 wanted; ends when enough others have joined"
    assert not blank
    assert peer.status.peer_id in result.out


@pytest.mark.parametrize("content", [b'{"state": "training"}', b"[" * 100_000])
def test_files_of_another_release_or_of_a_stranger_count_as_none(shell: Shell, host: Identity, content: bytes) -> None:
    """A backup may come from either."""
    home = Home(shell.home)
    for file in (home.status, home.run, home.peers):
        file.write_bytes(content)
    assert shell("status").complaint[0] == f"no peer is running in {shell.home}"
    assert "no status" in shell("logs", "--report").out
    assert json.loads(shell("run", "--json").out)["live"] == 0
    assert bootstraps(home, host.peer_id, ()) == ()


@pytest.mark.parametrize("state", STATES)
def test_every_state_reads_as_one_sentence(state: str) -> None:
    event = changed(state)
    status = apply(Status(state=""), replace(event, ts=NOW_S - 3 * 3600))
    first = description(status.to_json(), NOW_S).splitlines()[0]
    assert first == f"{state} for 3 h 0 min: {event.reason}; {event.way_out}"


def rows(**values: Any) -> dict[str, str]:
    lines = description(Status(**values).to_json(), NOW_S).splitlines()[2:]
    return {line[:11].strip(): line[11:] for line in lines}


def test_a_staged_run_has_its_own_rows_and_counts_micro_batches_as_costs() -> None:
    lanes = [
        {"partner": f"12D3KooW_peer{number}", "stage": 3, "hops": 9, "unanswered": 2, "window": 4, "usual_s": 1.5} for number in (1, 2)
    ]
    hops = {
        "outcomes": {"answered": 9},
        "repeated": 0,
        "late": 0,
        "lanes_below": 0,
        "lanes_above": 2,
        "sent": 5_000_000,
        "received": 6_000_000,
    }
    expected = {"day_bytes": 9e9, "day_received": 8e9, "day_hops": 7e9, "inner_steps": 4, "step_s": 1.0, "is_measured": True, "use": 0.25}
    found = rows(
        stage="2 of 3", lanes=lanes, hops=hops, stage_holders=[1, 1, 2], starved_seconds=3.0, train_seconds=9.0, expected_traffic=expected
    )
    assert found["stage"].startswith("2 of 3; micro-batches: 9 answered") and found["starved"].startswith("25.0 %")
    assert found["lanes"].startswith("_peer1, stage 3: 9 micro-batches") and "peer2, stage 3" in found[""]
    assert found["holders"] == "1 of stage 1, 1 of stage 2, 2 of stage 3"
    assert "5.0 MB up, 6.0 MB down with micro-batches" in found["traffic"]
    assert found["costs"].startswith("0.0 hours, 11.0 MB in meetings and with micro-batches")
    assert found["costs"].endswith("9.0 GB up and 8.0 GB down; the line feeds 25 % of the device")
    assert "stage" not in rows(), "nothing of it in other runs"


def test_costs_show_whether_energy_is_measured_or_estimated() -> None:
    earlier = {
        "joined": NOW_S - 7200,
        "seconds": 3600.0,
        "train_seconds": 0.0,
        "meetings": 3,
        "sent": 5e8,
        "received": 5e8,
        "watt_hours": 2.0,
    }
    energy = {"watt_hours": 1.5, "how": "estimated"}
    shown = rows(earlier=earlier, energy=energy, tokens=900, own_steps=9, started=NOW_S - 1800, updated=NOW_S)
    assert shown["costs"] == "1.5 hours, 1.0 GB in meetings, 3.5 Wh (estimated)"
    assert shown["traffic"] == "0 B up, 0 B down in meetings, in this start; 0 B in all this month"
    assert shown["my part"] == "900 tokens in 9 steps, 3 meetings since it joined 2 h 0 min ago; 0 tokens/s now"


def test_steps_that_were_given_up_are_counted_beside_the_step() -> None:
    status = reduce(apply, (StepsGivenUp(1595, 664), StepsGivenUp(700, 690)), Status(step=1595, total_steps=5000))
    assert "step 690 of 5000 (13.8 %), 941 given up" in description(status.to_json(), NOW_S)
    assert "given up" not in rows(step=1595, total_steps=5000)["run"]


def test_the_token_share_is_shown_beside_the_other_peers() -> None:
    status = reduce(apply, (PeersSeen(3), OthersTrained(2700), MonthCounted(3_200_000_000)), Status(tokens=900))
    assert status.to_json()["token_share"] == 0.25
    shown = description(status.to_json(), NOW_S)
    assert "900 tokens (25.0 % of what the peers in sight report) in 0 steps" in shown
    assert "3.2 GB in all this month" in shown


def test_all_warnings_are_shown() -> None:
    assert rows()["warnings"] == "none"
    assert rows(warned={"disk": "the disk is nearly full", "clock": ""})["warnings"] == "the disk is nearly full"


def test_health_is_an_exit_code(shell: Shell) -> None:
    """0 or 1, as Docker wants it, and the reason in words."""
    peer = Running(shell)
    assert peer.during(lambda: shell("status", "--healthy")).code == 0
    peer.trouble = "starting: the trainer ended (killed by SIGKILL)"
    result = peer.during(lambda: shell("status", "--healthy"))
    assert result.code == 1
    assert result.complaint[0] == peer.trouble
    result = shell("status", "--healthy")
    assert result.code == 1
    assert "no peer is running" in result.complaint[0]


def test_the_last_state_of_a_stopped_peer_is_shown(shell: Shell) -> None:
    home = Home(shell.home)
    home.create()
    ended = apply(Status(), replace(changed("failed", "the port is busy", "choose another"), ts=time.time() - 125))
    home.status.write_text(json.dumps(ended.to_json()))
    result = shell("status")
    assert result.code == 2
    assert result.complaint[0].endswith("its last state: failed for 2 min: the port is busy; choose another")


def test_a_peer_that_was_killed_has_a_last_state_without_an_end(shell: Shell) -> None:
    home = Home(shell.home)
    home.create()
    killed = replace(apply(Status(), changed("training")), own_steps=7, since=0.0)
    home.status.write_text(json.dumps(killed.to_json()))
    error, hint = shell("status").complaint
    assert error.endswith("its last state: training, meeting others; it ended without leaving")
    assert hint == f"`peer join --home {home.path}` starts it again: it goes on from its newest checkpoint"


def test_what_codes_messages_has_a_line_once_it_is_known() -> None:
    why = "torch (no compiled part here; `pip install` with a C compiler builds it)"
    assert rows(coding=why)["coding"] == why
    assert "coding" not in rows()
