"""Compare what the run needs with what this machine has: memory, disk, shared memory.

The trainer computes the same sums before it starts (peer/trainer/need.py): its errors are findings here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.peer.doctor.finding import Finding, fail, ok, warn
from gossamer.peer.machine.room import Room, container_size, megabytes, summed
from gossamer.peer.machine.runtime_folder import MEMORY_FOLDER, PAYLOAD_BYTES

if TYPE_CHECKING:
    from gossamer.peer.trainer.need import Need

TIGHT_SHARE = 0.8  # of what there is: what else runs on this machine needs some, too
FILES = 1000  # more than a home ever holds


def memory(need: Need, room: Room) -> Finding:
    """Check that the run fits into memory, under every limit that holds here. Raises BadSettings if it does not."""
    from gossamer.peer.trainer.need import need_memory  # torch: slow to import

    need_memory(need, room)
    return _compared(need.memory, room, "close other programs, or raise the limit")


def device_memory(need: Need, room_of_device: Callable[[], Room]) -> Finding:
    """Check that the run fits into the memory of the device, if it has its own. Raises BadSettings if it does not."""
    from gossamer.peer.trainer.need import need_device_memory

    if not need.device:
        return ok("the device has none of its own")
    need_device_memory(need, room := room_of_device())
    return _compared(need.device, room, "end other programs that use it: `nvidia-smi` names them")


def disk(need: Need, room: Room, files: int | None) -> Finding:
    """Check that the home's disk has room for checkpoints; `files`: how many more it can hold, None without a limit. Raises BadSettings."""
    from gossamer.peer.trainer.need import need_disk

    need_disk(need, room)
    if files is not None and files < FILES:
        return fail(
            f"the disk has room for {files} more files only ({room.limit})",
            "delete small files there, or choose --home DIR on another disk",
        )
    return _compared(need.disk, room, "free some space soon: text that is tokenized needs some too")


def shared_memory(need: Need, place: Path, room_of: Callable[[Path], Room]) -> Finding:
    """Check that payloads between node and trainer fit into `place`, and that it is the folder in memory. Raises BadSettings."""
    from gossamer.peer.trainer.need import need_payload_room

    need_payload_room(need, room := room_of(place))
    if place != MEMORY_FOLDER:
        total = sum(need.payloads.values())
        wanted = container_size(2 * max(PAYLOAD_BYTES, total))
        return warn(
            f"{MEMORY_FOLDER} has only {megabytes(room_of(MEMORY_FOLDER).num_bytes)}; payloads ({megabytes(total)}) lie in {place}",
            f"that works, slower where it is a disk; for more, start a container with --shm-size {wanted}",
        )
    return _compared(need.payloads, room, "give it more, a container with --shm-size")


def _compared(parts: Mapping[str, int], room: Room, way_out: str) -> Finding:
    said = f"{megabytes(room.num_bytes)} ({room.limit}); the run needs {summed(parts)}"
    return ok(said) if sum(parts.values()) <= TIGHT_SHARE * room.num_bytes else warn(f"tight: {said}", way_out)
