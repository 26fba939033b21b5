"""The node's requests about hops, waiting for the trainer's thread: backward before forward, forward before the beginning of new ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from gossamer.peer.link.messages import Backward, Begin, Declined, Forward, HopReply, HopRequest


class HopQueue:
    """Requests about hops, in the order in which they are to be carried out. Safe to use from any thread.

    `send` takes a reply and the link's session from which its request came; it may be called from any thread.
    """

    def __init__(self, send: Callable[[HopReply, int], None]) -> None:
        self.send = send
        self._waiting: dict[type[HopRequest], deque[tuple[HopRequest, int]]] = {kind: deque() for kind in (Backward, Forward, Begin)}
        self._changed = threading.Condition()
        self._is_interrupted = False

    def put(self, request: HopRequest, session: int) -> None:
        """Add a request of the node."""
        with self._changed:
            self._waiting[type(request)].append((request, session))
            self._changed.notify()

    def decline_all(self, reason: str) -> None:
        """Decline everything that waits."""
        for request, session in self.clear():
            self.send(Declined(request.hop, reason), session)

    def clear(self) -> list[tuple[HopRequest, int]]:
        """Remove and return everything that waits."""
        with self._changed:
            removed = [item for requests in self._waiting.values() for item in requests]
            for requests in self._waiting.values():
                requests.clear()
        return removed

    def interrupt(self) -> None:
        """End the present or the next `take` at once: the trainer has something else to do first."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify()

    def take(self, seconds: float) -> tuple[HopRequest, int] | None:
        """Return the next request and its session; None after `seconds` without one, or an interrupt."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_interrupted or any(self._waiting.values()), seconds)
            if self._is_interrupted:
                self._is_interrupted = False
                return None
            return next((requests.popleft() for requests in self._waiting.values() if requests), None)
