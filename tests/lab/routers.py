"""A small internet in network namespaces: a bridge with public addresses, peers on it, and peers behind routers of four kinds. Needs root.

The bridge has its own namespace, so the machine's firewall does not affect it. The addresses are from a public range, because libp2p
ignores addresses for documentation. They are not visible outside.

    none             the peer is on the bridge, with a public address
    full cone        its router forwards all inbound connections to the peer, as with a port forwarding of all ports
    port-restricted  its router accepts only replies, and keeps the peer's port if possible: most routers at home
    symmetric        likewise, but each connection leaves from another port: mobile networks, large companies
    beside           behind the router of the previous place, on the same local network
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KINDS = ("none", "full cone", "port-restricted", "symmetric")
PREFIX = "nat-lab"
HUB = f"{PREFIX}-hub"
TOOLS = ("ip", "nft", "sysctl")
RULES = """
table ip lab {{
  chain in {{ type nat hook prerouting priority dstnat; {inward} }}
  chain out {{ type nat hook postrouting priority srcnat; oifname "wan" masquerade {how}; }}
  chain through {{ type filter hook forward priority 0; policy drop; ct state established,related accept; iifname "lan" accept; {let_in} }}
  chain self {{ type filter hook input priority 0; policy drop; ct state established,related accept; iifname {{"lo", "lan"}} accept; }}
}}
"""


class CannotRun(Exception):
    """The lab cannot run on this machine; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a peer in the network."""

    number: int
    kind: str

    @property
    def namespace(self) -> str:
        """Return the name of the peer's namespace."""
        return f"{PREFIX}-{self.number}"

    @property
    def router(self) -> str:
        """Return the name of its router's namespace, or of its own if it has no router."""
        return self.namespace if self.kind == "none" else f"{PREFIX}-{self.network}-router"

    @property
    def network(self) -> int:
        """The number of its local network and of its public address."""
        return self.number - (self.kind == "beside")

    @property
    def public(self) -> str:
        """The address that other peers observe."""
        return f"5.5.{self.network}.1"

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs in the peer's namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def lay(self) -> None:
        """Create the namespaces, virtual cables and firewall rules."""
        if self.kind == "beside":
            self._lay_home(3)
            return
        _call("ip", "netns", "add", self.router)
        _in(HUB, "ip", "link", "add", f"port-{self.number}", "type", "veth", "peer", "name", "wan", "netns", self.router)
        _in(HUB, "ip", "link", "set", f"port-{self.number}", "master", "bridge", "up")
        _up(self.router, "wan", f"{self.public}/16")
        if self.kind == "none":
            return
        _in(self.router, "ip", "link", "add", "lan", "type", "bridge")
        home = f"192.168.{self.network}"
        _up(self.router, "lan", f"{home}.1/24")
        self._lay_home(2)
        _in(self.router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        is_open = self.kind == "full cone"
        rules = RULES.format(
            inward=f'iifname "wan" tcp dport 1024-65535 dnat to {home}.2;' if is_open else "",
            how="fully-random" if self.kind == "symmetric" else "",
            let_in='iifname "wan" accept;' if is_open else "",
        )
        _call("ip", "netns", "exec", self.router, "nft", "-f", "-", feed=rules)

    def _lay_home(self, host: int) -> None:
        """Connect the peer to its local network."""
        home = f"192.168.{self.network}"
        _call("ip", "netns", "add", self.namespace)
        _in(self.router, "ip", "link", "add", f"lan-{host}", "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _in(self.router, "ip", "link", "set", f"lan-{host}", "master", "lan", "up")
        _up(self.namespace, "eth0", f"{home}.{host}/24")
        _in(self.namespace, "ip", "route", "add", "default", "via", f"{home}.1")


@contextmanager
def internet(kinds: tuple[str, ...]) -> Iterator[tuple[Place, ...]]:
    """Create one place of each given kind, and remove all on exit. Raises CannotRun."""
    need_tools()
    take_away()
    places = tuple(Place(number, kind) for number, kind in enumerate(kinds, 1))
    try:
        _call("ip", "netns", "add", HUB)
        _in(HUB, "ip", "link", "add", "bridge", "type", "bridge")
        _in(HUB, "ip", "link", "set", "bridge", "up")
        for place in places:
            place.lay()
        yield places
    finally:
        take_away()


def need_tools() -> None:
    """Raise CannotRun without root or if a tool is missing."""
    if os.geteuid():
        raise CannotRun("network namespaces need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise CannotRun(f"{', '.join(missing)} is missing; Debian has them in iproute2, nftables and procps")


def take_away() -> None:
    """Remove all namespaces of the lab. The processes in them must have ended."""
    for name in Path("/run/netns").glob(f"{PREFIX}-*"):
        _call("ip", "netns", "delete", name.name)


def _up(namespace: str, interface: str, address: str) -> None:
    _in(namespace, "ip", "address", "add", address, "dev", interface)
    for name in ("lo", interface):
        _in(namespace, "ip", "link", "set", name, "up")


def _in(namespace: str, *command: str) -> None:
    _call("ip", "netns", "exec", namespace, *command)


def _call(*command: str, feed: str = "") -> None:
    done = subprocess.run(command, input=feed, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
