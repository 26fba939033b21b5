"""How much room there is: the tightest limit counts, and is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gossamer.peer.machine.room import (
    Room,
    at_most,
    cgroup_rooms,
    disk_room,
    free_files,
    held_bytes,
    memory_room,
    need_program_memory,
    need_room,
    size_of,
    summed,
)
from gossamer.protocol.errors import BadSettings

GB = 10**9


def group(folder: Path, **files: object) -> None:
    """Make a control group as the kernel shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_a_memory_limit_of_the_second_kind(tmp_path: Path) -> None:
    group(tmp_path / "a", memory__max=GB, memory__current=GB // 2, memory__stat=f"anon 7\ninactive_file {GB // 10}")
    group(tmp_path / "a" / "b", memory__max="max", memory__current=5, memory__stat="inactive_file 0")
    rooms = list(cgroup_rooms(lambda: "0::/a/b\n", 0, tmp_path))
    assert [room.num_bytes for room in rooms] == [GB // 2 + GB // 10]
    assert "container" in rooms[0].limit and "1.0 GB" in rooms[0].limit


def test_a_memory_limit_of_the_first_kind(tmp_path: Path) -> None:
    files = {"memory__limit_in_bytes": GB, "memory__usage_in_bytes": GB // 4, "memory__stat": "total_inactive_file 0"}
    group(tmp_path / "memory" / "docker", **files)
    assert [room.num_bytes for room in cgroup_rooms(lambda: "3:cpuset:/\n4:memory:/docker\n", GB // 8, tmp_path)] == [GB * 7 // 8]


def test_in_a_container_the_own_group_is_the_root(tmp_path: Path) -> None:
    group(tmp_path, memory__max=GB, memory__current=0, memory__stat="inactive_file 0")
    assert [room.num_bytes for room in cgroup_rooms(lambda: "0::/system.slice/docker-12.scope\n", GB, tmp_path)] == [GB]


def test_unlimited_cgroups_give_no_room(tmp_path: Path) -> None:
    group(tmp_path, memory__max=1 << 62, memory__current=0, memory__stat="")
    assert not list(cgroup_rooms(lambda: "0::/\n", 0, tmp_path))
    assert not list(cgroup_rooms(lambda: "", 0, tmp_path))


def test_the_limit_of_a_process_counts() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))\n"
        "from gossamer.peer.machine.room import memory_room\n"
        "room = memory_room(0); print(room.num_bytes < 10**9, room.limit)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True the limit of a process's address space, 1.0 GB"


def test_held_memory_counts_as_room() -> None:
    assert memory_room(1 << 50).num_bytes > 1 << 49


@pytest.mark.parametrize("error", [psutil.NoSuchProcess, psutil.AccessDenied], ids=["ended meanwhile", "of another user"])
def test_a_child_that_cannot_be_read_hides_no_memory(error: type[psutil.Error], monkeypatch: pytest.MonkeyPatch) -> None:
    read = psutil.Process.memory_full_info

    def read_own(process: psutil.Process) -> object:
        if process.pid != os.getpid():
            raise error(process.pid)
        return read(process)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setattr(psutil.Process, "memory_full_info", read_own)
        assert held_bytes(os.getpid()) > 1_000_000
        assert held_bytes(child.pid) == 0


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert disk_room(tmp_path / "a" / "b").num_bytes > 0
    assert free_files(tmp_path / "a") != 0


def test_a_file_out_of_reach_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    (tmp_path / "loop").symlink_to("loop")
    assert size_of(tmp_path) == 100


def test_the_size_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(1000))
    assert (size_of(tmp_path), size_of(tmp_path / "missing")) == (1000, 0)


def test_a_file_that_is_gone_when_it_is_measured_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(bytes(1000))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # listed, and not there
    assert size_of(tmp_path) == 1000


def test_a_sum_names_its_parts() -> None:
    assert summed({"for this": GB, "for that": 2 * GB, "for nothing": 5}) == "3.0 GB: 2.0 GB for that + 1.0 GB for this"


def test_a_need_beyond_the_room_is_refused_with_the_sum() -> None:
    parts = {"for this": GB, "for that": GB // 2}
    need_room("memory", {"for this": GB}, Room(GB, "free"), "buy some", "a peer")
    with pytest.raises(BadSettings, match=r"a peer needs 1.5 GB of memory, and there are 1.0 GB \(free\)") as caught:
        need_room("memory", parts, Room(GB, "free"), "buy some", "a peer", "a nap needs less")
    assert caught.value.hint == "buy some; a nap needs less" and "500 MB for that" in str(caught.value)


def test_a_limit_that_the_operator_has_set_is_what_to_raise() -> None:
    assert at_most(Room(GB, "free"), "2 GB", "max_memory") == Room(GB, "free")
    limited = at_most(Room(3 * GB, "free"), "2 GB", "max_memory")
    with pytest.raises(BadSettings, match=r"there are 2.0 GB \(the setting max_memory = 2 GB\)") as caught:
        need_room("memory", {"for this": 2 * GB + 1}, limited, "buy some", "a peer")
    assert caught.value.hint == "raise max_memory to 2001 MB or more"


def test_a_machine_that_cannot_even_load_a_peer_is_refused() -> None:
    need_program_memory(True, Room(GB, "free"))
    need_program_memory(False, Room(GB // 2, "free"))
    for trains, size in ((True, 256), (False, 100)):
        with pytest.raises(BadSettings, match=rf"a peer needs .* MB of memory, and there are {size} MB \(the limit\)"):
            need_program_memory(trains, Room(size * 10**6, "the limit"))
