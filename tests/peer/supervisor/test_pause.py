"""What the settings ask for at a moment, in words with a way out; and when a machine counts as idle."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import psutil

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.supervisor.pauses import LAST_PAUSE, asked_pause, memory_pause, refused_pause, ruled_pause
from gossamer.peer.supervisor.surroundings import CALM_S, MEASURE_S, CachedReading, Idleness, Lookout, Surroundings, others_cpu_s

NOON_S = datetime(2026, 11, 22, 12, 0).timestamp()  # a Sunday, local time
CALM = Surroundings()


def test_default_settings_require_no_pause() -> None:
    assert ruled_pause(LocalSettings(), NOON_S, Surroundings(is_on_battery=True, cores_of_others=3.0)) is None


def test_every_rest_has_a_reason_a_way_out_and_its_end_where_it_is_known() -> None:
    two_hours = asked_pause(NOON_S, 7200.0)
    assert (two_hours.reason, two_hours.until_s) == ("paused by the operator until 14:00", NOON_S + 7200)
    night = ruled_pause(LocalSettings(schedule="22:00-07:00"), NOON_S, CALM)
    assert night is not None
    assert (night.reason, night.until_s) == ("the schedule 22:00-07:00 says so until 22:00", NOON_S + 36000)
    friday = ruled_pause(LocalSettings(schedule="fri 08:00-09:00"), NOON_S, CALM)
    assert friday is not None and friday.reason.endswith("until Fri 27 Nov, 08:00")
    battery = ruled_pause(LocalSettings(not_on_battery=True), NOON_S, Surroundings(is_on_battery=True))
    others = ruled_pause(LocalSettings(only_idle=True), NOON_S, Surroundings(cores_of_others=2.34))
    assert others is not None and "2.3 of its processor cores" in others.reason
    disk = ruled_pause(LocalSettings(max_disk="1 GB"), NOON_S, Surroundings(home_bytes=1_400_000_000))
    assert disk is not None and "takes 1.4 GB of the disk, and may take 1 GB" in disk.reason
    memory = memory_pause(LocalSettings(max_memory="1 GB"), Surroundings(held_bytes=1_400_000_000))
    assert memory is not None and "held 1.4 GB of memory, and may hold 1 GB" in memory.reason
    assert memory_pause(LocalSettings(), Surroundings(held_bytes=1 << 50)) is None
    for rest in (two_hours, asked_pause(NOON_S, None), night, battery, others, disk, memory, refused_pause("why", "how"), LAST_PAUSE):
        assert rest is not None and rest.reason and rest.way_out.startswith("ends ")


def test_a_machine_is_in_use_at_once_and_idle_after_minutes_of_calm() -> None:
    idleness, now_s, used_s = Idleness(num_cores=4), 0.0, 1000.0

    def pass_time(seconds: float, cores: float) -> float:
        nonlocal now_s, used_s
        until_s = now_s + seconds
        while now_s < until_s:
            now_s, used_s = now_s + MEASURE_S, used_s + cores * MEASURE_S
            assert idleness.is_due(now_s)
            idleness.read(now_s, used_s)
        return idleness.cores_of_others

    idleness.read(now_s, used_s)
    assert pass_time(60.0, 0.3) == 0.0
    assert pass_time(MEASURE_S, 2.0) == 2.0
    assert pass_time(CALM_S - MEASURE_S, 0.3) == 2.0
    assert pass_time(MEASURE_S, 1.5) == 1.5
    assert pass_time(CALM_S, 0.3) == 0.0


def test_a_tenth_of_a_large_machine_may_be_used() -> None:
    assert (Idleness(2).allowed_cores, Idleness(64).allowed_cores) == (0.5, 6.4)


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    assert 0 < others_cpu_s() < sum(psutil.cpu_times())
    (tmp_path / "file").write_bytes(bytes(1000))
    lookout = Lookout(tmp_path)
    assert lookout.look(LocalSettings()) == CALM, "what nobody asks for is not looked at"
    seen = lookout.look(LocalSettings(only_idle=True, not_on_battery=True, max_memory="1 GB", max_disk="1 GB"))
    assert seen.cores_of_others == 0.0, "one reading says nothing"
    assert seen.held_bytes > 10_000_000
    assert seen.home_bytes == 1000


def test_a_slow_measurement_is_repeated_only_after_its_interval() -> None:
    measured: list[int] = []
    seldom = CachedReading(30.0, lambda: measured.append(1) or len(measured))  # type: ignore[func-returns-value]
    assert [seldom.read(now_s) for now_s in (5.0, 20.0, 35.0, 40.0)] == [1, 1, 2, 2]
