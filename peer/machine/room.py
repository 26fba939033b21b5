"""Free memory and disk space for a peer, under every limit of the machine, container and process."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import UNLIMITED, bytes_text, size_bytes
from gossamer.protocol.errors import BadSettings

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
TRAINER_BYTES = 380_000_000  # Python, torch, transformers, the built-in text
OTHERS_BYTES = 170_000_000  # supervisor, node and p2pd; what several map counts once


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes, and the limit that sets them."""

    num_bytes: int
    limit: str
    setting: str = ""  # of the peer, if that is the limit


def container_size(num_bytes: float) -> str:
    """Return a number of bytes as container engines take it in options."""
    return f"{math.ceil(num_bytes / 2**20)}m"


def summed(parts: Mapping[str, int]) -> str:
    """Return a sum and its parts as text."""
    return f"{bytes_text(sum(parts.values()))}: {listed(parts)}"


def listed(parts: Mapping[str, int]) -> str:
    """Return the parts of a sum as text, the largest first, without parts below the rounding."""
    total = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return " + ".join(f"{bytes_text(size)} {what}" for what, size in largest if size > 0.005 * total)


def need_program_memory(trains: bool, room: Room) -> None:
    """Raise BadSettings if memory does not suffice to load a peer's programs. What the run needs is checked later, from the manifest."""
    parts = {"for the programs that reach others": OTHERS_BYTES} | ({"for the one that trains": TRAINER_BYTES} if trains else {})
    more = "give it more, and room for the model beside: a container with --memory 1g holds a small one" if trains else "give it that much"
    need_room("memory", parts, room, more, "a peer")


def need_room(what: str, parts: Mapping[str, int], room: Room, more: str, whose: str, less: str = "") -> None:
    """Raise BadSettings, with the sum, if these parts of `whose` do not fit.

    Its hint: `more`, how to give it more, or the peer's setting that is the limit; then `less`, what would need less.
    """
    total = sum(parts.values())
    if total > room.num_bytes:
        more = f"raise {room.setting} to {math.ceil(total / 1e6)} MB or more" if room.setting else more
        raise BadSettings(
            f"{whose} needs {bytes_text(total)} of {what}, and there are {bytes_text(max(0, room.num_bytes))} ({room.limit}); "
            f"it needs {listed(parts)}",
            hint=f"{more}; {less}" if less else more,
        )


def at_most(room: Room, size: str, setting: str) -> Room:
    """Return the room as far as a setting with this size allows."""
    allowed = size_bytes(size)
    return room if room.num_bytes <= allowed else Room(int(allowed), f"the setting {setting} = {size}", setting)


def memory_room(held_bytes: int, max_memory: str = UNLIMITED) -> Room:
    """Return the memory that a peer may use, with this setting; `held_bytes` is what the peer, or the calling process, already uses."""
    rooms = [Room(psutil.virtual_memory().available + held_bytes, "free memory of this machine")]
    rooms += cgroup_rooms(MEMBERSHIP.read_text if MEMBERSHIP.exists() else str, held_bytes)
    process = psutil.Process().memory_info()
    for name, limit in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            rooms.append(Room(most - process.vms + process.rss, f"the limit of a process's {name}, {bytes_text(most)}"))
    return at_most(min(rooms, key=lambda room: room.num_bytes), max_memory, "max_memory")


def held_bytes(pid: int) -> int:
    """Return the memory of a process and its children, shared pages counted once; of those that have ended, none."""
    total, tree = 0, list[psutil.Process]()
    with suppress(psutil.Error):
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in tree:
        with suppress(psutil.Error):
            held = process.memory_full_info()
            total += int(getattr(held, "pss", held.uss))  # only Linux divides what is shared
    return total


def cgroup_rooms(membership: Callable[[], str], held_bytes: int, root: Path = CGROUPS) -> Iterator[Room]:
    """Yield what each control group above this process leaves, what is held already included; `membership` reads /proc/self/cgroup."""
    for line in membership().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _rooms(root, path, held_bytes, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _rooms(root / "memory", path, held_bytes, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _rooms(root: Path, path: str, held_bytes: int, limit: str, used: str, reclaimable: str) -> Iterator[Room]:
    """Yield the rooms from the group up to the root: in a container the own group may be seen as the root."""
    group = root / path.strip("/")
    for folder in dict.fromkeys((group, *group.parents, root)):
        if not folder.is_relative_to(root):
            break
        try:
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())  # "max": no number
            cached = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines()).get(reclaimable, "0")
        except (OSError, ValueError):
            continue
        if most < psutil.virtual_memory().total:
            left = min(most, most - now + int(cached) + held_bytes)  # some held memory may count in another group
            yield Room(left, f"the memory limit of this container or service, {bytes_text(most)}")


def disk_room(path: Path) -> Room:
    """Return what is free on the disk where `path` is or would be."""
    place, found = _disk_of(path)
    return Room(found.f_bavail * found.f_frsize, f"free on the disk of {place}")


def home_room(home: Home, max_disk: str = UNLIMITED) -> Room:
    """Return what checkpoints and downloads of a home may take, with this setting: what they take already, and what is free."""
    kept, free = size_of(home.checkpoints) + size_of(home.downloads), disk_room(home.path)
    return at_most(Room(free.num_bytes + kept, free.limit), max_disk, "max_disk")


def free_files(path: Path) -> int | None:
    """Return how many files more the disk of `path` can hold, None where it does not count them."""
    _, found = _disk_of(path)
    return found.f_favail if found.f_files else None


def _disk_of(path: Path) -> tuple[Path, os.statvfs_result]:
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    return place, os.statvfs(place)


def size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder, of which some may be replaced meanwhile or out of reach; 0 where there is none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(place, name).stat().st_size
    return total
