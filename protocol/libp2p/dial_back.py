"""Dial-back test of reachability: a partner dials the requester's observed address at the port that the requester names.

    request:  port (u16)
    reply:    result (u8), observed address, address at which the partner relays (both texts preceded by their length, u8)

Integers are big-endian. One request causes at most one short TCP connection, which reads libp2p's greeting. It goes only to the host from
which the request came, and only if that host has a public address. Identities are free, so the tests are limited per network and in total.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from gossamer.protocol.addresses import network_of, read_address, route
from gossamer.protocol.errors import BadMessage, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.p2pd import Control, read_stream_header, receiving
from gossamer.protocol.libp2p.splice import Pair, drop
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.tasks import cancel, loop_s, spawn

PROTOCOL = "/gossamer/reach/1"
TRY_S = 2.0  # timeout of a test; a lost SYN packet is retransmitted after 1 s
ASK_S = 5.0  # timeout of a request
AGAIN_S = 3.0  # least time between two tests in one network
NETWORK_BITS = 24, 48  # prefix lengths of a network: IPv4, IPv6
NETWORKS = 1024  # networks whose last test is remembered
TRIES_AT_ONCE = 8
TRIES, TRIES_S = 30, 30.0  # at most TRIES tests in TRIES_S, in total
GREETING = b"\x13/multistream/1.0.0\n"  # first bytes of a libp2p peer; some routers accept any TCP connection
LOWEST_PORT = 1024  # lower ports belong to other services


class Reached(IntEnum):
    """The result of a dial-back test."""

    NOT_TRIED = 0  # the requester's address is relayed or local, or it asks too often
    YES = 1
    NO = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """A partner's reply: the result, and two addresses."""

    reached: Reached
    seen_at: str  # the requester's observed host with the requested port; empty if the connection is relayed
    relay: str  # the address at which the partner relays, with its peer id; empty if it is no relay


async def ask(control: Control, partner: PeerId, port: int) -> Answer:
    """Ask a partner to dial us at `port`. Raises Unreachable, or BadMessage if the reply is invalid."""
    try:
        async with asyncio.timeout(ASK_S):
            (reader, writer), _ = await control.open_stream(partner, PROTOCOL)
            try:
                writer.write(port.to_bytes(2, "big"))
                (reached,) = await reader.readexactly(1)
                answer = Answer(Reached(reached), await _read_text(reader), await _read_text(reader))
            finally:
                drop(writer)
        if answer.seen_at and not _is_at_port(answer.seen_at, port):
            raise ValueError("an observed address that is not the requested port of an IP address")
        if answer.relay and (read_address(answer.relay) != partner or route(answer.relay) != "direct"):
            raise ValueError("a relay address of another peer, or none that is public")
    except (OSError, EOFError) as error:  # TimeoutError is an OSError
        raise Unreachable(f"no reply to the dial-back request: {error!r}") from error
    except ValueError as error:
        raise BadMessage(f"an invalid reply to the dial-back request: {error}") from None
    return answer


class DialBack:
    """Serves dial-back requests. Use as `async with serving(control)`. `relay` returns our relay address, empty if we are no relay."""

    def __init__(self, listener: Path, relay: Callable[[], str]) -> None:
        self._listener = listener
        self._relay = relay
        self._tries: set[asyncio.Task[None]] = set()
        self._networks: set[str] = set()  # of the requests that are being served
        self._last_s: dict[str, float] = {}  # loop time of the last test in each network
        self._all_s: deque[float] = deque(maxlen=TRIES)  # loop times of the last tests

    @asynccontextmanager
    async def serving(self, control: Control) -> AsyncIterator[None]:
        """Serve, and cancel running tests at the end. Raises Unreachable if p2pd has ended."""
        try:
            async with receiving(control, PROTOCOL, self._listener, self._accept):
                yield
        finally:
            await cancel(*self._tries)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tries) >= TRIES_AT_ONCE:
            drop(writer)
        else:
            spawn(self._serve((reader, writer)), self._tries, "dial back")

    async def _serve(self, remote: Pair) -> None:
        """Serve one request of each network at a time: one that names no port must not keep those of other networks out."""
        try:
            async with asyncio.timeout(ASK_S):
                _, address = await read_stream_header(remote[0])
                with self._only_one_of(network_of(address, *NETWORK_BITS)):
                    await self._reply(remote, address)
        except (OSError, EOFError, BadMessage):
            pass
        finally:
            drop(remote[1])

    @contextmanager
    def _only_one_of(self, network: str) -> Iterator[None]:
        if network in self._networks:
            raise BadMessage("a second request of this network")
        self._networks.add(network)
        try:
            yield
        finally:
            self._networks.discard(network)

    async def _reply(self, remote: Pair, address: str) -> None:
        reader, writer = remote
        port = int.from_bytes(await reader.readexactly(2), "big")
        seen_at = _at_port(address, port)
        reached = await try_to_reach(seen_at) if seen_at and self._may_try(seen_at, port) else Reached.NOT_TRIED
        writer.write(bytes([reached]) + _text(seen_at) + _text(self._relay()))
        writer.close()
        await writer.wait_closed()

    def _may_try(self, seen_at: str, port: int) -> bool:
        now_s, network = loop_s(), network_of(seen_at, *NETWORK_BITS)
        is_spent = len(self._all_s) == TRIES and now_s - self._all_s[0] < TRIES_S
        if route(seen_at) != "direct" or port < LOWEST_PORT or is_spent or now_s - self._last_s.get(network, -AGAIN_S) < AGAIN_S:
            return False
        self._all_s.append(now_s)
        keep_newest(self._last_s, network, now_s, NETWORKS)
        return True


async def try_to_reach(address: str) -> Reached:
    """Connect to a direct TCP address and return whether a libp2p peer greets us. Raises ValueError for another kind of address."""
    host, port = address.split("/")[2:5:2]
    try:
        async with asyncio.timeout(TRY_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(GREETING)
                return Reached.YES if await reader.readexactly(len(GREETING)) == GREETING else Reached.NO
            finally:
                drop(writer)
    except (OSError, EOFError):  # TimeoutError is an OSError
        return Reached.NO


def _at_port(address: str, port: int) -> str:
    """Return the address of the host in `address` with another port; empty if `address` is relayed or unknown, or the port is 0."""
    if not address or route(address) == "relayed" or not port:
        return ""
    _, kind, host, *_ = address.split("/")
    return f"/{kind}/{host}/tcp/{port}"


def _is_at_port(address: str, port: int) -> bool:
    """Return whether a partner's text is an IP address and this port alone: we announce it as our own. Raises ValueError for no address."""
    read_address(address)
    return address.startswith(("/ip4/", "/ip6/")) and _at_port(address, port) == address


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


async def _read_text(reader: asyncio.StreamReader) -> str:
    (num_bytes,) = await reader.readexactly(1)
    return (await reader.readexactly(num_bytes)).decode("ascii")
