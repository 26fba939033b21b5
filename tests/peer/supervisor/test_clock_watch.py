"""When the machine's clock counts as set."""

from __future__ import annotations

import time

import pytest

from gossamer.peer.supervisor.clock_watch import ClockWatch


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_sleep_of_the_machine_sets_no_clock(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """The clocks of a Mac: `time.monotonic` stands still meanwhile, CLOCK_MONOTONIC does not; it has no CLOCK_BOOTTIME."""
    slept_s = 0.0
    if system == "macos":
        monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: 100.0 + slept_s)
    monkeypatch.setattr(time, "time", lambda: 1e9 + slept_s)
    watch = ClockWatch()
    slept_s = 3600.0
    assert watch.look() is None
    monkeypatch.setattr(time, "time", lambda: 1e9 + slept_s - 60.0)
    event = watch.look()
    assert event is not None and event.seconds == -60.0 and watch.look() is None
