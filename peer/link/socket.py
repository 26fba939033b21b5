"""The link between node and trainer: JSON lines over a Unix socket in the private runtime folder.

The trainer listens; its inner steps never wait for the node. The node connects, again and again, so either may be restarted alone. A
reply finds its request by what both are about, for some requests wait for a step boundary and some do not. When the link breaks, every
request in flight fails on the node's side (`LinkLost`) and every open meeting is dropped on the trainer's. A side that says what cannot be
understood, or does not read, is hung up on: to both ends that is the same as the other's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from gossamer.peer.link import records as ask
from gossamer.protocol.messages.terms import ModelPlan

SOCKET_NAME = "trainer.sock"
RECONNECT_S = 0.2
LINE_BYTES = 1 << 20  # the longest line: a bitmap of failed blocks in hex
UNSENT_BYTES = 1 << 20  # kept for a node that does not read, beside what the socket holds; then it is hung up on
_RECEIVE_BYTES = 1 << 16

log = logging.getLogger(__name__)


class LinkLost(Exception):
    """The link to the trainer broke before the reply came."""


class TrainerEnd:
    """The trainer's side: one listening socket, at most one node.

    Nodes come and go in `poll` only, which belongs to one thread; `send` may be called from any.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / SOCKET_NAME
        path.unlink(missing_ok=True)
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._node: socket.socket | None = None
        self._num_sessions = 0
        self._using = threading.Lock()
        self._has_ended = False  # the node has hung up; there may be something left that it said
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def session(self) -> int:
        """Return the number of the node that is there, 0 for none.

        One that differs from the last means that all which the former node had begun has ended.
        """
        return self._num_sessions if self._node is not None else 0

    def poll(self) -> list[ask.Request]:
        """Return the requests that came since the last call; accept a node that knocks. Returns at once.

        What a node said before it died is still returned, and the session ends only at the call after: its partners may count on it.
        """
        with self._using:
            if self._node is None:
                self._accept()
            self._receive()
            self._flush()
            requests = self._requests() if self._received else []
            if self._has_ended and not requests:
                self._hang_up()
            return requests

    def send(self, record: ask.Answer, session: int) -> None:
        """Send a record to the node of this session, or keep it until the socket takes it; nothing happens when that node is gone."""
        with self._using:
            if session and session == self.session and not self._has_ended:
                self._unsent += ask.ANSWERS.write(record)
                self._flush()

    def wait(self, seconds: float) -> None:
        """Wait until the node says something or `seconds` pass: for a thread that has nothing else to do."""
        poll = select.poll()
        poll.register(self._node or self._listener, select.POLLIN)
        poll.poll(seconds * 1000)

    def close(self) -> None:
        """Close both sockets and remove the file."""
        self._hang_up()
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._node, _ = self._listener.accept()
            self._node.setblocking(False)
            self._num_sessions += 1

    def _receive(self) -> None:
        try:
            while self._node is not None and len(self._received) <= LINE_BYTES:
                data = self._node.recv(_RECEIVE_BYTES)
                self._received += data
                if not data:
                    self._has_ended = True
                    return
        except BlockingIOError:
            return
        except OSError:
            self._has_ended = True

    def _flush(self) -> None:
        try:
            while self._node is not None and self._unsent:
                del self._unsent[: self._node.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > UNSENT_BYTES:
                log.warning("link to the node closed: the node does not read")
                self._has_ended = True
        except OSError:
            self._unsent.clear()  # nobody hears it; what the node said last is still to be read

    def _requests(self) -> list[ask.Request]:
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > LINE_BYTES:
            self._hang_up("the node sent a line without end")
            return []
        try:
            return [ask.REQUESTS.read(line) for line in lines]
        except ValueError as error:
            self._hang_up(str(error))
            return []

    def _hang_up(self, reason: str = "") -> None:
        if reason:
            log.warning("link to the node closed: %s", reason)
        if self._node is not None:
            self._node.close()
        self._node = None
        self._has_ended = False
        self._received.clear()
        self._unsent.clear()


class NodeEnd:
    """The node's side: `connect` once, then `run`, which keeps the connection. Everything belongs to one event loop.

    Whatever is asked and told reaches the trainer in the order in which it was begun.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET_NAME
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int | str, asyncio.Future[ask.Reply]] = {}  # by what the request is about

    @property
    def connected(self) -> bool:
        """Whether the trainer is there."""
        return self._writer is not None

    async def request(self, request: ask.AnsweredRequest) -> ask.Reply:
        """Ask, and wait for the reply: at once, or of the next step boundary. One request at a time may wait about one meeting or file.

        Cancel-safe: a reply that comes later is passed over. Raises LinkLost.
        """
        if self._writer is None:
            raise LinkLost("the trainer is not there")
        about = ask.subject(request)
        if about in self._waiting:
            raise ValueError(f"{about} waits for the reply to an earlier request")
        reply: asyncio.Future[ask.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[about] = reply
        self._writer.write(ask.REQUESTS.write(request))
        return await reply

    def tell(self, request: ask.ToldRequest) -> None:
        """Say something that has no reply; nothing happens when the link is down."""
        if self._writer is not None:
            self._writer.write(ask.REQUESTS.write(request))

    async def connect(self) -> ModelPlan:
        """Wait for the trainer, and return what it says first. Cancel-safe."""
        while True:
            try:
                self._reader, writer = await asyncio.open_unix_connection(str(self._path), limit=LINE_BYTES)
            except OSError:
                await asyncio.sleep(RECONNECT_S)
                continue
            try:
                if isinstance(built := await self._next(), ask.Built):
                    self._writer = writer
                    return built.plan
            finally:
                if self._writer is not writer:
                    writer.close()
            await asyncio.sleep(RECONNECT_S)

    async def run(self, on_notice: Callable[[ask.Notice], None]) -> None:
        """Pass on what the trainer says unasked, and connect again whenever the link breaks, until cancelled."""
        while True:
            try:
                await self._read(on_notice)
            finally:
                self._hang_up()
            await asyncio.sleep(RECONNECT_S)
            await self.connect()

    async def _read(self, on_notice: Callable[[ask.Notice], None]) -> None:
        while (record := await self._next()) is not None:
            if isinstance(record, ask.Notice):
                on_notice(record)
            elif not self._answer(record):
                log.warning("link to the trainer closed: a %s that nobody asked for", type(record).__name__)
                return

    async def _next(self) -> ask.Answer | None:
        """Return the next record; None when there will be none."""
        try:
            line = await self._reader.readline()
            return ask.ANSWERS.read(line) if line.endswith(b"\n") else None  # half a line: the trainer died in the middle of it
        except ConnectionError:
            return None
        except ValueError as error:
            log.warning("link to the trainer closed: %s", error)
            return None

    def _answer(self, reply: ask.Reply) -> bool:
        waiting = self._waiting.pop(ask.subject(reply), None)
        if waiting is None:
            return False
        if not waiting.done():
            waiting.set_result(reply)
        return True

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        while self._waiting:
            _, waiting = self._waiting.popitem()
            if not waiting.done():
                waiting.set_exception(LinkLost("the trainer went away"))
