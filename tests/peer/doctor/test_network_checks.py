"""Checks of the network, from the answers of the peers that were called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.peer.doctor.finding import Level
from gossamer.peer.doctor.network_checks import bootstraps, clock, line, membership, reachable, router
from gossamer.peer.doctor.visit import Call, CallRound
from gossamer.protocol.errors import ExitCode, RefusalCode, Refused
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan
from tests.peer.doctor.cases import HOST, SIGNED

HOUR_S = 3600.0
ADDRESS = f"/ip4/203.0.113.5/tcp/4001/p2p/{HOST.peer_id}"
THERE = Call(ADDRESS, connect_s=0.1, round_trip_s=0.023, manifest=SIGNED)
GONE = Call(ADDRESS, "connection refused")
PLAN = ModelPlan(16, (FragmentTerms(1000, 8_000_000, 10),) * 10, 300_000_000)


def test_without_a_run_there_is_nobody_to_call_and_nothing_to_warn_of() -> None:
    assert bootstraps(CallRound()).level is Level.SKIP


@pytest.mark.parametrize(
    ("ahead_s", "level", "words"),
    [
        ([HOUR_S], Level.WARN, "3600.0 s behind"),
        ([-HOUR_S, -HOUR_S + 1, 5.0], Level.WARN, "3599.0 s ahead of that of 3 peers"),
        ([0.1, -0.1, HOUR_S], Level.OK, "0.1 s behind that of 3 peers"),
        ([10.0], Level.WARN, "10.0 s behind"),
        ([], Level.SKIP, "no peer could be asked"),
    ],
    ids=["slow by an hour", "fast by an hour", "one malicious peer", "a little", "nobody there"],
)
def test_a_clock_that_is_wrong(ahead_s: list[float], level: Level, words: str) -> None:
    finding = clock(ahead_s)
    assert finding.level is level and words in finding.found
    assert level in (Level.OK, Level.SKIP) or "timedatectl" in finding.way_out


@pytest.mark.parametrize(
    ("tries", "level", "words"),
    [
        ([True], Level.OK, "from "),
        ([False], Level.WARN, "not from"),
        ([True, False], Level.WARN, "and not from"),
        ([None], Level.SKIP, "do not try"),
        ([], Level.SKIP, "no peer could be asked"),
    ],
)
def test_a_port_that_cannot_be_reached(tries: list[bool | None], level: Level, words: str) -> None:
    finding = reachable([replace(THERE, is_open=is_open) for is_open in tries])
    assert finding.level is level and words in finding.found


@pytest.mark.parametrize(
    ("observed", "own", "found", "level", "words"),
    [
        (["/ip4/8.8.4.4/tcp/4001"], {"8.8.4.4"}, None, Level.OK, "address of its own"),
        (["/ip4/8.8.4.4/tcp/4001"] * 2, {"192.168.1.2"}, None, Level.OK, "same port"),
        (["/ip4/8.8.4.4/tcp/4001"] * 2, {"192.168.1.2"}, "8.8.4.4", Level.OK, "asks it to open"),
        (["/ip4/8.8.4.4/tcp/4001", "/ip4/8.8.4.4/tcp/7777"], {"192.168.1.2"}, None, Level.WARN, "symmetric"),
        (["/ip4/8.8.4.4/tcp/4001"], {"192.168.1.2"}, "100.64.3.2", Level.WARN, "shares one address"),
        (["/ip4/8.8.4.4/tcp/4001"], {"192.168.1.2"}, "10.1.2.3", Level.WARN, "shares one address"),
        (["/ip4/192.168.1.9/tcp/4001", ""], {"192.168.1.2"}, None, Level.SKIP, "not known"),
        (["/ip4/8.8.4.4.4/tcp/4001", "/ip6/::1%/tcp/1", "nowhere"], {"192.168.1.2"}, None, Level.SKIP, "not known"),
        ([], set(), "", Level.SKIP, "not known"),
    ],
    ids=["none", "same port", "with UPnP", "symmetric", "provider's", "two routers", "local", "malformed", "no peer could be asked"],
)
def test_the_router(observed: list[str], own: set[str], found: str | None, level: Level, words: str) -> None:
    finding = router(observed, own, found)
    assert finding.level is level and words in finding.found


@pytest.mark.parametrize(
    ("rates", "level", "words"),
    [
        ((12.5e6, 12.5e6), Level.OK, "100 Mbit/s up, 100 Mbit/s down: about 24 s to join, 0.6 s for a meeting"),
        ((40e3, 40e3), Level.WARN, "slow for this run"),
        ((10e3, 1e6), Level.FAIL, "too slow"),
    ],
    ids=["good", "slow", "too slow"],
)
def test_the_line(rates: tuple[float, float], level: Level, words: str) -> None:
    finding = line(rates, lambda: (PLAN, 200))
    assert finding.level is level and words in finding.found


def test_the_line_counts_with_the_measured_step() -> None:
    """A line carries a meeting of each part in as many seconds, whatever a step takes: in steps of half a second, twice as many."""
    assumed, measured = (line((1.25e6, 1.25e6), lambda: (PLAN, 200), step_s).found for step_s in (None, 0.5))
    assert assumed.endswith(" of 1 s (assumed)") and measured.endswith(" of 0.5 s (measured)")
    intervals = [int(found.split("about every ")[1].split()[0]) for found in (assumed, measured)]
    assert intervals[1] == pytest.approx(2 * intervals[0], abs=1)


def test_reached_peers_are_listed_with_their_round_trip() -> None:
    finding = bootstraps(CallRound(calls=(THERE,)))
    assert finding.level is Level.OK and "203.0.113.5:4001 in 23 ms" in finding.found


def test_one_of_several_is_enough() -> None:
    finding = bootstraps(CallRound(calls=(GONE, THERE)))
    assert finding.level is Level.WARN and "connection refused" in finding.found


def test_no_peer_was_reached() -> None:
    finding = bootstraps(CallRound(calls=(GONE, replace(GONE, trouble="no route to host"))))
    assert (finding.level, finding.exit_code) == (Level.FAIL, ExitCode.SWARM_UNREACHABLE)
    assert "no route to host" in finding.found
    assert membership(CallRound(calls=(GONE,))).level is Level.SKIP, "which is said once"


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
def test_a_refusal_by_the_run(code: RefusalCode, own: bool, level: Level, exit_code: ExitCode) -> None:
    refused = Call(ADDRESS, refused=Refused(code))
    finding = membership(CallRound(calls=(refused,), under_own_name=own))
    assert (finding.level, finding.exit_code) == (level, exit_code)


def test_acceptance_by_the_run() -> None:
    assert membership(CallRound(calls=(THERE,))).level is Level.OK
