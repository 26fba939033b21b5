"""A virtual network on this machine: a namespace per peer, a veth pair from each to one bridge, a rate limit on both ends.

The bridge is in a namespace too, where no firewall of the machine, such as a container engine's, applies. The rate is a token bucket, so a
line has no delay of its own. Sent and received bytes are those of the peer's interface. Needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gossamer.protocol.errors import BadSettings

PREFIX = "sbs"  # of every name that we give to the kernel, so that `clean` finds what a killed run has left
HUB = f"{PREFIX}-hub"  # the namespace of the bridge
BRIDGE = "bridge"
INSIDE = "eth0"
QUEUE_MS = 400  # how long a packet waits in a line's queue before it is dropped
# Some systems tell others to find them by their host name; some leave their shared memory behind when they are killed.
MACHINE = 'echo "$0" > /proc/sys/kernel/hostname && mount -t tmpfs shm /dev/shm && exec "$@"'
BURST_S, LEAST_BURST_BYTES = 0.01, 16_000


@dataclass(frozen=True, slots=True)
class Line:
    """One peer's line. Its outer end is a port of the bridge."""

    number: int

    @property
    def namespace(self) -> str:
        """Return the name of the namespace at the inner end."""
        return f"{PREFIX}-{self.number}"

    @property
    def outer(self) -> str:
        """Return the interface at the bridge."""
        return f"port-{self.number}"

    @property
    def address(self) -> str:
        """Return the peer's IP address."""
        return f"10.77.0.{self.number}"

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in the namespace, with its address as host name and shared memory of its own."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", MACHINE, self.address, *command]

    def lay(self) -> None:
        """Create the namespace and connect it to the bridge."""
        call("ip", "netns", "add", self.namespace)
        at_hub("ip", "link", "add", self.outer, "type", "veth", "peer", "name", INSIDE, "netns", self.namespace)
        at_hub("ip", "link", "set", self.outer, "master", BRIDGE, "up")
        call(*self.inside(("ip", "address", "add", f"{self.address}/24", "dev", INSIDE)))
        for interface in ("lo", INSIDE):
            call(*self.inside(("ip", "link", "set", interface, "up")))

    def shape(self, mbit_per_s: float) -> None:
        """Limit the line, both ways."""
        burst_bytes = max(LEAST_BURST_BYTES, round(mbit_per_s * 125_000 * BURST_S))
        bucket = ("root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", f"{burst_bytes}b", "latency", f"{QUEUE_MS}ms")
        at_hub("tc", "qdisc", "replace", "dev", self.outer, *bucket)
        call(*self.inside(("tc", "qdisc", "replace", "dev", INSIDE, *bucket)))

    def cut(self) -> None:
        """Disconnect the line at the bridge: it drops everything, and neither end is notified."""
        at_hub("ip", "link", "set", self.outer, "nomaster")

    def sent_bytes(self) -> int:
        """Return the bytes that the peer has sent so far, which the bridge receives."""
        return self._counted_bytes("rx")

    def received_bytes(self) -> int:
        """Return the bytes that the peer has received so far."""
        return self._counted_bytes("tx")

    def _counted_bytes(self, way: str) -> int:
        (interface,) = json.loads(at_hub("ip", "-s", "-j", "link", "show", "dev", self.outer))
        return int(interface["stats64"][way]["bytes"])


@contextmanager
def network(num_peers: int, mbit_per_s: float) -> Iterator[tuple[Line, ...]]:
    """Create the lines of a run, 0 Mbit/s for no limit, and remove them at the end. Raises BadSettings if that fails."""
    need_root()
    if Path(f"/run/netns/{HUB}").exists():
        raise BadSettings("another run is under way, or was killed", hint="wait for it, or: python -m benchmarks.side_by_side clean")
    lines = tuple(Line(number) for number in range(1, num_peers + 1))
    try:
        call("ip", "netns", "add", HUB)
        at_hub("ip", "link", "add", BRIDGE, "type", "bridge")
        at_hub("ip", "link", "set", BRIDGE, "up")
        for line in lines:
            line.lay()
            if mbit_per_s:
                line.shape(mbit_per_s)
        yield lines
    finally:
        take_away()


def take_away() -> None:
    """Remove all namespaces of this benchmark with their interfaces; their processes must have ended."""
    for name in Path("/run/netns").glob(f"{PREFIX}-*"):
        call("ip", "netns", "delete", name.name)


def need_root() -> None:
    """Raise BadSettings without root."""
    if os.geteuid():
        raise BadSettings("network namespaces, shaping and control groups need root", hint="run it as root, in a virtual machine of yours")


def at_hub(*command: str) -> str:
    """Run a command of the system where the bridge is; return what it prints. Raises BadSettings with its message if it fails."""
    return call("ip", "netns", "exec", HUB, *command)


def call(*command: str) -> str:
    """Run a command of the system; return what it prints. Raises BadSettings with its message if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError as error:
        raise BadSettings(f"there is no {command[0]!r} here", hint="install iproute2") from error
    except subprocess.CalledProcessError as error:
        raise BadSettings(
            f"`{' '.join(command)}` failed: {error.stderr.strip()}", hint="needs root and a kernel with veth, bridge and tbf"
        ) from error
