"""Bytes from one local socket to another and back, until either ends, and whether they still move. Knows nothing of what they mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from gossamer.protocol.tasks import cancel

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_BYTES = 256 * 1024
BULK_BYTES = range(1024, 64 * 1024)  # a piece of this size is one of many, and not of a fast line's
GATHER_S = 0.008  # for more of them to come in: each costs both sides of a socket a turn
FLUSH_S = 2.0  # without a byte taken
FLUSH_MOST_S = 60.0


@dataclass(slots=True)
class CarriedBytes:
    """Bytes given to and taken from p2pd, HTTP/2 framing included."""

    sent: int = 0
    received: int = 0

    @property
    def both(self) -> int:
        """Bytes either way."""
        return self.sent + self.received


async def splice(local: Pair, remote: Pair, *counts: CarriedBytes) -> None:
    """Copy both ways until one side ends or breaks, write out what was read by then, and close both; all of `counts` count.

    Raises our own bugs. Cancelling drops both at once. A slow reader on either side stops the other side's writer (back-pressure).
    """

    async def out() -> None:
        while (data := await local[0].read(READ_BYTES)) and not remote[1].is_closing():  # uvloop's do not take what asyncio's ignore
            for count in counts:
                count.sent += len(data)
            remote[1].write(data)
            await remote[1].drain()

    async def back() -> None:
        while (data := await remote[0].read(READ_BYTES)) and not local[1].is_closing():
            for count in counts:
                count.received += len(data)
            local[1].write(data)
            await local[1].drain()
            if len(data) in BULK_BYTES:
                await _gather(cast(asyncio.Transport, remote[1].transport))  # a socket's reads as well as it writes

    ways = [asyncio.create_task(out()), asyncio.create_task(back())]
    try:
        over, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(_close(local[1]), _close(remote[1]))
        for way in over:
            with suppress(OSError):  # a broken connection ends the splice like a closed one
                way.result()
    finally:
        for _, writer in (local, remote):
            drop(writer)
        await cancel(*ways)


async def _gather(transport: asyncio.Transport) -> None:
    """Leave what comes in where it is for a moment. The transport reads on afterwards, unless it is closing."""
    transport.pause_reading()
    await asyncio.sleep(GATHER_S)
    if not transport.is_closing():
        transport.resume_reading()


def drop(writer: asyncio.StreamWriter) -> None:
    """Close at once, unless closing has begun. (To abort a transport that has just closed raises in CPython 3.11.)"""
    if not writer.is_closing():
        writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close after what was written has gone out, or when nobody takes it any more; at once when cancelled."""
    writer.close()
    try:
        await while_moving(writer.wait_closed(), writer.transport.get_write_buffer_size, FLUSH_S, FLUSH_MOST_S)
    except (TimeoutError, asyncio.CancelledError) as error:
        writer.transport.abort()
        if isinstance(error, asyncio.CancelledError):
            raise
    except OSError:  # it broke, and so is closed
        pass


async def while_moving(work: Awaitable[object], measure: Callable[[], int], quiet_s: float, most_s: float) -> None:
    """Wait for `work` as long as `measure` changes at least every `quiet_s`, and no longer than `most_s`; cancel it then.

    Raises TimeoutError, and what `work` raises.
    """
    task = asyncio.ensure_future(work)
    until_s = asyncio.get_running_loop().time() + most_s
    try:
        while not task.done():
            before, left_s = measure(), until_s - asyncio.get_running_loop().time()
            await asyncio.wait([task], timeout=min(quiet_s, left_s))
            if not task.done() and (measure() == before or left_s <= quiet_s):
                raise TimeoutError
        task.result()
    finally:
        await cancel(task)
