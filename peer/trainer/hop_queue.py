"""The node's requests about hops, waiting for the trainer's thread: backward before forward, forward before the beginning of new ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from gossamer.peer.link.messages import Backward, Begin, Declined, Forward, HopReply, HopRequest

T = TypeVar("T")
WITHDRAWN: Final = "the hop is withdrawn"


class HopQueue:
    """Requests about hops, in the order in which they are to be carried out. Safe to use from any thread.

    `send` takes a reply and the link's session from which its request came; it may be called from any thread.
    """

    def __init__(self, send: Callable[[HopReply, int], None]) -> None:
        self.send = send
        self._waiting: dict[type[HopRequest], deque[tuple[HopRequest, int]]] = {kind: deque() for kind in (Backward, Forward, Begin)}
        self._changed = threading.Condition()
        self._is_interrupted = False
        self._lost: set[int] = set()
        self._lost_all = False

    def put(self, request: HopRequest, session: int) -> None:
        """Add a request of the node."""
        with self._changed:
            self._waiting[type(request)].append((request, session))
            self._changed.notify()

    def forget(self, hop: int) -> None:
        """Decline what still waits about a hop that the node has lost."""
        with self._changed:
            self._lost.add(hop)
        self._decline(lambda request: request.hop == hop, WITHDRAWN)

    def decline_all(self, reason: str) -> None:
        """Decline everything that waits."""
        self._decline(lambda request: True, reason)

    def _decline(self, is_declined: Callable[[HopRequest], bool], reason: str) -> None:
        with self._changed:
            declined = [item for requests in self._waiting.values() for item in requests if is_declined(item[0])]
            for item in declined:
                self._waiting[type(item[0])].remove(item)
        for request, session in declined:
            self.send(Declined(request.hop, reason), session)

    def forget_all(self) -> None:
        """Forget every request and hop: their node is gone."""
        with self._changed:
            self._lost_all = True
            for requests in self._waiting.values():
                requests.clear()

    def remove_lost(self, kept: dict[int, T]) -> None:
        """Remove the hops that were forgotten since the last call from what is kept of hops by number."""
        with self._changed:
            for hop in list(kept) if self._lost_all else self._lost:
                kept.pop(hop, None)
            self._lost_all, self._lost = False, set()

    def interrupt(self) -> None:
        """End the present or the next `take` at once: the trainer has something else to do first."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify()

    def take(self, seconds: float, *, begins: bool) -> tuple[HopRequest, int] | None:
        """Return the next request and its session; None after `seconds` without one, or an interrupt. `begins`: it may be a Begin."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_interrupted or self._next(begins=begins) is not None, seconds)
            if self._is_interrupted:
                self._is_interrupted = False
                return None
            requests = self._next(begins=begins)
            return requests.popleft() if requests is not None else None

    def _next(self, *, begins: bool) -> deque[tuple[HopRequest, int]] | None:
        return next((requests for kind, requests in self._waiting.items() if requests and (begins or kind is not Begin)), None)
