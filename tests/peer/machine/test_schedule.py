"""Windows of the week by local time, over midnight and over changes of the clocks."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from gossamer.peer.machine.schedule import Schedule

BERLIN = ZoneInfo("Europe/Berlin")  # clocks go forward on 2026-03-29 at 02:00, back on 2026-10-25 at 03:00


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def schedule(text: str) -> Schedule:
    return Schedule.from_text(text, BERLIN)


def allowed(text: str, *moments: str) -> list[bool]:
    return [schedule(text).allows(at(moment)) for moment in moments]


def test_always_never_changes() -> None:
    assert schedule("always").allows(0.0)
    assert schedule("always").changes_s(0.0) is None
    assert schedule("00:00-24:00").changes_s(0.0) is None


def test_a_window_over_midnight() -> None:
    moments = ["2026-11-22 21:59", "2026-11-22 22:00", "2026-11-23 00:00", "2026-11-23 06:59", "2026-11-23 07:00"]
    assert allowed("22:00-07:00", *moments) == [False, True, True, True, False]


def test_a_window_belongs_to_the_day_on_which_it_begins() -> None:
    friday_night = ["2026-11-20 23:00", "2026-11-21 06:00"]
    sunday_night = ["2026-11-22 23:00", "2026-11-23 06:00"]
    assert allowed("mon-fri 22:00-07:00", *friday_night, *sunday_night) == [True, True, False, False]
    assert allowed("sun 22:00-07:00", *friday_night, *sunday_night) == [False, False, True, True]


def test_several_windows_and_a_week_that_turns_over() -> None:
    moments = ["2026-11-20 12:00", "2026-11-21 12:00", "2026-11-22 12:00", "2026-11-23 12:00", "2026-11-24 12:00", "2026-11-24 23:00"]
    assert allowed("sat-mon 00:00-24:00, tue 22:00-23:30", *moments) == [False, True, True, True, False, True]


def test_when_it_changes_next() -> None:
    night = schedule("22:00-07:00")
    assert night.changes_s(at("2026-11-22 12:00:30")) == at("2026-11-22 22:00")
    assert night.changes_s(at("2026-11-22 22:00")) == at("2026-11-23 07:00")
    assert schedule("sat 10:00-12:00").changes_s(at("2026-11-21 12:00")) == at("2026-11-28 10:00")


def test_clocks_put_forward_make_a_night_shorter_and_back_longer() -> None:
    night = schedule("22:00-07:00")
    assert night.changes_s(at("2026-03-28 22:00")) == at("2026-03-28 22:00") + 8 * 3600
    assert night.changes_s(at("2026-10-24 22:00")) == at("2026-10-24 22:00") + 10 * 3600
    assert schedule("02:10-02:50").changes_s(at("2026-03-29 00:00")) == at("2026-03-30 02:10")  # a time that this night does not have


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("22-7", "write it like"),
        ("22:00-25:00", "ends at 24:00"),
        ("22:70-23:00", "no time 22:70"),
        ("8:00-8:00", "00:00-24:00"),
        ("fry 8:00-9:00", "did you mean fri"),
        ("", "write it like"),
        ("nightly", "write it like"),
    ],
)
def test_an_invalid_schedule_is_refused_with_a_hint(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        schedule(text)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("always", 24.0),
        ("22:00-07:00", 9.0),
        ("sat-sun 00:00-24:00", 48 / 7),
        ("mon-fri 22:00-02:00, sat 00:00-24:00", 42 / 7),
        ("08:00-10:00, 09:00-11:00", 3.0),
    ],
)
def test_the_hours_of_a_day_count_overlaps_once(text: str, hours: float) -> None:
    assert Schedule.from_text(text).hours_a_day == pytest.approx(hours)
