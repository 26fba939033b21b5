"""What the settings ask for at a moment, in words with a way out; and when a machine counts as idle."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from gossamer.peer.machine.config import LocalSettings
from gossamer.peer.supervisor.pauses import LAST_PAUSE, asked_pause, memory_pause, refused_pause, ruled_pause
from gossamer.peer.supervisor.polled_command import COMMAND_S, MOST_OUTPUT_BYTES, PolledCommand
from gossamer.peer.supervisor.surroundings import (
    ASK_S,
    CALM_S,
    HEAT_S,
    MEASURE_S,
    CachedReading,
    Idleness,
    Lookout,
    Surroundings,
    Thermometer,
    others_cpu_s,
)
from tests.clock import Clock
from tests.peer.waiting import wait_until

NOON_S = datetime(2026, 11, 22, 12, 0).timestamp()  # a Sunday, local time
CALM = Surroundings()


def test_default_settings_require_no_pause() -> None:
    assert ruled_pause(LocalSettings(), NOON_S, Surroundings(is_on_battery=True, cores_of_others=3.0)) is None


def test_every_rest_has_a_reason_a_way_out_and_its_end_where_it_is_known() -> None:
    two_hours = asked_pause(NOON_S, 7200.0)
    assert (two_hours.reason, two_hours.until_s) == ("paused by the operator until 14:00", NOON_S + 7200)
    night = ruled_pause(LocalSettings(schedule="22:00-07:00"), NOON_S, CALM)
    assert night is not None
    assert night.reason == "outside the hours of the schedule 22:00-07:00 until 22:00"
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
    hot = ruled_pause(LocalSettings(pause_above_temperature=80), NOON_S, Surroundings(too_hot="a GPU has 84 C"))
    assert hot is not None and hot.reason == "a GPU has 84 C, more than 80 C" and "cooled to 75 C" in hot.way_out
    asked = ruled_pause(LocalSettings(pause_when="test -e game"), NOON_S, Surroundings(says_pause=True))
    assert asked is not None and asked.reason == "the command `test -e game` asks for it"
    for rest in (
        hot,
        asked,
        two_hours,
        asked_pause(NOON_S, None),
        night,
        battery,
        others,
        disk,
        memory,
        refused_pause("why", "how"),
        LAST_PAUSE,
    ):
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


def polled(command: PolledCommand, words: Sequence[str], now_s: float, is_seen: Callable[[], object]) -> None:
    """Poll a command at one time until its end is seen."""

    def look() -> object:
        command.poll(words, now_s)
        return is_seen()

    wait_until(look, "end of the command")


def test_a_command_of_the_operator_is_asked_again_and_again(tmp_path: Path) -> None:
    command, flag = PolledCommand(ASK_S), tmp_path / "game"
    words = ("test", "-e", str(flag))
    polled(command, words, 0.0, lambda: command.code == 1)
    flag.touch()
    command.poll(words, ASK_S - 1.0)
    assert (command.code, command.failure) == (1, ""), "it is not asked again so soon"
    polled(command, words, ASK_S, lambda: command.code == 0)
    assert command.failure == ""
    polled(command, ("/nowhere/at/all",), 2 * ASK_S, lambda: command.failure)
    assert command.code is None and "No such file" in command.failure


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_command_that_hangs_is_killed_with_its_children_and_waited_for_by_nobody(tmp_path: Path) -> None:
    command, ids = PolledCommand(ASK_S), tmp_path / "ids"
    command.poll(("sh", "-c", f"sleep 1000 & echo $$ $! > {ids}; sleep 1000"), 0.0)
    wait_until(lambda: ids.exists() and ids.read_text().endswith("\n"), "command and its child")
    processes = [psutil.Process(int(word)) for word in ids.read_text().split()]
    command.poll((), COMMAND_S)
    assert not any(map(has_ended, processes)) and command.failure == ""
    command.poll((), COMMAND_S + 1.0)
    assert command.failure == "it took longer than 30 s"
    wait_until(lambda: all(map(has_ended, processes)), "end of both")
    command.close()


def test_a_command_that_prints_much_or_leaves_a_child_behind_is_read_at_once() -> None:
    command = PolledCommand(ASK_S)
    polled(command, ("sh", "-c", "echo $$; yes | head -c 200000; sleep 1000 & exit 1"), 0.0, lambda: command.code is not None)
    assert (command.code, len(command.output), command.failure) == (1, MOST_OUTPUT_BYTES, "")
    os.killpg(int(command.output.split()[0]), signal.SIGKILL)  # the child is still there: nobody has waited for it


def test_what_a_run_printed_before_the_one_that_failed_is_forgotten(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho 95\n")
    tool.chmod(0o755)
    thermometer = Thermometer(lambda: None, tool=(str(tool),))
    assert wait_until(lambda: thermometer.look(80, 0.0), "temperature") == "a GPU has 95 C"
    tool.unlink()
    assert thermometer.look(80, ASK_S) == "" and thermometer.is_blind


def test_another_command_starts_without_the_answer_of_the_one_before(tmp_path: Path) -> None:
    lookout = Lookout(tmp_path)
    wait_until(lambda: lookout.look(LocalSettings(pause_when="true")).says_pause, "pause")
    assert not lookout.look(LocalSettings(pause_when="sleep 1000")).says_pause
    lookout.close()


def test_what_a_command_says_pauses_and_what_it_cannot_say_is_a_warning(tmp_path: Path) -> None:
    clock, flag = Clock(), tmp_path / "game"
    lookout = Lookout(tmp_path, clock)

    def says_pause(command: str) -> bool:
        return lookout.look(LocalSettings(pause_when=command)).says_pause

    def warning(command: str) -> str:
        return "" if says_pause(command) else lookout.warnings["pause_when"]

    flag.touch()
    while_it_is_there = shlex.join(("test", "-e", str(flag)))
    wait_until(lambda: says_pause(while_it_is_there), "pause")
    flag.unlink()
    clock.now_s += ASK_S
    wait_until(lambda: not says_pause(while_it_is_there), "end of the pause")
    assert lookout.warnings["pause_when"] == ""
    fault = wait_until(lambda: warning("sh -c 'exit 3'"), "warning")
    assert fault == "pause_when has no effect: it exits with 3; 0 pauses, 1 trains"
    assert "pause_when has no effect" in warning("/nowhere/at/all")
    assert not says_pause("") and lookout.warnings["pause_when"] == ""


def test_a_machine_that_was_too_hot_must_cool_down() -> None:
    degrees = 70.0
    thermometer = Thermometer(lambda: degrees, tool=("false",))
    found = []
    for number, degrees in enumerate((70.0, 81.0, 79.0, 75.0, 76.0, 81.0)):  # noqa: B007 (the sensor reads it)
        found.append(thermometer.look(80, number * HEAT_S) != "")
    assert found == [False, True, True, False, False, True]
    thermometer.close()


def test_the_hottest_gpu_counts_and_no_reading_is_said() -> None:
    tool = ("printf", "61, 40.1, 300.00\\n84, 60.0, 300.00\\n7, 9, 9\\n")
    hot = Thermometer(lambda: 50.0, tool=tool)
    assert wait_until(lambda: hot.look(80, 0.0), "temperature") == "a GPU has 84 C" and not hot.is_blind
    blind = Thermometer(lambda: None, tool=("/nowhere/at/all",))
    assert blind.look(80, 0.0) == "" and blind.is_blind


def test_a_slow_measurement_is_repeated_only_after_its_interval() -> None:
    measured: list[int] = []
    seldom = CachedReading(30.0, lambda: measured.append(1) or len(measured))  # type: ignore[func-returns-value]
    assert [seldom.read(now_s) for now_s in (5.0, 20.0, 35.0, 40.0)] == [1, 1, 2, 2]
