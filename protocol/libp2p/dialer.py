"""Dial the addresses in member records, which are untrusted, and upgrade relayed connections to direct ones.

Implausible addresses are filtered, and failed dials limited per host: otherwise a hundred records of malicious peers that name one host
would make the whole swarm dial this host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gossamer.protocol.addresses import CIRCUIT, NEAR, host_of, is_loopback, machine_of, route
from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import Reached, try_to_reach
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.nearby import unseal
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.tasks import loop_s

MAX_FAILURES = 8  # peers that could not be reached at one host
BACK_OFF_S = 600.0  # a host is not dialled while MAX_FAILURES failures are younger than this
HOSTS = 1024  # hosts whose failures are remembered
AGAIN_S = (30.0, 3600.0)  # time between two attempts with one partner: the first, and the largest after repeated doubling
IPV6_S = 0.5  # that public IPv6 addresses are dialled alone: no router keeps a table of connections for them
IPV6_FAILURES = 3  # in a row, without a success: then they are dialled with all others for BACK_OFF_S
_ANYWHERE = ("2001:4860:4860::8888", 53)  # a global address; nothing is sent to it
OBSERVERS = 4  # hosts that must have observed us before p2pd tries hole punching
REMEMBERED = 256  # partners whose next attempt is remembered
_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16")))


class Dialer:
    """Dials peers through one p2pd. `own` returns our listening addresses, `public_host` our public IP address as observed, if known.

    `has_ipv6` returns whether this machine has a global IPv6 address: then the public ones of a partner are dialled first.
    """

    def __init__(
        self,
        control: Control,
        own: Callable[[], Sequence[str]],
        public_host: Callable[[], str] = str,
        has_ipv6: Callable[[], bool] | None = None,
    ) -> None:
        self._control = control
        self._has_ipv6 = has_ipv6 or has_global_ipv6
        self._ipv6_failures = 0  # in a row
        self._ipv6_failed_s = 0.0  # loop time of the last one
        self._own = own
        self._public_host = public_host
        self._failures: dict[str, dict[PeerId, float]] = {}  # `_target` -> unreachable peer -> loop time

    async def connected(self) -> dict[PeerId, str]:
        """Return the connected peers, each with its remote multiaddr. Raises Unreachable."""
        return await self._control.connected()

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial a peer at its plausible addresses, unless already connected. Raises Unreachable."""
        dialable_addresses = self.dialable_addresses(partner, addresses)
        if not dialable_addresses:
            raise Unreachable(f"{partner.short()} has no plausible address")
        first = self._first(dialable_addresses)
        if first and await self._connects(partner, first):
            return
        try:
            await self._control.connect(partner, dialable_addresses)
        except Unreachable:
            await self._count_failures(partner, dialable_addresses)
            raise
        for address in dialable_addresses:
            self._failures.pop(_target(address), None)

    def _first(self, addresses: Sequence[str]) -> list[str]:
        """Return the public IPv6 addresses, if they are to be dialled before the others."""
        now_s = loop_s()
        if self._ipv6_failures >= IPV6_FAILURES and now_s - self._ipv6_failed_s < BACK_OFF_S:
            return []
        first = [address for address in addresses if address.startswith("/ip6/") and route(address) == "direct"]
        return first if 0 < len(first) < len(addresses) and self._has_ipv6() else []

    async def _connects(self, partner: PeerId, first: Sequence[str]) -> bool:
        """Dial addresses alone for IPV6_S; return whether the peer was reached. Failures count for no host: all is dialled then."""
        try:
            async with asyncio.timeout(IPV6_S):
                await self._control.connect(partner, first)
        except (Unreachable, TimeoutError):
            self._ipv6_failures, self._ipv6_failed_s = self._ipv6_failures + 1, loop_s()
            return False
        self._ipv6_failures = 0
        for address in first:
            self._failures.pop(_target(address), None)
        return True

    def dialable_addresses(self, partner: PeerId, addresses: Sequence[str]) -> list[str]:
        """Return the addresses of a peer that may be dialled, with sealed addresses decrypted if possible."""
        host, sealed = self._public_host(), [address for address in addresses if address.startswith(NEAR)]
        near = [local for address in sealed if host for local in unseal(address, partner, host)]
        return [address for address in (*near, *addresses) if address not in sealed and self._is_plausible(address)]

    def _is_plausible(self, address: str) -> bool:
        dialled = address.partition(CIRCUIT)[0]  # of a circuit, the relay
        if self._is_backing_off(_target(address)):
            return False
        if route(dialled) == "direct":
            return True
        if is_loopback(dialled) != all(map(is_loopback, self._own())):
            return False  # loopback addresses are plausible only for a peer that listens on loopback alone
        blocks = {_private_block(machine_of(own)) for own in self._own() if route(own) == "local"}
        return not blocks or _private_block(machine_of(dialled)) in blocks  # no blocks: only public ones are announced

    def _is_backing_off(self, target: str) -> bool:
        since_s = loop_s() - BACK_OFF_S
        return sum(at_s >= since_s for at_s in self._failures.get(target, {}).values()) >= MAX_FAILURES

    async def _count_failures(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Count a failed dial for the host of each address, but not for relays that are there: these did not find the peer."""
        there: set[str] = set()
        with suppress(Unreachable):
            there = set(map(str, await self._control.connected()))
        for address in addresses:
            if not is_loopback(address) and not any(f"/p2p/{relay}{CIRCUIT}" in address for relay in there):
                failures = self._failures.get(_target(address), {})
                keep_newest(failures, partner, loop_s(), MAX_FAILURES)
                keep_newest(self._failures, _target(address), failures, HOSTS)


def has_global_ipv6() -> bool:
    """Return whether this machine would reach the internet from a global IPv6 address. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect(_ANYWHERE)
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]).is_global
    except (OSError, ValueError):  # no IPv6, or no route
        return False


def _target(address: str) -> str:
    """Return under which name failed dials of an address are counted: of a host, apart from those of a relay there."""
    return machine_of(address) + (CIRCUIT if CIRCUIT in address else "")


def _private_block(host: str) -> str:
    """Return the private address block of a host. A peer without an address in the same block cannot reach the host."""
    ip = ipaddress.ip_address(host)
    return next((str(block) for block in _PRIVATE if ip.version == 4 and ip in block), f"IPv{ip.version}")


class DirectRoute:
    """Upgrades relayed connections of one p2pd, which never opens a second connection to a connected peer.

    Either the partner has become reachable, or p2pd tries hole punching, at the start of a relayed connection once four hosts have seen us.
    `is_busy` returns whether a call between us and a partner is open.
    """

    def __init__(self, control: Control, dialer: Dialer, is_busy: Callable[[PeerId], bool]) -> None:
        self._control = control
        self._dialer = dialer
        self._is_busy = is_busy
        self._next_s: dict[PeerId, tuple[float, float]] = {}  # loop time of the next attempt, and the delay after it

    async def prepare(self, partner: PeerId, addresses: Sequence[str]) -> bool:
        """Return whether a new connection may be direct, after ending a relayed one if that is due and no call uses it."""
        ends = await self._control.connected()
        if route(ends.get(partner, "")) != "relayed":
            return True
        now_s = loop_s()
        next_s, pause_s = self._next_s.get(partner, (now_s + AGAIN_S[0], AGAIN_S[0]))
        is_due = now_s >= next_s and not self._is_busy(partner)
        later_s = (now_s + pause_s, min(2 * pause_s, AGAIN_S[1])) if is_due else (next_s, pause_s)
        keep_newest(self._next_s, partner, later_s, REMEMBERED)
        if not is_due or not (await self._answers(partner, addresses) or _is_seen_by_enough(ends)) or self._is_busy(partner):
            return False
        await self._control.disconnect(partner)
        return True

    async def _answers(self, partner: PeerId, addresses: Sequence[str]) -> bool:
        """Return whether a libp2p peer answers at one of these addresses without a relay."""
        direct = [address for address in self._dialer.dialable_addresses(partner, addresses) if route(address) != "relayed"]
        for address in direct:
            with suppress(ValueError):
                if await try_to_reach(address) is Reached.YES:
                    return True
        return False


def _is_seen_by_enough(ends: Mapping[PeerId, str]) -> bool:
    return len({host_of(end) for end in ends.values() if route(end) == "direct"}) >= OBSERVERS
