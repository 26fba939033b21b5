"""A network of the kernel's own on this machine: a namespace for each peer, a cable from each to one bridge, a rate on both ends of it.

The rate is a token bucket, so a line has no delay of its own. What a peer has sent and received is what its interface counted. Needs root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import BadSettings

PREFIX = "sbs"  # of every name that we give to the kernel, so that `clean` finds what a killed run has left
BRIDGE = f"{PREFIX}-bridge"
INSIDE = "eth0"
QUEUE_MS = 400  # how long a packet waits in a line's queue before it is dropped
# Some systems tell others to find them by their host name; some leave their shared memory behind when they are killed.
MACHINE = 'echo "$0" > /proc/sys/kernel/hostname && mount -t tmpfs shm /dev/shm && exec "$@"'
BURST_S, LEAST_BURST_BYTES = 0.01, 16_000


@dataclass(frozen=True, slots=True)
class Line:
    """One peer's cable. Its outer end is a port of the bridge."""

    number: int

    @property
    def namespace(self) -> str:
        """Return the name of the namespace at the inner end."""
        return f"{PREFIX}-{self.number}"

    @property
    def outer(self) -> str:
        """Return the interface at the bridge."""
        return f"{PREFIX}-port-{self.number}"

    @property
    def address(self) -> str:
        """Return the peer's IP address."""
        return f"10.77.0.{self.number}"

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in the namespace, with its address as host name and shared memory of its own."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", MACHINE, self.address, *command]

    def lay(self) -> None:
        """Make the namespace and connect it to the bridge."""
        call("ip", "netns", "add", self.namespace)
        call("ip", "link", "add", self.outer, "type", "veth", "peer", "name", INSIDE, "netns", self.namespace)
        call("ip", "link", "set", self.outer, "master", BRIDGE, "up")
        call(*self.inside(("ip", "address", "add", f"{self.address}/24", "dev", INSIDE)))
        for interface in ("lo", INSIDE):
            call(*self.inside(("ip", "link", "set", interface, "up")))

    def shape(self, mbit_per_s: float) -> None:
        """Limit it, both ways."""
        burst_bytes = max(LEAST_BURST_BYTES, round(mbit_per_s * 125_000 * BURST_S))
        bucket = ("root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", f"{burst_bytes}b", "latency", f"{QUEUE_MS}ms")
        call("tc", "qdisc", "replace", "dev", self.outer, *bucket)
        call(*self.inside(("tc", "qdisc", "replace", "dev", INSIDE, *bucket)))

    def cut(self) -> None:
        """Pull the plug at the bridge: nothing comes through any more, and neither end is told."""
        call("ip", "link", "set", self.outer, "nomaster")

    def sent_bytes(self) -> int:
        """Return what the peer has sent so far; at the bridge it comes in."""
        return int(Path(f"/sys/class/net/{self.outer}/statistics/rx_bytes").read_text())

    def received_bytes(self) -> int:
        """Return what the peer has been sent so far."""
        return int(Path(f"/sys/class/net/{self.outer}/statistics/tx_bytes").read_text())


@contextmanager
def network(num_peers: int, mbit_per_s: float) -> Iterator[tuple[Line, ...]]:
    """Lay the lines of a run, 0 Mbit/s for no limit, and take them away at the end. Raises BadSettings where that cannot be."""
    need_root()
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        raise BadSettings("another run is under way, or was killed", hint="wait for it, or: python -m benchmarks.side_by_side clean")
    lines = tuple(Line(number) for number in range(1, num_peers + 1))
    try:
        call("ip", "link", "add", BRIDGE, "type", "bridge")
        call("ip", "link", "set", BRIDGE, "up")
        for line in lines:
            line.lay()
            if mbit_per_s:
                line.shape(mbit_per_s)
        yield lines
    finally:
        take_away()


def take_away() -> None:
    """Remove every namespace and interface of ours; the processes in them must have ended."""
    for name in Path("/run/netns").glob(f"{PREFIX}-*"):
        call("ip", "netns", "delete", name.name)
    for interface in Path("/sys/class/net").glob(f"{PREFIX}-*"):
        subprocess.run(["ip", "link", "delete", interface.name], capture_output=True, check=False)  # may go with its other end


def need_root() -> None:
    """Raise BadSettings without root."""
    if os.geteuid():
        raise BadSettings("network namespaces, shaping and control groups need root", hint="run it as root, in a virtual machine of yours")


def call(*command: str) -> None:
    """Run a command of the system. Raises BadSettings with its words if it fails."""
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise BadSettings(f"there is no {command[0]!r} here", hint="install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise BadSettings(
            f"`{' '.join(command)}` failed: {error.stderr.strip()}", hint="needs root and a kernel with veth, bridge and tbf"
        ) from error
