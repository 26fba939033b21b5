"""The link between node and trainer: JSON lines over a Unix socket in the private runtime folder.

The trainer listens; its inner steps never wait for the node. The node connects, again and again, so either process may restart alone. A
reply finds its request by their common subject, because only some requests wait for a step boundary. When the link breaks, every open
request fails on the node's side (`LinkLost`), and the trainer drops every open meeting. A side that sends a malformed line, or does not
read, is disconnected: the other end handles that like its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.messages.terms import ModelPlan

SOCKET_NAME = "trainer.sock"
RECONNECT_S = 0.2
STAGE_WAIT_S = 1.0  # at most, between two looks for a node
LINE_BYTES = 1 << 23  # the longest line: a plan of limits.FRAGMENTS fragments
UNSENT_BYTES = LINE_BYTES  # kept for a node that does not read, beyond the socket's buffer; then it is disconnected
_RECEIVE_BYTES = 1 << 16

log = logging.getLogger(__name__)


class LinkLost(Exception):
    """The link to the trainer broke before the reply came."""


class TrainerEnd:
    """The trainer's side: one listening socket, at most one node. `poll` belongs to one thread; any thread may call `send`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET_NAME
        self._path.unlink(missing_ok=True)
        self._listener = self._bound()
        self._node: socket.socket | None = None
        self._num_sessions = 0
        self._using = threading.Lock()
        self._cannot_accept = False  # a node that connects
        self._has_ended = False  # the node has disconnected; some of its requests may still be unread
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def session(self) -> int:
        """Return the number of the connected node, 0 for none. Its change voids everything that the former node has begun."""
        return self._num_sessions if self._node is not None else 0

    def poll(self) -> list[messages.Request]:
        """Return the requests since the last call; accept a node that connects. Returns at once.

        The last requests of a node that died are still returned, and its session ends at the next call: partners may rely on them.
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

    def send(self, record: messages.Answer, session: int) -> None:
        """Send a record to the node of this session, or keep it until the socket accepts it; do nothing if that node is gone."""
        with self._using:
            if session and session == self.session and not self._has_ended:
                self._unsent += messages.ANSWERS.write(record)
                self._flush()

    def wait(self, seconds: float) -> None:
        """Wait until the node sends something or `seconds` pass: for a thread with nothing else to do."""
        poll = select.poll()
        if not self._cannot_accept:  # else a connection that waits would end the wait at once
            poll.register(self._node or self._listener, select.POLLIN)
        poll.poll(seconds * 1000)

    def wait_for_stage(self, fits: messages.Fits) -> int:
        """Tell every node that connects which stages fit, until one replies; return the stage to hold. In a staged run, before any `poll`.

        Raises ValueError for a stage that does not fit.
        """
        told = 0
        while True:
            for request in self.poll():
                if not isinstance(request, messages.Hold):
                    continue
                if request.stage not in fits.stages:
                    raise ValueError(f"the node chose stage {request.stage}, which does not fit")
                return request.stage
            if self.session != told:
                told = self.session
                self.send(fits, told)
            self.wait(STAGE_WAIT_S)

    def close(self) -> None:
        """Close both sockets and remove the file."""
        self._hang_up()
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _bound(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
        except OSError:
            listener.close()
            raise
        listener.listen(1)
        listener.setblocking(False)
        return listener

    def _accept(self) -> None:
        if not self._path.exists():  # the system has removed the runtime folder; the supervisor makes it again
            with contextlib.suppress(OSError):
                self._listener, gone = self._bound(), self._listener
                gone.close()
        try:
            self._node, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # this process has no descriptor left, or the system no memory: the node's connection waits
            if not self._cannot_accept:
                log.warning("the node cannot be answered yet: %s", error.strerror)
            self._cannot_accept = True
            return
        self._cannot_accept = False
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
            self._unsent.clear()  # the node is gone; its last requests are still to be read

    def _requests(self) -> list[messages.Request]:
        end = self._received.rfind(b"\n") + 1
        *lines, _ = bytes(self._received[:end]).split(b"\n")
        del self._received[:end]
        if len(self._received) > LINE_BYTES:
            self._hang_up("the node sent an endless line")
            return []
        try:
            return [messages.REQUESTS.read(line) for line in lines]
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
    """The node's side: `connect` once, then `run`, which keeps the connection. Requests keep their order. Belongs to one event loop."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET_NAME
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int | str, asyncio.Future[messages.Reply | messages.HopReply]] = {}  # by the request's subject
        self._plan: ModelPlan | None = None  # of the first trainer
        self.choose_stage: Callable[[tuple[int, ...]], Awaitable[int]] | None = None
        """In a staged run: chooses one of the stages that fit."""
        self.fits: tuple[int, ...] = ()
        """In a staged run: the stages that fit, from 0, as the trainer has told when it connected."""

    @property
    def connected(self) -> bool:
        """Whether the trainer is connected, as far as known."""
        return self._open_writer is not None

    @property
    def _open_writer(self) -> asyncio.StreamWriter | None:
        """Return the writer, None once it closes: a closing transport of uvloop raises on write."""
        return None if self._writer is None or self._writer.is_closing() else self._writer

    async def request(self, request: messages.AnsweredRequest) -> messages.Reply:
        """Send a request and wait for its reply, for up to a step boundary. One request at a time may wait for each meeting or file.

        Cancel-safe: a later reply is ignored. Raises LinkLost.
        """
        reply = await self._ask(request)
        assert isinstance(reply, messages.Reply), "no hop has the subject of a meeting or a file"
        return reply

    async def pass_hop(self, request: messages.HopRequest) -> messages.HopReply:
        """Send a request about a hop and wait for its reply, as `request`: for as long as the trainer has other hops to compute."""
        reply = await self._ask(request)
        assert isinstance(reply, messages.HopReply), "only a hop has the subject of a hop"
        return reply

    async def _ask(self, request: messages.AnsweredRequest | messages.HopRequest) -> messages.Reply | messages.HopReply:
        writer = self._open_writer
        if writer is None:
            raise LinkLost("the trainer is not there")
        about = messages.subject(request)
        if about in self._waiting:
            raise ValueError(f"{about} waits for the reply to an earlier request")
        reply: asyncio.Future[messages.Reply | messages.HopReply] = asyncio.get_running_loop().create_future()
        self._waiting[about] = reply
        writer.write(messages.REQUESTS.write(request))
        return await reply

    def notify(self, request: messages.Notification) -> None:
        """Send a request that has no reply; do nothing when the link is down."""
        if (writer := self._open_writer) is not None:
            writer.write(messages.REQUESTS.write(request))

    async def connect(self) -> ModelPlan:
        """Connect to the trainer, and return the plan that it sends first. Cancel-safe.

        Raises GossamerError where a later trainer holds another stage than the first: all that rests on the plan must be made anew.
        """
        while True:
            with contextlib.suppress(OSError):
                self._reader, writer = await asyncio.open_unix_connection(str(self._path), limit=LINE_BYTES)
                try:
                    first = await self._next()
                    if isinstance(first, messages.Fits) and self.choose_stage is not None:
                        writer.write(messages.REQUESTS.write(messages.Hold(await self.choose_stage(first.stages))))
                        first = await self._next()
                    if isinstance(first, messages.Built):
                        if self._plan not in (None, first.plan):
                            raise GossamerError("the trainer came back with another stage, so the node starts again")
                        self._plan, self._writer, self.fits = first.plan, writer, first.fits
                        return first.plan
                finally:
                    if self._writer is not writer:
                        writer.close()
            await asyncio.sleep(RECONNECT_S)

    async def run(self, on_report: Callable[[messages.TrainerReport], None]) -> None:
        """Pass on the trainer's reports, and connect again whenever the link breaks, until cancelled. Raises as `connect`."""
        while True:
            try:
                await self._read(on_report)
            finally:
                self._hang_up()
            await asyncio.sleep(RECONNECT_S)
            await self.connect()

    async def _read(self, on_report: Callable[[messages.TrainerReport], None]) -> None:
        while (record := await self._next()) is not None:
            if isinstance(record, messages.TrainerReport):
                on_report(record)
            elif not self._answer(record):
                log.warning("link to the trainer closed: a %s without a request", type(record).__name__)
                return

    async def _next(self) -> messages.Answer | None:
        try:
            line = await self._reader.readline()
            return messages.ANSWERS.read(line) if line.endswith(b"\n") else None  # half a line: the trainer died in the middle of it
        except ConnectionError:
            return None
        except ValueError as error:
            log.warning("link to the trainer closed: %s", error)
            return None

    def _answer(self, reply: messages.Reply | messages.HopReply) -> bool:
        waiting = self._waiting.pop(messages.subject(reply), None)
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
