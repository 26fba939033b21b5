"""What the supervisor records for the next start."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.machine.events import EnergyUsed, Event, MeetingDone, PeerStarted, Warned
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.status import Status, apply
from gossamer.peer.supervisor.housekeeping import LOOK_S, Housekeeping, earlier

Usage = namedtuple("Usage", "total used free")


def look(housekeeping: Housekeeping, status: Status) -> list[Event]:
    return list(housekeeping.look(status))


def test_housekeeping_acts_at_intervals(tmp_path: Path) -> None:
    now = [0.0]
    housekeeping = Housekeeping(Home(tmp_path), lambda: now[0])
    assert not look(housekeeping, Status())
    now[0] = LOOK_S
    assert isinstance(look(housekeeping, Status())[0], EnergyUsed)
    assert not look(housekeeping, Status())


def test_a_full_disk_is_one_warning_that_ends_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, free, status = [0.0], [10], Status()
    monkeypatch.setattr("gossamer.peer.supervisor.housekeeping.shutil.disk_usage", lambda path: Usage(0, 0, free[0]))
    housekeeping, words_at = Housekeeping(Home(tmp_path), lambda: now[0]), []
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
        Housekeeping(home).keep(status)
        assert (earlier(home)["received"], earlier(home)["joined"]) == (received, joined)
    assert (earlier(home)["seconds"], earlier(home)["meetings"]) == (10.0, 2)


def test_a_start_shows_the_last_step_until_the_trainer_reports_also_after_a_start_that_failed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    Housekeeping(home).keep(replace(Status(peer_id="12D3KooX", started=50.0), step=2934, total_steps=5000, tokens=7000, own_steps=700))
    for _ in range(2):  # the second one follows a start that failed before its trainer reported
        status = apply(Status(), PeerStarted("12D3KooX", earlier(home)))
        assert (status.step, status.total_steps, status.tokens, status.own_steps, status.loss) == (2934, 5000, 7000, 700, None)
        Housekeeping(home).keep(status)


@pytest.mark.parametrize("content", ["", "[]", '{"lifetime": 3}', '{"lifetime": {"joined": "x"}}'])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str) -> None:
    home = Home(tmp_path)
    home.status.write_text(content)
    assert earlier(home) == {}
