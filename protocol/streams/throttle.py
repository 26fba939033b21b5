"""Rates that a peer keeps to: one bucket for all it sends, one for all it receives, whatever carries the streams.

Who sends is let go at once and pays afterwards: the next one waits until what went before is paid for. Small frames never wait, so that a
greeting or a verdict does not miss its deadline behind somebody else's payload; the chunks pay for them. Who gives away its state is
patient: it waits while meetings fill the line, for these have deadlines.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SMALL_FRAME_BYTES
from gossamer.protocol.streams.transport import Purpose, Stream, StreamHandler, Transport

SAVED_S = 1.0  # how much of an unused rate may be used later
CALM_SHARE = 0.1  # of a frame's own time that nobody else may have used, before a patient one goes


class Bucket:
    """A rate in bytes a second, and who waits for it. Belongs to one event loop."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self.num_bytes = 0
        """All that has passed so far."""
        self._paid_s = -math.inf  # loop time until which all that has passed is paid for
        self._patience = asyncio.Lock()

    def count(self, num_bytes: float) -> None:
        """Note bytes that do not wait; others pay for them."""
        now_s = asyncio.get_running_loop().time()
        self.num_bytes += int(num_bytes)
        self._paid_s = max(self._paid_s, now_s - SAVED_S) + num_bytes / self.bytes_per_s

    async def take(self, num_bytes: int, *, is_patient: bool) -> None:
        """Let a frame pass when what passed before is paid for. Cancel-safe: one that has not passed is not paid for."""
        if math.isinf(self.bytes_per_s) or num_bytes <= SMALL_FRAME_BYTES:
            self.count(num_bytes)
        elif is_patient:
            async with self._patience:
                await self._until_paid(CALM_SHARE * num_bytes / self.bytes_per_s)
                self.count(num_bytes)
        else:
            await self._until_turn(num_bytes)

    async def _until_turn(self, num_bytes: int) -> None:
        """Pay now, and wait for what was paid before: who comes later waits for us."""
        waits_s = self._paid_s - asyncio.get_running_loop().time()
        self.count(num_bytes)
        try:
            await asyncio.sleep(max(0.0, waits_s))
        except asyncio.CancelledError:
            self.count(-num_bytes)
            raise

    async def _until_paid(self, calm_s: float) -> None:
        """Wait until all is paid for, and has been for so long."""
        while True:
            left_s = self._paid_s + calm_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)


class Throttle:
    """The rates of one peer, and a transport that keeps to them. Inbound streams pass through `handler`."""

    def __init__(self) -> None:
        self.up = Bucket()
        self.down = Bucket()

    def over(self, transport: Transport) -> Transport:
        """Return a transport whose streams keep to the rates."""
        return _Throttled(self, transport)

    def handler(self, inner: StreamHandler) -> StreamHandler:
        """Return a handler that has inbound streams keep to the rates."""

        async def handle(purpose: Purpose, stream: Stream) -> None:
            self.attach(purpose, stream)
            await inner(purpose, stream)

        return handle

    def attach(self, purpose: Purpose, stream: Stream) -> None:
        """Have a stream keep to the rates."""
        is_patient = purpose is Purpose.FETCH

        async def up(num_bytes: int) -> None:
            await self.up.take(num_bytes, is_patient=is_patient)

        async def down(num_bytes: int) -> None:
            await self.down.take(num_bytes, is_patient=is_patient)

        stream.pass_gates(up, down)


class _Throttled:
    def __init__(self, throttle: Throttle, transport: Transport) -> None:
        self._throttle = throttle
        self._transport = transport

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`. Raises Unreachable."""
        stream = await self._transport.connect(partner, addresses, purpose)
        self._throttle.attach(purpose, stream)
        return stream
