"""Checks of this machine: installed versions, devices, limit of open files, and room for what the run needs.

The trainer computes the same sums before it starts (peer/trainer/need.py): its errors are findings here.
"""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gossamer.peer.doctor.finding import Finding, fail, ok, warn
from gossamer.peer.machine.child import own_environment
from gossamer.peer.machine.extras import EXTRAS, PACKAGE
from gossamer.peer.machine.room import Room, container_size, summed
from gossamer.peer.machine.runtime_folder import MEMORY_FOLDER, PAYLOAD_BYTES
from gossamer.peer.machine.units import bytes_text

if TYPE_CHECKING:
    from gossamer.peer.trainer.need import Need

DEVICE_S = 17.0  # for torch to load and to compute
UP = "torch is loaded"  # printed by peer/doctor/matmul.py
RATE = "operations a second: "  # likewise, with the rate
TIGHT_SHARE = 0.8  # of the room; beyond it, other programs would lack memory
FILES = 1000  # more than a home ever holds
OPEN_FILES = 1024  # 64 streams, their sockets on both sides, model files, and room


def requirements() -> tuple[str, Sequence[str]]:
    """Return the Python and the packages that this package requires; nothing if it is not installed."""
    try:
        ours = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "", ()
    return ours.metadata["Requires-Python"] or "", ours.requires or ()


def versions(python: str, requirements: Sequence[str], installed: Callable[[str], str | None]) -> Finding:
    """Check this interpreter and the `installed` packages against the requirements; a package of an extra may be missing."""
    if not python:
        return warn(f"{PACKAGE} is not installed, so its requirements are not known", "`pip install '.[all]'` in its folder")
    if not SpecifierSet(python).contains(platform.python_version(), prereleases=True):
        return fail(f"this is Python {platform.python_version()}; wanted is {python}", "install Gossamer with such a Python")
    all_known = list(map(Requirement, requirements))
    core, extras = _applying(all_known, ""), [one for extra in EXTRAS for one in _applying(all_known, extra)]
    wanted = core + [one for one in extras if one not in core and installed(one.name) is not None]
    wrong = []
    for one in wanted:
        there = installed(one.name)
        if there is None or not one.specifier.contains(there, prereleases=True):
            wrong.append(f"{one.name} is {there or 'missing'}, wanted is {one.specifier}")
    if wrong:
        return fail("; ".join(wrong), "install Gossamer again, into a virtual environment of its own")
    return ok(f"Python {platform.python_version()}, and {len(wanted)} packages as wanted")


def _applying(requirements: Sequence[Requirement], extra: str) -> list[Requirement]:
    return [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": extra})]


def compute_in_child(devices: str) -> tuple[int | None, str]:
    """Have torch compute a known product in a process of its own, as a driver may hang or crash.

    Returns the exit code, None if the process does not end in time, and the output.
    """
    command = [sys.executable, "-P", "-m", "gossamer.peer.doctor.matmul", devices]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_S, check=False, env=own_environment())
    except subprocess.TimeoutExpired as late:
        return None, str(late.stdout or b"", errors="replace")
    return done.returncode, done.stdout + done.stderr


def device_rate(output: str) -> float:
    """Return the operations a second that the process has measured; 0 if it has not come so far."""
    rates = [float(line.removeprefix(RATE)) for line in output.splitlines() if line.startswith(RATE)]
    return rates[0] if rates else 0.0


def device(name: str, code: int | None, output: str) -> Finding:
    """Check how the process that computes on the device ended, and what it printed."""
    lines = output.strip().splitlines() or ["nothing"]
    if code is None and lines[-1] != UP:
        return warn(f"not known: torch did not even load within {DEVICE_S:.0f} s", "try again when the machine is less busy")
    if code is None:
        return fail(f"torch did not compute anything on {name} within {DEVICE_S:.0f} s", "check the driver, or use --devices cpu")
    if code:
        lines = [f"torch died on {name} by signal {-code}"] if code < 0 else lines
        return fail(
            lines[-1], "use --devices auto or --devices cpu; `nvidia-smi`, `rocm-smi` or `xpu-smi` tells whether the driver sees a GPU"
        )
    return ok(lines[-1])


def open_files(most: int) -> Finding:
    """Check how many files and connections one process may have open."""
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return ok("no limit" if most == resource.RLIM_INFINITY else f"{most} at once")
    way_out = f"`ulimit -n {OPEN_FILES}` before the peer starts"
    if most < OPEN_FILES // 4:
        return fail(f"only {most} at once: connections would break", way_out)
    return warn(f"only {most} at once; a peer with many partners may need {OPEN_FILES}", way_out)


def memory(need: Need, room: Room) -> Finding:
    """Check that the run fits into memory, under every limit that holds here. Raises BadSettings if it does not."""
    from gossamer.peer.trainer.need import need_memory  # torch: slow to import

    need_memory(need, room)
    return _compare_with_room(need.memory, room, "close other programs, or raise the limit")


def device_memory(need: Need, room_of_device: Callable[[], Room]) -> Finding:
    """Check that the run fits into the memory of the device, if it has its own. Raises BadSettings if it does not."""
    from gossamer.peer.trainer.need import need_device_memory

    if not need.device:
        return ok("the device has none of its own")
    need_device_memory(need, room := room_of_device())
    return _compare_with_room(need.device, room, "end other programs that use it: `nvidia-smi` or its like names them")


def disk(need: Need, room: Room, files: int | None) -> Finding:
    """Check that the home's disk has room for checkpoints; `files`: how many more it can hold, None without a limit. Raises BadSettings."""
    from gossamer.peer.trainer.need import need_disk

    need_disk(need, room)
    if files is not None and files < FILES:
        return fail(
            f"the disk has room for {files} more files only ({room.limit})",
            "delete small files there, or choose --home DIR on another disk",
        )
    return _compare_with_room(need.disk, room, "free some space soon: text that is tokenized needs some too")


def shared_memory(need: Need, place: Path, room_of: Callable[[Path], Room]) -> Finding:
    """Check that payloads between node and trainer fit into `place`, and that it is the folder in memory. Raises BadSettings."""
    from gossamer.peer.trainer.need import need_payload_room

    need_payload_room(need, room := room_of(place))
    if place != MEMORY_FOLDER:
        total = sum(need.payloads.values())
        wanted = container_size(2 * max(PAYLOAD_BYTES, total))
        return warn(
            f"{MEMORY_FOLDER} has only {bytes_text(room_of(MEMORY_FOLDER).num_bytes)}; payloads ({bytes_text(total)}) lie in {place}",
            f"that works, slower where it is a disk; for more, start a container with --shm-size {wanted}",
        )
    return _compare_with_room(need.payloads, room, "give it more, a container with --shm-size")


def _compare_with_room(parts: Mapping[str, int], room: Room, way_out: str) -> Finding:
    sentence = f"{bytes_text(room.num_bytes)} ({room.limit}); the run needs {summed(parts)}"
    return ok(sentence) if sum(parts.values()) <= TIGHT_SHARE * room.num_bytes else warn(f"tight: {sentence}", way_out)
