"""Rate limits of a peer: one for all bytes that it sends, one for all bytes that it receives, over any transport.

Small frames never wait, so a Hello or a Verdict does not miss its deadline behind a payload; later chunks wait longer. A chunk of a fetch
waits until no meeting uses the line.

Received small frames have an allowance of their own: each takes longer to read than to write, so a flood would cost a core.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from gossamer.protocol.addresses import network_of, route
from gossamer.protocol.budgets import Allowance, Budgets
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SMALL_FRAME_BYTES
from gossamer.protocol.streams.transport import Gate, Purpose, Stream, StreamHandler, Transport
from gossamer.protocol.tasks import loop_s

SAVED_S = 1.0  # seconds of unused rate that may be used later
MOST_OWED_S = 10.0  # that streams pay for bytes outside of streams: a flood of those must not stop all meetings long after its end
SMALL_FROM_ALL = Allowance(2.0**53, 1.0)  # frames of at most SMALL_FRAME_BYTES: no limit
SMALL_FROM_ONE = Allowance(4000, 4.0)  # fifty microseconds each, and more where they are carried out; a gigabit of chunks needs half of it
SMALL_FROM_NETWORK = Allowance(16_000, 8.0)  # identities are free
SMALL_AGAIN_S = 0.05  # between two looks whether one more may pass
CALM_SHARE = 0.1  # a low-priority frame waits until the line was idle for this share of the frame's own time


class Bucket:
    """A rate limit in bytes per second, and the frames that wait for it. Used on one event loop."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self.num_bytes = 0  # bytes that have passed so far
        self._paid_s = -math.inf  # loop time at which all bytes so far are paid for, at the limited rate
        self._low_priority = asyncio.Lock()

    def count(self, num_bytes: float) -> None:
        """Count bytes that pass without waiting. Later frames wait longer instead."""
        now_s = loop_s()
        self.num_bytes += int(num_bytes)
        self._paid_s = max(self._paid_s, now_s - SAVED_S) + num_bytes / self.bytes_per_s

    def owe(self, num_bytes: int) -> None:
        """Count bytes that have passed outside of streams. Later frames wait longer instead, for MOST_OWED_S at most."""
        most_s = max(self._paid_s, loop_s() + MOST_OWED_S)
        self.count(num_bytes)
        self._paid_s = min(self._paid_s, most_s)

    async def take(self, num_bytes: int, *, is_low_priority: bool) -> None:
        """Wait until a frame may pass, and count it. Cancel-safe: a cancelled frame is not counted."""
        if math.isinf(self.bytes_per_s) or num_bytes <= SMALL_FRAME_BYTES:
            self.count(num_bytes)
        elif is_low_priority:
            async with self._low_priority:
                await self._until_paid(CALM_SHARE * num_bytes / self.bytes_per_s)
                self.count(num_bytes)
        else:
            await self._until_turn(num_bytes)

    async def _until_turn(self, num_bytes: int) -> None:
        """Count the frame now, then wait until all earlier frames are paid for. Later frames queue behind it."""
        wait_s = self._paid_s - loop_s()
        self.count(num_bytes)
        try:
            await asyncio.sleep(max(0.0, wait_s))
        except asyncio.CancelledError:
            self.count(-num_bytes)
            raise

    async def _until_paid(self, calm_s: float) -> None:
        """Wait until all frames have been paid for since `calm_s` seconds."""
        while True:
            left_s = self._paid_s + calm_s - loop_s()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)


class Throttle:
    """The rate limits of one peer, for outbound and inbound streams."""

    def __init__(self) -> None:
        self.up = Bucket()
        self.down = Bucket()
        self._small = Budgets(loop_s, SMALL_FROM_ALL, SMALL_FROM_ONE, SMALL_FROM_NETWORK)

    def limited_transport(self, transport: Transport) -> Transport:
        """Return a transport whose streams keep to the limits."""
        return _Throttled(self, transport)

    def limited_handler(self, inner: StreamHandler) -> StreamHandler:
        """Return a stream handler that applies the limits and then calls `inner`."""

        async def handle(purpose: Purpose, stream: Stream) -> None:
            self.attach(purpose, stream)
            await inner(purpose, stream)

        return handle

    def attach(self, purpose: Purpose, stream: Stream) -> None:
        """Apply the limits to a stream."""
        is_low_priority = purpose is Purpose.FETCH
        up, down = (partial(bucket.take, is_low_priority=is_low_priority) for bucket in (self.up, self.down))
        stream.set_gates(up, partial(self._receive, stream, down))

    async def _receive(self, stream: Stream, take: Gate, num_bytes: int) -> None:
        """Wait until a frame may be read: meanwhile the partner is slowed down. Cancel-safe."""
        partner, seen = stream.partner, stream.observed
        network = network_of(seen) if seen and route(seen) == "direct" else partner
        while True:
            if num_bytes > SMALL_FRAME_BYTES or self._small.take(1, partner, network):
                return await take(num_bytes)
            await asyncio.sleep(SMALL_AGAIN_S)


class _Throttled:
    def __init__(self, throttle: Throttle, transport: Transport) -> None:
        self._throttle = throttle
        self._transport = transport

    async def connect(self, partner: PeerId, addresses: Sequence[str], purpose: Purpose) -> Stream:
        """Open a stream to `partner`. Raises Unreachable."""
        stream = await self._transport.connect(partner, addresses, purpose)
        self._throttle.attach(purpose, stream)
        return stream
