"""Can others call me? A partner tries: it dials the address at which it sees the asker, at the port that the asker claims.

    asker:    port (u16)
    partner:  what came of it (u8), where the asker was seen, where the partner itself relays (a length in one byte and a text, each)

One question is worth one short TCP connection that hears libp2p's greeting, never to another host than the one from which the question
came, and only where that host has a public address. A key costs nothing, so what is spent is counted for each network and for all. The
integers are big-endian.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from gossamer.protocol.addresses import host_of, read_address, route
from gossamer.protocol.errors import BadMessage, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.p2pd import BUFFER_BYTES, Control, stream_opener
from gossamer.protocol.libp2p.splice import Pair, drop
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.tasks import cancel

PROTOCOL = "/gossamer/reach/1"
TRY_S = 2.0  # a packet that was lost is sent again after one
ASK_S = 5.0
AGAIN_S = 3.0  # between two tries in one network
NETWORK_BITS = {4: 24, 6: 48}
NETWORKS = 1024
TRIES_AT_ONCE = 4
TRIES, TRIES_S = 30, 30.0  # for all
GREETING = b"\x13/multistream/1.0.0\n"  # with which a libp2p peer begins: a router that takes any connection is none
LOWEST_PORT = 1024  # below are other services than ours

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Reached(IntEnum):
    """What came of a try."""

    NOT_TRIED = 0  # the asker is seen through a relay or in a local network, or asks too often
    YES = 1
    NO = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What a partner says of the asker, and of itself."""

    reached: Reached
    seen_at: str  # the address that it tried, or would have; empty: it sees a relay
    relay: str  # the address at which the partner relays, with its id; empty: it does not


async def ask(control: Control, partner: PeerId, port: int) -> Answer:
    """Have a partner try to call us at `port`. Raises Unreachable, BadMessage when what it says makes no sense."""
    try:
        async with asyncio.timeout(ASK_S):
            (reader, writer), _ = await control.open_stream(partner, PROTOCOL)
            try:
                writer.write(port.to_bytes(2, "big"))
                (reached,) = await reader.readexactly(1)
                answer = Answer(Reached(reached), await _read_text(reader), await _read_text(reader))
            finally:
                drop(writer)
        if answer.seen_at:
            read_address(answer.seen_at)
        if answer.relay and read_address(answer.relay) != partner:
            raise ValueError("the address of another peer as its own")
    except (OSError, EOFError) as error:  # OSError: the time-out too
        raise Unreachable(f"no answer to whether we are reachable: {error!r}") from error
    except ValueError as error:
        raise BadMessage(f"an answer to whether we are reachable that cannot be: {error}") from None
    return answer


class DialBack:
    """Tries for others, from `open` to `close`. `relay` tells where we relay, empty where we do not."""

    def __init__(self, listener: Path, relay: Callable[[], str]) -> None:
        self._listener = listener
        self._relay = relay
        self._tries: set[asyncio.Task[None]] = set()
        self._last_s: dict[Network, float] = {}  # loop time of the last try in each
        self._all_s: deque[float] = deque(maxlen=TRIES)  # and of the last tries anywhere

    async def open(self, control: Control) -> None:
        """Answer from now on. Raises Unreachable when p2pd has gone."""
        self._listener.unlink(missing_ok=True)
        self._listening = await asyncio.start_unix_server(self._accept, self._listener, limit=BUFFER_BYTES)
        await control.receive_streams(PROTOCOL, self._listener)

    async def close(self) -> None:
        """End every try."""
        self._listening.close()
        self._listener.unlink(missing_ok=True)
        await cancel(*self._tries)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tries) >= TRIES_AT_ONCE:
            drop(writer)
            return
        task = asyncio.create_task(self._serve((reader, writer)), name="dial back")
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)

    async def _serve(self, remote: Pair) -> None:
        reader, writer = remote
        try:
            async with asyncio.timeout(ASK_S):
                _, address = await stream_opener(reader)
                port = int.from_bytes(await reader.readexactly(2), "big")
                seen_at = _at_port(address, port)
                reached = await try_to_reach(seen_at) if seen_at and self._may_try(seen_at, port) else Reached.NOT_TRIED
                writer.write(bytes([reached]) + _text(seen_at) + _text(self._relay()))
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, BadMessage):
            pass
        finally:
            drop(writer)

    def _may_try(self, seen_at: str, port: int) -> bool:
        now_s, network = asyncio.get_running_loop().time(), _network(seen_at)
        is_spent = len(self._all_s) == TRIES and now_s - self._all_s[0] < TRIES_S
        if route(seen_at) != "direct" or port < LOWEST_PORT or is_spent or now_s - self._last_s.get(network, -AGAIN_S) < AGAIN_S:
            return False
        self._all_s.append(now_s)
        keep_newest(self._last_s, network, now_s, NETWORKS)
        return True


def _network(address: str) -> Network:
    ip = ipaddress.ip_address(host_of(address))
    return ipaddress.ip_network((ip, NETWORK_BITS[ip.version]), strict=False)


async def try_to_reach(address: str) -> Reached:
    """Say whether a libp2p peer greets us at a direct address. Raises ValueError for one of another form."""
    host, port = address.split("/")[2:5:2]
    try:
        async with asyncio.timeout(TRY_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(GREETING)
                return Reached.YES if await reader.readexactly(len(GREETING)) == GREETING else Reached.NO
            finally:
                drop(writer)
    except (OSError, EOFError):  # OSError: the time-out too
        return Reached.NO


def _at_port(address: str, port: int) -> str:
    """Return the address of the host that is seen at `address`, at another port; empty when a relay is seen, or no such port can be."""
    if route(address) == "relayed" or not port:
        return ""
    _, kind, host, *_ = address.split("/")
    return f"/{kind}/{host}/tcp/{port}"


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


async def _read_text(reader: asyncio.StreamReader) -> str:
    (num_bytes,) = await reader.readexactly(1)
    return (await reader.readexactly(num_bytes)).decode("ascii")
