"""Dial the addresses in member records, which are untrusted, and upgrade relayed connections to direct ones.

Implausible addresses are filtered, and dials in vain limited per host: otherwise a hundred records of malicious peers that name one host
would make the whole swarm dial this host. DNS names are resolved first (host_names.py), since anyone may have a name for any host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from gossamer.protocol.addresses import CIRCUIT, NEAR, host_of, is_loopback, machine_of, route
from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import Reached, try_to_reach
from gossamer.protocol.libp2p.host_names import HostNames
from gossamer.protocol.libp2p.p2pd import HEAD_START_S, Control
from gossamer.protocol.nearby import unseal
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.tasks import loop_s

MAX_FAILURES = 8  # peers that could not be reached at one host
BACK_OFF_S = 600.0  # a host is not dialled while MAX_FAILURES failures are younger than this
HOSTS = 1024  # hosts whose failures are remembered
SILENT_S = 1.5  # after which a dial that is cancelled has failed: most callers wait for less time than p2pd
AGAIN_S = (30.0, 3600.0)  # time between two attempts with one partner: the first, and the largest after repeated doubling
IPV6_S = 0.5  # that public IPv6 addresses are dialled alone: no router keeps a table of connections for them
IPV6_FAILURES = 3  # in a row, without a success: then they are dialled with all others for BACK_OFF_S
_ANYWHERE = ("2001:4860:4860::8888", 53)  # a global address; nothing is sent to it
OBSERVERS = 4  # hosts that must have observed us before p2pd tries hole punching
REMEMBERED = 256  # partners whose next attempt is remembered
_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16")))

Counts = dict[str, dict[PeerId, float]]
"""By `_target`: the peers that were not found at a host, with the loop time."""


class Dialer:
    """Dials peers through one p2pd. `own` returns our listening addresses, `public_host` our public IP address as observed, if known."""

    def __init__(self, control: Control, own: Callable[[], Sequence[str]], public_host: Callable[[], str] = str) -> None:
        self._control = control
        self._own = own
        self._public_host = public_host
        self._names = HostNames()
        self._ends: dict[PeerId, str] = {}  # remote multiaddrs of the connected peers, at the last look
        self._ipv6_failures = 0  # in a row
        self._ipv6_failed_s = 0.0  # loop time of the last one
        self._failures: Counts = {}  # peers that could not be reached
        self._in_vain: Counts = {}  # peers that were reached at another of their addresses

    async def connected(self) -> dict[PeerId, str]:
        """Return the connected peers, each with its remote multiaddr. Raises Unreachable."""
        return await self._control.connected()

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial a peer at its plausible addresses, unless already connected. Raises Unreachable.

        A host at which peer after peer was not found, but elsewhere, is dialled last: else peers that can be reached could name any host.
        """
        self._ends = await self._control.connected()
        if partner in self._ends:
            return
        dialable_addresses = await self.dialable_addresses(partner, addresses)
        if not dialable_addresses:
            raise Unreachable(f"{partner.short()} has no plausible address")
        doubtful = [address for address in dialable_addresses if _is_spent(self._in_vain, address)]
        likely = [address for address in dialable_addresses if address not in doubtful]
        first = self._first(likely)
        if first and await self._connects(partner, first):
            return
        if likely and doubtful:
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(HEAD_START_S):
                    return await self._dial(partner, likely)
        await self._dial(partner, doubtful or likely)

    async def _dial(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial addresses at once, and count those at which the peer is not found. Raises Unreachable."""
        began_s = loop_s()
        try:
            await self._control.connect(partner, addresses)
        except Unreachable:
            await self._look_where(partner, addresses)
            raise
        except asyncio.CancelledError:
            if loop_s() - began_s >= SILENT_S:
                self._count(self._failures, partner, addresses)
            raise
        await self._look_where(partner, addresses)

    async def _look_where(self, partner: PeerId, dialled: Sequence[str]) -> None:
        """Count the addresses at which a peer was not found. Of a peer that was reached without a relay, no circuit was dialled."""
        try:
            self._ends = await self._control.connected()
        except Unreachable:  # p2pd has ended
            return
        end = self._ends.get(partner)
        if end is None:
            self._count(self._failures, partner, dialled)
        elif end:
            self._failures.pop(_target(end), None)
            self._in_vain.pop(_target(end), None)
            others = [address for address in dialled if _target(address) != _target(end)]
            self._count(self._in_vain, partner, [address for address in others if CIRCUIT in end or CIRCUIT not in address])

    def _count(self, counts: Counts, partner: PeerId, addresses: Sequence[str]) -> None:
        """Count a peer for the host of each address, but not for relays that are there: these did not find the peer."""
        there = set(map(str, self._ends))
        for address in addresses:
            if not is_loopback(address) and not any(f"/p2p/{relay}{CIRCUIT}" in address for relay in there):
                of_target = counts.get(_target(address), {})
                keep_newest(of_target, partner, loop_s(), MAX_FAILURES)
                keep_newest(counts, _target(address), of_target, HOSTS)

    def _first(self, addresses: Sequence[str]) -> list[str]:
        """Return the public IPv6 addresses, if they are to be dialled before the others."""
        now_s = loop_s()
        if self._ipv6_failures >= IPV6_FAILURES and now_s - self._ipv6_failed_s < BACK_OFF_S:
            return []
        first = [address for address in addresses if address.startswith("/ip6/") and route(address) == "direct"]
        return first if 0 < len(first) < len(addresses) and has_global_ipv6() else []

    async def _connects(self, partner: PeerId, first: Sequence[str]) -> bool:
        """Dial addresses alone for IPV6_S; return whether the peer was reached. Failures count for no host: all is dialled then."""
        try:
            async with asyncio.timeout(IPV6_S):
                await self._control.connect(partner, first)
        except (Unreachable, TimeoutError):
            self._ipv6_failures, self._ipv6_failed_s = self._ipv6_failures + 1, loop_s()
            return False
        self._ipv6_failures = 0
        await self._look_where(partner, first)
        return True

    async def answers(self, partner: PeerId, addresses: Sequence[str]) -> bool:
        """Return whether a libp2p peer answers at one of a peer's addresses without a relay."""
        for address in await self.dialable_addresses(partner, addresses):
            if route(address) != "relayed":
                with suppress(ValueError):
                    if await try_to_reach(address) is Reached.YES:
                        return True
                    self._count(self._failures, partner, [address])
        return False

    async def dialable_addresses(self, partner: PeerId, addresses: Sequence[str]) -> list[str]:
        """Return the addresses of a peer that may be dialled: sealed ones decrypted if possible, DNS names resolved."""
        host, sealed = self._public_host(), [address for address in addresses if address.startswith(NEAR)]
        near = [local for address in sealed if host for local in unseal(address, partner, host)]
        plain = await asyncio.gather(*(self._names.resolved(partner, address) for address in addresses if address not in sealed))
        return [address for address in dict.fromkeys(chain(near, *plain)) if self._is_plausible(address)]

    def _is_plausible(self, address: str) -> bool:
        dialled = address.partition(CIRCUIT)[0]  # of a circuit, the relay
        if _is_spent(self._failures, address):
            return False
        if route(dialled) == "direct":
            return True
        if is_loopback(dialled) != all(map(is_loopback, self._own())):
            return False  # loopback addresses are plausible only for a peer that listens on loopback alone
        blocks = {_private_block(machine_of(own)) for own in self._own() if route(own) == "local"}
        return not blocks or _private_block(machine_of(dialled)) in blocks  # no blocks: only public ones are announced


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


def _is_spent(counts: Counts, address: str) -> bool:
    """Return whether lately MAX_FAILURES peers were counted for the host of an address."""
    since_s = loop_s() - BACK_OFF_S
    return sum(at_s >= since_s for at_s in counts.get(_target(address), {}).values()) >= MAX_FAILURES


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
        if not is_due or not (await self._dialer.answers(partner, addresses) or _is_seen_by_enough(ends)) or self._is_busy(partner):
            return False
        await self._control.disconnect(partner)
        return True


def _is_seen_by_enough(ends: Mapping[PeerId, str]) -> bool:
    return len({host_of(end) for end in ends.values() if route(end) == "direct"}) >= OBSERVERS
