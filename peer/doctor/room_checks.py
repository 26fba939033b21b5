"""What the run needs, beside what there is: memory, disk, shared memory. The sums are the trainer's own (peer/trainer/need.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.peer.doctor.case import Case
from gossamer.peer.doctor.finding import Finding, fail, ok, warn
from gossamer.peer.machine.room import Room, container_size, disk_room, free_files, held_bytes, home_room, megabytes, memory_room, summed
from gossamer.peer.machine.runtime_folder import MEMORY_FOLDER, PAYLOAD_BYTES, place_for

if TYPE_CHECKING:
    from gossamer.peer.trainer.need import Need

TIGHT_SHARE = 0.8  # of what there is: what else runs on this machine needs some, too
FILES = 1000  # more than a home ever holds


def memory(case: Case) -> Finding:
    """Check that the run fits into memory, under every limit that holds here."""
    return memory_facts(case.need(), memory_room(held_bytes(os.getpid())))


def memory_facts(need: Need, room: Room) -> Finding:
    """Judge the memory that there is."""
    from gossamer.peer.trainer.need import need_memory  # torch: slow to import

    need_memory(need, room)
    return _compared(need.memory, room, "close other programs, or raise the limit")


def device_memory(case: Case) -> Finding:
    """Check that the run fits into the memory of the device."""
    need = case.need()
    return device_memory_facts(need, case.device_room()) if need.device else ok("the device has none of its own")


def device_memory_facts(need: Need, room: Room) -> Finding:
    """Judge the memory of the device."""
    from gossamer.peer.trainer.need import need_device_memory

    need_device_memory(need, room)
    return _compared(need.device, room, "end other programs that use it: `nvidia-smi` names them")


def disk(case: Case) -> Finding:
    """Check that the home's disk has room for checkpoints."""
    return disk_facts(case.need(), home_room(case.home), free_files(case.home.path))


def disk_facts(need: Need, room: Room, files: int | None) -> Finding:
    """Judge the space, and the number of files, that the disk has left."""
    from gossamer.peer.trainer.need import need_disk

    need_disk(need, room)
    if files is not None and files < FILES:
        return fail(
            f"the disk has room for {files} more files only ({room.limit})",
            "delete small files there, or choose --home DIR on another disk",
        )
    return _compared(need.disk, room, "free some space soon: text that is tokenized needs some too")


def shared_memory(case: Case) -> Finding:
    """Check that what node and trainer exchange finds room, in memory if it can be."""
    place = place_for(PAYLOAD_BYTES, case.home.path if case.home.path.exists() else None)
    return shared_memory_facts(case.need(), place, disk_room(place), disk_room(MEMORY_FOLDER))


def shared_memory_facts(need: Need, place: Path, room: Room, in_memory: Room) -> Finding:
    """Judge the place where payloads would lie, and the folder in memory where they should."""
    from gossamer.peer.trainer.need import need_payload_room

    need_payload_room(need, room)
    if place != MEMORY_FOLDER:
        total = sum(need.payloads.values())
        wanted = container_size(2 * max(PAYLOAD_BYTES, total))
        return warn(
            f"{MEMORY_FOLDER} has only {megabytes(in_memory.num_bytes)}; payloads ({megabytes(total)}) lie in {place}",
            f"that works, slower where it is a disk; for more, start a container with --shm-size {wanted}",
        )
    return _compared(need.payloads, room, "give it more, a container with --shm-size")


def _compared(parts: Mapping[str, int], room: Room, way_out: str) -> Finding:
    said = f"{megabytes(room.num_bytes)} ({room.limit}); the run needs {summed(parts)}"
    return ok(said) if sum(parts.values()) <= TIGHT_SHARE * room.num_bytes else warn(f"tight: {said}", way_out)
