"""The control socket of a running p2pd: who am I, dial a peer, open a stream, hand me inbound streams.

Every call opens its own connection, has its own time-out, and closes the connection however it ends; hivemind's client leaks
it on a time-out and waits for ever on a hung daemon. The protocol (length-prefixed protobuf) is go-libp2p-daemon's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.addresses import read_address
from protocol.errors import BadMessage, Unreachable
from protocol.identity import PeerId
from protocol.libp2p.hivemind_imports import Multiaddr, p2pd_pb2, read_pbmsg_safe, write_pbmsg
from protocol.libp2p.splice import Pair

ASK_S = 2.0  # a question that p2pd answers from memory
DIAL_S = 5.0  # one that makes it dial
BUFFER_BYTES = 256 * 1024
ERROR_CHARS = 300  # of p2pd's explanation, which lists every address that it tried


class Control:
    """Questions to one p2pd. Stateless: safe to use from several tasks, useless after that p2pd has died.

    Every method raises Unreachable when p2pd is gone or silent.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Return p2pd's peer id and the multiaddrs it listens on, without /p2p."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), ASK_S)
        addresses = tuple(str(Multiaddr(raw)) for raw in response.identify.addrs)
        return PeerId.from_bytes(response.identify.id), addresses

    async def connected(self) -> frozenset[PeerId]:
        """Return the peers to which a connection is open."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), ASK_S)
        found = set()
        for peer in response.peers:
            with suppress(BadMessage):  # hosts of other kinds of key are none of ours
                found.add(PeerId.from_bytes(peer.id))
        return frozenset(found)

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        """Dial `partner` unless connected; unreadable addresses are passed over. Raises Unreachable."""
        raw = [parsed for address in addresses if (parsed := _transport_part(address, partner)) is not None]
        request = p2pd_pb2.ConnectRequest(peer=partner.raw, addrs=raw)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), DIAL_S)

    async def open_stream(self, partner: PeerId, protocol: str) -> Pair:
        """Open a raw byte stream to `partner`; the caller closes the writer. Raises Unreachable."""
        request = p2pd_pb2.StreamOpenRequest(peer=partner.raw, proto=[protocol])
        _, reader, writer = await self._send(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), DIAL_S)
        return reader, writer

    async def receive_streams(self, protocol: str, listener: Path) -> None:
        """Have inbound streams of `protocol` connect to the Unix socket `listener`, where `stream_opener` tells whose they are."""
        request = p2pd_pb2.StreamHandlerRequest(addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), ASK_S)

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        response, _, writer = await self._send(request, timeout_s)
        writer.transport.abort()
        return response

    async def _send(self, request: Any, timeout_s: float) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and return p2pd's answer with it. Raises Unreachable."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=BUFFER_BYTES)
                try:
                    await write_pbmsg(writer, request)
                    return await _answer(reader), reader, writer
                except BaseException:
                    writer.transport.abort()
                    raise
        except TimeoutError:
            raise Unreachable(f"no answer from p2pd within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise Unreachable(f"p2pd has gone: {error}") from error


async def _answer(reader: asyncio.StreamReader) -> Any:
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    if response.type == p2pd_pb2.Response.ERROR:
        raise Unreachable(f"p2pd: {' '.join(response.error.msg.split())[:ERROR_CHARS]}")
    return response


async def stream_opener(reader: asyncio.StreamReader) -> PeerId:
    """Read who opened the inbound stream that p2pd has just connected. Raises BadMessage for a key that is not Ed25519."""
    info = p2pd_pb2.StreamInfo()
    await read_pbmsg_safe(reader, info)
    return PeerId.from_bytes(info.peer)


def _transport_part(address: str, partner: PeerId) -> bytes | None:
    """Return the binary multiaddr without its end /p2p/<partner>; None when it is illegal or leads to somebody else."""
    try:
        if read_address(address) not in (None, partner):
            return None
        return bytes(Multiaddr(address.removesuffix(f"/p2p/{partner}")).to_bytes())
    except ValueError:
        return None
