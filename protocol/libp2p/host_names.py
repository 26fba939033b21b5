"""Resolve the DNS names in member records, which are untrusted: a name server of an attacker may answer nothing.

A look-up cannot be cancelled, and may take half a minute. So each look-up has a daemon thread of its own. The event loop keeps its threads,
which write to the disk, and the process ends without waiting for the look-up. Each partner has one look-up at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from concurrent.futures import Future

from gossamer.protocol.identity import PeerId

RESOLVE_S = 2.0  # for all look-ups of one partner; they go on after it
RESOLVED = 4  # IP addresses of one name that are returned
LOOK_UPS = 64  # at once; further names are left out
_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}


class HostNames:
    """The look-ups of one peer, on its event loop."""

    def __init__(self) -> None:
        self._running: dict[PeerId, Future[list[str]]] = {}  # the last one of each partner

    async def resolved(self, partner: PeerId, address: str) -> list[str]:
        """Return an address of a partner with each IP address of its DNS name in place of the name; itself, if it has no name."""
        if not address.startswith("/dns") or len(parts := address.split("/", 3)) < 4:
            return [address]
        _, kind, host, rest = parts
        try:
            async with asyncio.timeout(RESOLVE_S):
                ips = await self._look_up(partner, host, _FAMILIES.get(kind, socket.AF_UNSPEC))
        except TimeoutError:
            return []
        return [f"/ip{ipaddress.ip_address(ip).version}/{ip}/{rest}" for ip in ips[:RESOLVED]]

    async def _look_up(self, partner: PeerId, host: str, family: int) -> list[str]:
        while (before := self._running.get(partner)) is not None and not before.done():
            await asyncio.wrap_future(before)
        self._running = {other: running for other, running in self._running.items() if not running.done()}
        if len(self._running) >= LOOK_UPS:
            return []
        begun = self._running[partner] = begin(host, family)
        return await asyncio.wrap_future(begun)


def begin(host: str, family: int) -> Future[list[str]]:
    """Begin to look a DNS name up; the future returns its IP addresses, none where there is no such name."""
    future: Future[list[str]] = Future()
    future.set_running_or_notify_cancel()  # who waits for it no longer does not end it

    def run() -> None:
        try:
            found = socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # a label that is too long is a UnicodeError
            found = []
        future.set_result(list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)))

    threading.Thread(target=run, name="look-up", daemon=True).start()
    return future
