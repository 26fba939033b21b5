"""Inbound lanes: what p2pd hands us, carried on to our gRPC server over loopback, and the register of who is behind which port.

The register is the only link between a gRPC call and a proven PeerId. A port enters it before the server can see the connection,
serves one call, and leaves it when the lane ends; whoever else dials the server is not in it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from pathlib import Path

from protocol.control import BUFFER_BYTES, Control, stream_opener
from protocol.errors import BadMessage
from protocol.identity import PeerId
from protocol.splice import Pair, Tally, drop, splice

log = logging.getLogger(__name__)

PROTOCOL = "/gossamer/peer/1"
SILENCE_S = 10.0  # a lane that carries no call by then is closed
LINGER_S = 6.0  # a lane whose call has ended is the caller's to close, for this long
LANES_PER_PARTNER = 8
LANES = 64


class _Lane:
    """One of them: whose it is, and when it is dropped."""

    def __init__(self, partner: PeerId, task: asyncio.Task[None]) -> None:
        self.partner = partner
        self.is_claimed = False
        self._task = task
        self._deadline: asyncio.TimerHandle | None = None

    def drop_after(self, seconds: float | None) -> None:
        """Set the time left to this lane; None: as long as its call takes."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._task.cancel)


class InboundLanes:
    """The lanes that others opened to us, each ending at the gRPC server's `port`."""

    def __init__(self, port: int, listener: Path, tally: Tally) -> None:
        self._port = port
        self._listener = listener
        self._tally = tally
        self._by_port: dict[int, _Lane] = {}
        self._partners: Counter[PeerId] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, control: Control) -> None:
        """Listen where p2pd connects for each inbound stream, and tell it so. Raises Unreachable when p2pd has gone."""
        self._listener.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._listener, limit=BUFFER_BYTES)
        try:
            await control.receive_streams(PROTOCOL, self._listener)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Drop every lane."""
        self._server.close()
        self._listener.unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def claim(self, caller: str) -> PeerId | None:
        """Return who is behind a gRPC caller ("ipv4:127.0.0.1:4711"); None for a stranger, and for a lane's second call."""
        lane = self._by_port.get(_port_of(caller))
        if lane is None or lane.is_claimed:
            return None
        lane.is_claimed = True
        lane.drop_after(None)
        return lane.partner

    def release(self, caller: str) -> None:
        """The call is over: drop the lane soon, if the caller has not closed it by then."""
        lane = self._by_port.get(_port_of(caller))
        if lane is not None:
            lane.drop_after(LINGER_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry((reader, writer)), name="inbound lane")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, remote: Pair) -> None:
        try:
            async with asyncio.timeout(SILENCE_S):
                partner = await stream_opener(remote[0])
            if self._partners[partner] >= LANES_PER_PARTNER or self._partners.total() >= LANES:
                raise BadMessage(f"too many lanes from {partner.short()}")
        except (OSError, EOFError, BadMessage) as error:
            log.debug("inbound stream refused: %s", error)
            drop(remote[1])
            return
        self._partners[partner] += 1
        try:
            await self._connect(partner, remote)
        finally:
            self._partners[partner] -= 1
            self._partners += Counter()  # drop what stands at zero
            drop(remote[1])

    async def _connect(self, partner: PeerId, remote: Pair) -> None:
        """Carry a lane to the server, its port registered from before the connection until after its end."""
        task = asyncio.current_task()
        assert task is not None
        with socket.socket() as caller:
            caller.setblocking(False)
            caller.bind(("127.0.0.1", 0))
            port = caller.getsockname()[1]
            lane = self._by_port[port] = _Lane(partner, task)
            lane.drop_after(SILENCE_S)
            try:
                await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", self._port))
                await splice(await asyncio.open_connection(sock=caller, limit=BUFFER_BYTES), remote, self._tally)
            finally:
                lane.drop_after(None)
                del self._by_port[port]


def _port_of(caller: str) -> int:
    """Return the port in gRPC's "ipv4:127.0.0.1:4711", 0 for anything else."""
    host, _, port = caller.rpartition(":")
    return int(port) if host == "ipv4:127.0.0.1" and port.isdecimal() else 0
