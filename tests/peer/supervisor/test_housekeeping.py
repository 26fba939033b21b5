"""What the supervisor records for the next start."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.machine.events import EnergyUsed, Event, MeetingDone, PeerStarted, Warned
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor.housekeeping import LOOK_S, Housekeeping, earlier
from tests.full_disk import room_for

Usage = namedtuple("Usage", "total used free")


def look(housekeeping: Housekeeping, status: Status) -> list[Event]:
    return list(housekeeping.look(status))


def keep(home: Home, status: Status) -> None:
    Housekeeping(home, lambda: {home.status: status.to_json()}).keep()


def nothing() -> dict[Path, object]:
    return {}


def test_housekeeping_acts_at_intervals_whatever_the_clock_is_set_to(tmp_path: Path) -> None:
    now, home = [0.0], Home(tmp_path)
    housekeeping = Housekeeping(home, lambda: {home.status: now, home.traffic: 5}, lambda: now[0])
    assert not look(housekeeping, Status()) and not home.status.exists()
    now[0] = LOOK_S
    assert isinstance(look(housekeeping, Status())[0], EnergyUsed)
    now[0] += 1.0
    assert not look(housekeeping, Status())
    assert [json.loads(file.read_text()) for file in (home.status, home.traffic)] == [[LOOK_S], 5]
    assert home.status.stat().st_mode & 0o077 == 0


def test_a_full_disk_loses_the_records_and_nothing_else(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with room_for(0):
        Housekeeping(home, lambda: {home.status: {}, home.run: {}}).keep()
    assert not home.status.exists()


def test_a_full_disk_is_one_warning_that_ends_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, free, status = [0.0], [10], Status()
    monkeypatch.setattr("gossamer.peer.supervisor.housekeeping.shutil.disk_usage", lambda path: Usage(0, 0, free[0]))
    housekeeping, words_at = Housekeeping(Home(tmp_path), nothing, lambda: now[0]), []
    for bytes_free in (900_000_000, 899_000_000, 400_000_000, 1 << 40):
        now[0] += LOOK_S
        free[0] = bytes_free
        events = look(housekeeping, status)
        words_at.append([event.words for event in events if isinstance(event, Warned)])
        for event in events:
            status = apply(status, event)
    assert [len(words) for words in words_at] == [1, 0, 1, 1], "again when half of it is left, not each time that some bytes are written"
    assert "nearly full" in words_at[0][0] and "less than 537 MB are free" in words_at[2][0] and not words_at[3][0]
    assert not status.warnings


def test_the_next_start_counts_on(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert earlier(home) == {}
    for joined, received in ((100.0, 20), (100.0, 40)):
        status = apply(Status(), PeerStarted("12D3KooX", earlier(home), ts=joined + received))
        if not earlier(home):
            status = apply(Status(), PeerStarted("12D3KooX", ts=joined))
        status = apply(status, MeetingDone("a", 0, "completed", "", "libp2p", 10, 20, 0.5, ts=status.started + 5))
        keep(home, status)
        assert (earlier(home)["received"], earlier(home)["joined"]) == (received, joined)
    assert (earlier(home)["seconds"], earlier(home)["meetings"]) == (10.0, 2)


def test_a_start_shows_the_last_step_until_the_trainer_reports_also_after_a_start_that_failed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    keep(home, replace(Status(peer_id="12D3KooX", started=50.0), step=2934, total_steps=5000, tokens=7000, own_steps=700))
    for _ in range(2):  # the second one follows a start that failed before its trainer reported
        status = apply(Status(), PeerStarted("12D3KooX", earlier(home)))
        assert (status.step, status.total_steps, status.tokens, status.own_steps, status.loss) == (2934, 5000, 7000, 700, None)
        keep(home, status)


@pytest.mark.parametrize("content", ["", "[]", '{"lifetime": 3}', '{"lifetime": {"joined": "x"}}'])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str) -> None:
    home = Home(tmp_path)
    home.status.write_text(content)
    assert earlier(home) == {}
