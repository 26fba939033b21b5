"""Memory, disk and shared memory beside what a run needs: each too small once, and named with its sum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.peer.doctor.finding import Level
from gossamer.peer.doctor.machine_checks import device_memory, disk, memory, shared_memory
from gossamer.peer.machine.room import Room, disk_room
from gossamer.peer.machine.runtime_folder import MEMORY_FOLDER
from gossamer.peer.trainer.need import Need, run_need
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import Manifest
from tests.peer.doctor.cases import case, examined

NEED = run_need(Manifest(), "cpu")
GB = 10**9


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A disk of that size, mounted for real."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "small", str(folder)]
    if os.geteuid() or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount, and not everywhere")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_the_default_run_fits_here(tmp_path: Path) -> None:
    for check in ("memory", "disk"):
        found = examined(check, case(tmp_path / "home"))
        assert found.level is not Level.FAIL and "the run needs" in found.found
    assert not (tmp_path / "home").exists()


def test_too_little_memory_under_a_limit_of_the_process() -> None:
    program = """
import resource, json
from pathlib import Path
from gossamer.peer.trainer import need
from tests.peer.doctor.cases import case, examined
import transformers, psutil
examined("memory", case(Path("/nonexistent")))  # loads what it loads
need.TRAINER_BYTES = 8_000_000_000  # more than this process holds already, whatever is installed beside transformers
most = psutil.Process().memory_info().vms + 150_000_000
resource.setrlimit(resource.RLIMIT_AS, (most, most))
found = examined("memory", case(Path("/nonexistent")))
print(json.dumps([found.level.value, found.found, found.way_out]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    level, found, way_out = json.loads(done.stdout)
    assert level == "fail" and "the limit of a process's address space" in found and "for the programs" in found
    assert way_out


def test_a_memory_limit_of_a_container() -> None:
    with pytest.raises(BadSettings, match="memory limit of this container"):
        memory(NEED, Room(512 * 10**6, "the memory limit of this container or service, 600 MB"))


def test_memory_that_is_just_enough() -> None:
    assert memory(NEED, Room(sum(NEED.memory.values()) + 1, "free")).level is Level.WARN


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as place:
        found = examined("disk", case(place / "home"))
    assert found.level is Level.FAIL and "for checkpoints" in found.found and "--home" in found.way_out


def test_a_disk_without_room_for_files() -> None:
    found = disk(NEED, Room(100 * GB, "free on the disk of /x"), 12)
    assert found.level is Level.FAIL and "12 more files" in found.found


def test_small_shared_memory_as_containers_have_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", 64 << 20) as place:
        in_memory = disk_room(place)
    found = shared_memory(
        NEED, Path("/tmp"), {Path("/tmp"): Room(60 * GB, "free on the disk of /tmp"), MEMORY_FOLDER: in_memory}.__getitem__
    )
    assert found.level is Level.WARN and "67.1 MB" in found.found and "--shm-size 128m" in found.way_out


def test_no_room_for_payloads_anywhere() -> None:
    large = large_payloads()
    with pytest.raises(BadSettings, match="of shared memory") as caught:
        shared_memory(large, MEMORY_FOLDER, lambda place: Room(GB, "free"))
    assert "--shm-size 3815m" in caught.value.hint


def large_payloads() -> Need:
    return replace(NEED, payloads={"for meetings under way": 2 * GB})


def test_too_little_memory_on_the_device() -> None:
    with pytest.raises(BadSettings, match="memory on the device") as caught:
        device_memory(run_need(Manifest(), "cuda"), lambda: Room(10**8, "free on cuda:0"))
    assert "--devices cpu" in caught.value.hint
