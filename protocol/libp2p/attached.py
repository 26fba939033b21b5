"""hivemind's client of a p2pd that we started: calls of one request and one answer, which are the directory's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from gossamer.protocol.libp2p.hivemind_imports import P2P, Client, Multiaddr, P2PDaemonError
from gossamer.protocol.libp2p.p2pd import MESSAGE_BYTES
from gossamer.protocol.tasks import cancel


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's client of our p2pd, whose calls fail once it is closed instead of waiting for ever."""

    @classmethod
    async def attach(cls, socket: Path) -> Self:
        """Open the persistent connection over which DHT messages go."""
        self: Self = cls()
        self._alive = True
        self._daemon_listen_maddr = Multiaddr(f"/unix{socket}")
        self._client_listen_maddr = Multiaddr(f"/unix{socket}.unused")  # streams go through tunnel.py
        self._client = await Client.create(self._daemon_listen_maddr, self._client_listen_maddr, persistent_conn_max_msg_size=MESSAGE_BYTES)
        self._client.control._pending_calls = _WaitingCalls()
        await self._ping_daemon()
        return self

    @property
    def is_broken(self) -> bool:
        """Whether nothing comes over the connection any more."""
        return bool(self._client.control._read_task.done())

    def tidy(self) -> None:
        """Forget inbound calls that their callers cancelled, which hivemind keeps for ever; call now and then."""
        tasks = self._client.control._handler_tasks
        for call in [call for call, task in tasks.items() if task.done()]:
            del tasks[call]

    async def close(self) -> None:
        """End every call under way, here and in hivemind's own tasks, and the connection."""
        control = self._client.control
        control.call_unary_handler = _closed
        for waiting in list(control._pending_calls.values()):
            if not waiting.done():
                waiting.set_exception(P2PDaemonError("closed"))
        tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
        self._terminate()
        await cancel(*tasks)


class _WaitingCalls(dict[Any, Any]):
    """Calls under way. hivemind's reader dies of an answer to a call that has just been cancelled; here such a call is not found."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


async def _closed(*_: object) -> bytes:
    raise P2PDaemonError("closed")
