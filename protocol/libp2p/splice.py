"""Bytes from one local socket to another and back, until either ends. Knows nothing of what they mean."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_BYTES = 256 * 1024
FLUSH_S = 2.0


@dataclass(slots=True)
class CarriedBytes:
    """Bytes given to and taken from p2pd, HTTP/2 framing included."""

    sent: int = 0
    received: int = 0


async def splice(local: Pair, remote: Pair, carried: CarriedBytes) -> None:
    """Copy both ways until one side ends or breaks, write out what was read by then, and close both.

    Cancelling drops both at once. A slow reader on either side stops the other side's writer (back-pressure).
    """

    async def out() -> None:
        while data := await local[0].read(READ_BYTES):
            carried.sent += len(data)
            remote[1].write(data)
            await remote[1].drain()

    async def back() -> None:
        while data := await remote[0].read(READ_BYTES):
            carried.received += len(data)
            local[1].write(data)
            await local[1].drain()

    ways = [asyncio.create_task(out()), asyncio.create_task(back())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(_close(local[1]), _close(remote[1]))
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (local, remote):
            drop(writer)
        await asyncio.gather(*ways, return_exceptions=True)  # a broken connection ends the splice like a closed one


def drop(writer: asyncio.StreamWriter) -> None:
    """Close at once, unless closing has begun. (To abort a transport that has just closed raises in CPython 3.11.)"""
    if not writer.is_closing():
        writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close after what was written has gone out, or after FLUSH_S; at once when cancelled."""
    writer.close()
    try:
        async with asyncio.timeout(FLUSH_S):
            await writer.wait_closed()
    except (TimeoutError, asyncio.CancelledError) as error:
        writer.transport.abort()
        if isinstance(error, asyncio.CancelledError):
            raise
    except OSError:  # it broke, and so is closed
        pass
