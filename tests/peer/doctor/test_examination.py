"""All checks together: their order, their end, and what becomes of one that fails or hangs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gossamer.peer.doctor.case import Case, cached
from gossamer.peer.doctor.examination import examine, exit_code
from gossamer.peer.doctor.finding import Finding, Level, fail, ok, warn
from gossamer.protocol.errors import ExitCode, SwarmUnreachable
from tests.peer.doctor.cases import case


def fine(case: Case) -> Finding:
    return ok("fine")


def quite_lost(case: Case) -> Finding:
    raise SwarmUnreachable("nobody is there", hint="look elsewhere")


def unreadable(case: Case) -> Finding:
    raise PermissionError(13, "Permission denied", "/srv/x")


def buggy(case: Case) -> Finding:
    return ok(str(1 // 0))


def test_findings_come_in_the_order_of_the_checks(tmp_path: Path) -> None:
    found = list(examine(case(tmp_path), {"lost": quite_lost, "fine": fine, "unreadable": unreadable, "buggy": buggy}))
    assert [name for name, _ in found] == ["lost", "fine", "unreadable", "buggy"]
    assert found[0][1] == fail("nobody is there", "look elsewhere", ExitCode.SWARM_UNREACHABLE)
    assert found[1][1] == ok("fine")
    assert "/srv/x: Permission denied" in found[2][1].found
    assert found[3][1].exit_code is ExitCode.OUR_FAULT


def test_a_hanging_check_does_not_delay_the_others(tmp_path: Path) -> None:
    over = threading.Event()

    def hangs(case: Case) -> Finding:
        over.wait()
        return ok("at last")

    found = dict(examine(case(tmp_path), {"hangs": hangs, "fine": fine}, limit_s=0.2))
    over.set()
    assert found["fine"].level is Level.OK
    assert found["hangs"].level is Level.WARN and "not known" in found["hangs"].found


def test_the_first_that_failed_decides_the_exit_code() -> None:
    assert exit_code([ok(""), warn("", "x")]) is ExitCode.DONE
    assert exit_code([warn("", "x"), fail("", "x", ExitCode.SWARM_UNREACHABLE), fail("", "x")]) is ExitCode.SWARM_UNREACHABLE


def test_a_shared_fact_is_computed_once() -> None:
    asked: list[int] = []
    answer = cached(lambda: asked.append(1))
    for thread in (threads := [threading.Thread(target=answer) for _ in range(4)]):
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [1]


def test_a_failed_fact_is_not_computed_again() -> None:
    asked: list[int] = []

    def breaks() -> None:
        asked.append(1)
        raise ValueError

    answer = cached(breaks)
    for _ in range(2):
        with pytest.raises(ValueError):
            answer()
    assert asked == [1]
