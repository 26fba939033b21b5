"""hivemind's client for our p2pd process: the unary calls of the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from gossamer.protocol.libp2p.hivemind_imports import P2P, Client, Multiaddr, P2PDaemonError
from gossamer.protocol.libp2p.p2pd import MESSAGE_BYTES
from gossamer.protocol.tasks import cancel


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's client of our p2pd. After `close`, its calls fail instead of waiting forever."""

    @classmethod
    async def attach(cls, socket: Path) -> Self:
        """Open the persistent connection to p2pd that carries the directory's calls. `socket` is p2pd's control socket."""
        self: Self = cls()
        self._alive = True
        self._daemon_listen_maddr = Multiaddr(f"/unix{socket}")
        self._client_listen_maddr = Multiaddr(f"/unix{socket}.unused")  # unused: tunnel.py handles streams
        self._client = await Client.create(self._daemon_listen_maddr, self._client_listen_maddr, persistent_conn_max_msg_size=MESSAGE_BYTES)
        self._client.control._pending_calls = _PendingCalls()
        await self._ping_daemon()
        return self

    @property
    def is_broken(self) -> bool:
        """Whether the connection to p2pd has ended."""
        return bool(self._client.control._read_task.done())

    def tidy(self) -> None:
        """Delete the finished tasks of inbound calls that their callers cancelled, which hivemind leaks. Call it periodically."""
        tasks = self._client.control._handler_tasks
        for call in [call for call, task in tasks.items() if task.done()]:
            del tasks[call]

    async def close(self) -> None:
        """End every pending call, hivemind's background tasks and the connection."""
        control = self._client.control
        control.call_unary_handler = _closed
        for waiting in list(control._pending_calls.values()):
            if not waiting.done():
                waiting.set_exception(P2PDaemonError("closed"))
        tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
        self._terminate()
        await cancel(*tasks)


class _PendingCalls(dict[Any, Any]):
    """Pending calls. It hides cancelled calls, because a reply to one of them crashes hivemind's reader task."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


async def _closed(*_: object) -> bytes:
    raise P2PDaemonError("closed")
