"""Inbound lanes: what p2pd hands us, carried on to our gRPC server over loopback, and the register of who is behind which port.

The register is the only link between a gRPC call and a proven PeerId. A port enters it before the server can see the connection,
serves one call, and leaves it when the lane ends; whoever else dials the server is not in it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from protocol.errors import BadMessage
from protocol.identity import PeerId
from protocol.libp2p.p2pd_control import BUFFER_BYTES, Control, stream_opener
from protocol.libp2p.splice import Pair, Tally, drop, splice

log = logging.getLogger(__name__)

PROTOCOL = "/gossamer/peer/1"
SILENCE_S = 10.0  # a lane that carries no call by then is closed
LINGER_S = 6.0  # a lane whose call has ended is the caller's to close, for this long
LANES_PER_PARTNER = 8
SILENT_LANES = 2  # of a partner that has said nothing on any lane: a key costs nothing
LANES = 64


class _Lane:
    """One of them: whose it is, and when it is dropped."""

    def __init__(self, partner: PeerId, task: asyncio.Task[None]) -> None:
        self.partner = partner
        self.is_claimed = False
        self.is_heard = False
        self.is_over = False
        self._task = task
        self._deadline: asyncio.TimerHandle | None = None

    def drop(self) -> None:
        """End it now."""
        self._task.cancel()

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
        self._lanes: dict[_Lane, None] = {}  # oldest first
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

    def heard(self, caller: str) -> None:
        """The partner has said something: nobody takes this lane from it until the call is over."""
        lane = self._by_port.get(_port_of(caller))
        if lane is not None:
            lane.is_heard = True

    def release(self, caller: str) -> None:
        """The call is over: drop the lane soon, if the caller has not closed it by then."""
        lane = self._by_port.get(_port_of(caller))
        if lane is not None:
            lane.is_over = True
            lane.drop_after(LINGER_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry((reader, writer)), name="inbound lane")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, remote: Pair) -> None:
        try:
            async with asyncio.timeout(SILENCE_S):
                partner = await stream_opener(remote[0])
            lane = self._admit(partner)
        except (OSError, EOFError, BadMessage) as error:
            log.debug("inbound stream refused: %s", error)
            drop(remote[1])
            return
        try:
            await self._connect(lane, remote)
        finally:
            self._lanes.pop(lane, None)
            drop(remote[1])

    def _admit(self, partner: PeerId) -> _Lane:
        """Register one more lane, of the running task. Raises BadMessage when that would be too many."""
        own = [lane for lane in self._lanes if lane.partner == partner]
        most = LANES_PER_PARTNER if any(lane.is_heard for lane in own) else SILENT_LANES
        if len(own) >= most or (len(self._lanes) >= LANES and not self._displace()):
            raise BadMessage(f"too many lanes from {partner.short()}")
        task = asyncio.current_task()
        assert task is not None
        lane = _Lane(partner, task)
        self._lanes[lane] = None
        return lane

    def _displace(self) -> bool:
        """Drop the oldest lane that carries no conversation; return whether there was one."""
        idle = next((lane for lane in self._lanes if lane.is_over or not lane.is_heard), None)
        if idle is None:
            return False
        del self._lanes[idle]
        idle.drop()
        return True

    async def _connect(self, lane: _Lane, remote: Pair) -> None:
        """Carry a lane to the server, its port registered from before the connection until after its end."""
        with socket.socket() as caller:
            caller.setblocking(False)
            caller.bind(("127.0.0.1", 0))
            port = caller.getsockname()[1]
            self._by_port[port] = lane
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
