"""What the called peers' answers mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.peer.doctor.finding import Level
from gossamer.peer.doctor.swarm_checks import bootstraps, membership
from gossamer.peer.doctor.visit import Call, CallRound
from gossamer.protocol.errors import ExitCode, RefusalCode, Refused
from tests.peer.doctor.cases import HOST, SIGNED

ADDRESS = f"/ip4/203.0.113.5/tcp/4001/p2p/{HOST.peer_id}"
THERE = Call(ADDRESS, connect_s=0.1, round_trip_s=0.023, manifest=SIGNED)
GONE = Call(ADDRESS, "connection refused")


def test_who_was_reached_and_how_fast() -> None:
    finding = bootstraps(CallRound(calls=(THERE,)))
    assert finding.level is Level.OK and "203.0.113.5:4001 in 23 ms" in finding.found


def test_one_of_several_is_enough() -> None:
    finding = bootstraps(CallRound(calls=(GONE, THERE)))
    assert finding.level is Level.WARN and "connection refused" in finding.found


def test_nobody_was_reached() -> None:
    finding = bootstraps(CallRound(calls=(GONE, replace(GONE, trouble="no route to host"))))
    assert (finding.level, finding.exit_code) == (Level.FAIL, ExitCode.SWARM_UNREACHABLE)
    assert "no route to host" in finding.found
    assert membership(CallRound(calls=(GONE,))).level is Level.OK, "which is said once"


@pytest.mark.parametrize(
    ("code", "own", "level", "exit_code"),
    [
        (RefusalCode.NOT_INVITED, True, Level.FAIL, ExitCode.REFUSED_BY_RUN),
        (RefusalCode.WRONG_VERSION, True, Level.FAIL, ExitCode.VERSION_MISMATCH),
        (RefusalCode.NOT_INVITED, False, Level.WARN, ExitCode.DONE),
        (RefusalCode.NOT_READY, True, Level.WARN, ExitCode.DONE),
    ],
    ids=["not a member", "another version", "a stranger's name was used", "not ready"],
)
def test_a_run_that_does_not_let_us_in(code: RefusalCode, own: bool, level: Level, exit_code: ExitCode) -> None:
    refused = Call(ADDRESS, refused=Refused(code))
    finding = membership(CallRound(calls=(refused,), under_own_name=own))
    assert (finding.level, finding.exit_code) == (level, exit_code)


def test_the_run_lets_us_in() -> None:
    assert membership(CallRound(calls=(THERE,))).level is Level.OK
