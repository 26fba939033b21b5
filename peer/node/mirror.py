"""What others may ask of us about themselves: from where they come, whether their port can be reached from outside, what the line carries.

Within budgets, so that nobody can make more of us than of himself: an answer is no larger than what it answers, only the very address from
which the asker comes is ever dialled, and seldom.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Callable, Hashable

from peer.swarm.address_book import loop_s
from protocol.errors import RefusalCode, Refused
from protocol.identity import PeerId
from protocol.messages.messages import Knock
from protocol.messages.sighting import Sighting

KNOCK_S = 4.0  # for the connection and the answer
KNOCKS_AT_ONCE = 2
REST_S = 10.0  # between two knocks at doors of one network, whoever asks
ECHO_BYTES = 2 << 20  # of one partner, in ECHO_REST_S
ALL_ECHO_BYTES = 32 << 20  # of all, in ECHO_REST_S
ECHO_REST_S = 600.0
GREETING = b"\x13/multistream/1.0.0\n"  # with which a libp2p peer begins
NETWORK_BITS = {4: 24, 6: 48}
REMEMBERED = 4096

_OBSERVED = re.compile(r"/ip[46]/([0-9a-fA-F.:]+)/tcp/\d+")


class Budget:
    """So much for each key, and so much for all, in a time; for the latest REMEMBERED keys."""

    def __init__(self, of_one: int, of_all: int, rest_s: float) -> None:
        self._of_one, self._of_all, self._rest_s = of_one, of_all, rest_s
        self._since_s = -rest_s
        self._taken: dict[Hashable, int] = {}

    def take(self, key: Hashable, amount: int, now_s: float) -> bool:
        """Take from the budget; False, and nothing taken, where it is used up."""
        if now_s - self._since_s >= self._rest_s:
            self._since_s, self._taken = now_s, {}
        is_left = self._taken.get(key, 0) + amount <= self._of_one and sum(self._taken.values()) + amount <= self._of_all
        if is_left and (key in self._taken or len(self._taken) < REMEMBERED):
            self._taken[key] = self._taken.get(key, 0) + amount
            return True
        return False


class Mirror:
    """Answers who asks about itself; one for all streams of a node. `now_s` is Unix time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._knocks = Budget(1, KNOCKS_AT_ONCE * 5, REST_S)
        self._echoes = Budget(ECHO_BYTES, ALL_ECHO_BYTES, ECHO_REST_S)
        self._knocking = 0

    async def sighting(self, observed: str, port: int) -> bytes:
        """Say from where somebody comes, what time it is, and, where there is a port to try, whether it answers there."""
        knock = await self._knock(observed, port) if port else Knock.NOT_TRIED
        return Sighting(observed if _OBSERVED.fullmatch(observed) else "", int(1000 * self._now_s()), knock).to_bytes()

    def allow_echo(self, partner: PeerId, num_bytes: int) -> None:
        """Count an echo. Raises Refused where there have been enough of them lately."""
        if not self._echoes.take(partner, num_bytes, loop_s()):
            raise Refused(RefusalCode.BUSY, "I have echoed enough lately")

    async def _knock(self, observed: str, port: int) -> Knock:
        match = _OBSERVED.fullmatch(observed)
        if match is None or self._knocking >= KNOCKS_AT_ONCE:
            return Knock.NOT_TRIED
        ip = ipaddress.ip_address(match[1])
        network = ipaddress.ip_network((ip, NETWORK_BITS[ip.version]), strict=False)
        if not self._knocks.take(network, 1, loop_s()):
            return Knock.NOT_TRIED
        self._knocking += 1
        try:
            return Knock.ANSWERED if await answers(str(ip), port) else Knock.SILENT
        finally:
            self._knocking -= 1


async def answers(host: str, port: int, within_s: float = KNOCK_S) -> bool:
    """Return whether a libp2p peer answers there: a router that takes any connection is none."""
    with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):  # OSError: the time-out too
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(GREETING)
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.transport.abort()
    return False
