"""Watt-hours: measured where counters are there, an estimate that says so where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.peer.machine.energy import CORE_WATTS, ESTIMATED, MEASURED, EnergyMeter, Packages, battery_watts, busy_cpu_s


def zone(folder: Path, name: str, energy_uj: int) -> Path:
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "energy_uj").write_text(f"{energy_uj}\n")
    (place / "max_energy_range_uj").write_text("10000000\n")
    return place


def test_packages_are_summed_up_and_run_over(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 9_000_000)
    zone(tmp_path, "intel-rapl:1", 1_000_000)
    zone(tmp_path, "intel-rapl:0:0", 0)  # a part of the first: counted there already
    (zone(tmp_path, "intel-rapl:2", 0) / "name").write_text("psys\n")  # the whole machine, with both packages
    packages = Packages(tmp_path)
    zone(tmp_path, "intel-rapl:0", 1_000_000)  # began anew at 10 J
    zone(tmp_path, "intel-rapl:1", 4_000_000)
    zone(tmp_path, "intel-rapl:0:0", 5_000_000)
    zone(tmp_path, "intel-rapl:2", 9_000_000)
    assert packages.joules() == pytest.approx(2.0 + 3.0)
    assert packages.joules() == 0.0


def test_energy_is_estimated_without_counters(tmp_path: Path) -> None:
    meter = EnergyMeter(Packages(tmp_path), tmp_path)
    meter.look(3600.0, 3600.0)
    assert (meter.how, meter.watt_hours) == (ESTIMATED, CORE_WATTS)


def test_the_peers_part_is_its_share_of_what_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", 0)
    used = [0.0]
    monkeypatch.setattr("gossamer.peer.machine.energy.busy_cpu_s", lambda: used[0])
    meter = EnergyMeter(Packages(tmp_path), tmp_path)
    zone(tmp_path, "intel-rapl:0", 7_200_000)
    used[0] = 40.0
    meter.look(10.0, 30.0)
    assert meter.how == MEASURED
    assert meter.watt_hours == pytest.approx(7.2 / 3600 * 10 / 40)


@pytest.mark.parametrize(("status", "watts"), [("Discharging", 12.5), ("Charging", None)])
def test_battery_power_is_reported_while_it_is_used(tmp_path: Path, status: str, watts: float | None) -> None:
    battery = tmp_path / "BAT0"
    battery.mkdir()
    (battery / "status").write_text(f"{status}\n")
    (battery / "power_now").write_text("12500000\n")
    assert battery_watts(tmp_path) == watts


def test_this_machine_has_used_some_time() -> None:
    assert busy_cpu_s() > 0
