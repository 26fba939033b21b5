"""All processes of one peer, daemons included, as one control group: their processor time, a limit on it, and their sudden end.

Needs root and version 2 of the kernel's control groups, mounted anywhere. The limit may use version 1, if that has the cpu controller.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.side_by_side.network import PREFIX
from gossamer.protocol.errors import BadSettings

PERIOD_US = 100_000
STOP_S = 20.0  # between asking and killing
ENTER = 'for file in $GROUPS_FILES; do echo $$ > "$file" || exit 1; done; unset GROUPS_FILES; exec "$@"'


class ProcessGroup:
    """One peer's processes. Processes that a member starts belong to the group too."""

    def __init__(self, name: str) -> None:
        unified, limiting = mounts()
        self._group = unified / f"{PREFIX}-{name}"
        self._limit = limiting / f"{PREFIX}-{name}"
        for folder in {self._group, self._limit}:
            folder.mkdir(exist_ok=True)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, *, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start a process in the group, with stdout and stderr to the file."""
        files = " ".join(str(folder / "cgroup.procs") for folder in sorted({self._group, self._limit}))
        with output.open("ab") as log:
            return subprocess.Popen(
                ["sh", "-c", ENTER, "sh", *command],
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment, "GROUPS_FILES": files},
            )

    def cpu_s(self) -> float:
        """Return the processor seconds of all its processes so far, ended ones included."""
        fields = dict(line.split() for line in (self._group / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6

    def pids(self) -> list[int]:
        """Return the ids of its processes."""
        return [int(line) for line in (self._group / "cgroup.procs").read_text().split()]

    def limit(self, share: float) -> None:
        """Limit all processes together to this share of one processor."""
        quota_us = round(share * PERIOD_US)
        if (self._limit / "cpu.max").exists():
            (self._limit / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (self._limit / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._limit / "cpu.cfs_quota_us").write_text(str(quota_us))

    def kill(self) -> None:
        """Kill all processes at once, without warning."""
        (self._group / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Kill the remaining processes, and remove the group."""
        self.kill()
        until_s = time.monotonic() + STOP_S
        for folder in {self._group, self._limit}:
            while not removed(folder):
                if time.monotonic() > until_s:
                    raise BadSettings(f"processes in {folder} do not end", hint="python -m benchmarks.side_by_side clean")
                time.sleep(0.05)


def removed(folder: Path) -> bool:
    """Try to remove a group; it is busy until its last process has ended."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def process_group(name: str) -> Iterator[ProcessGroup]:
    """Yield a group, and kill its processes at the end."""
    group = ProcessGroup(name)
    try:
        yield group
    finally:
        group.remove()


def left_behind() -> list[ProcessGroup]:
    """Return the groups that a killed run has left behind."""
    names = {folder.name for mount in mounts() for folder in mount.glob(f"{PREFIX}-*")}
    return [ProcessGroup(name.removeprefix(f"{PREFIX}-")) for name in sorted(names)]


def mounts() -> tuple[Path, Path]:
    """Return the mount points of version 2 and of the cpu controller. Raises BadSettings if there are none."""
    found = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    unified = next((Path(fields[1]) for fields in found if fields[2] == "cgroup2"), None)
    if unified is None:
        raise BadSettings("this machine has no control groups of version 2", hint="mount -t cgroup2 none /sys/fs/cgroup/unified")
    if "cpu" in (unified / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):  # it is given to the groups already, or the group below has it
            (unified / "cgroup.subtree_control").write_text("+cpu")
        return unified, unified
    limiting = next((Path(fields[1]) for fields in found if fields[2] == "cgroup" and "cpu" in fields[3].split(",")), None)
    if limiting is None:
        raise BadSettings("no control group here can limit processor time", hint="boot with systemd.unified_cgroup_hierarchy=1")
    return unified, limiting
