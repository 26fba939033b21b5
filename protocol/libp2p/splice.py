"""Copy bytes between two local sockets in both directions, and wait for work as long as it makes progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from gossamer.protocol.tasks import cancel, loop_s

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_BYTES = 256 * 1024
BULK_BYTES = range(1024, 64 * 1024)  # reads of this size belong to a bulk transfer over a line of moderate speed
GATHER_S = 0.008  # pause after such a read, so that the next read is larger: each read costs both processes a wake-up
FLUSH_S = 2.0  # idle timeout of flushing a socket
FLUSH_MOST_S = 60.0  # total timeout of the same


@dataclass(slots=True)
class CarriedBytes:
    """Bytes sent to and received from p2pd, including HTTP/2 framing."""

    sent: int = 0
    received: int = 0

    @property
    def both(self) -> int:
        """Bytes in both directions."""
        return self.sent + self.received


async def splice(local: Pair, remote: Pair, *counts: CarriedBytes) -> None:
    """Copy in both directions until one side ends or breaks, then flush and close both; count the bytes in each of `counts`.

    A slow reader stops the writer on the other side. Cancellation closes both sides at once. Connection errors are not raised.
    """

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_out: bool) -> None:
        while (data := await reader.read(READ_BYTES)) and not writer.is_closing():  # a closing transport of uvloop raises on write
            for count in counts:
                if is_out:
                    count.sent += len(data)
                else:
                    count.received += len(data)
            writer.write(data)
            await writer.drain()
            if not is_out and len(data) in BULK_BYTES:
                await _gather(cast(asyncio.Transport, remote[1].transport))  # its transport both reads and writes

    copies = [asyncio.create_task(one) for one in (copy(local[0], remote[1], is_out=True), copy(remote[0], local[1], is_out=False))]
    try:
        done, _ = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(_close(local[1]), _close(remote[1]))
        for copied in done:
            with suppress(OSError):  # a broken connection ends the splice like a closed one
                copied.result()
    finally:
        for _, writer in (local, remote):
            drop(writer)
        await cancel(*copies)


async def _gather(transport: asyncio.Transport) -> None:
    transport.pause_reading()
    await asyncio.sleep(GATHER_S)
    if not transport.is_closing():
        transport.resume_reading()


def drop(writer: asyncio.StreamWriter) -> None:
    """Close a connection without flushing. (In CPython 3.11, aborting a transport that has just closed raises.)"""
    if not writer.is_closing():
        writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Flush and close a connection. Abort it if the reader makes no progress, or on cancellation."""
    writer.close()
    try:
        await wait_while_active(writer.wait_closed(), writer.transport.get_write_buffer_size, FLUSH_S, FLUSH_MOST_S)
    except (TimeoutError, asyncio.CancelledError) as error:
        writer.transport.abort()
        if isinstance(error, asyncio.CancelledError):
            raise
    except OSError:  # a broken connection is closed
        pass


async def wait_while_active(work: Awaitable[object], measure: Callable[[], int], quiet_s: float, most_s: float) -> None:
    """Await `work`. Raises TimeoutError if `measure` does not change for `quiet_s`, and after `most_s` in total."""
    task = asyncio.ensure_future(work)
    until_s = loop_s() + most_s
    try:
        while not task.done():
            before, left_s = measure(), until_s - loop_s()
            await asyncio.wait([task], timeout=min(quiet_s, left_s))
            if not task.done() and (measure() == before or left_s <= quiet_s):
                raise TimeoutError
        task.result()
    finally:
        await cancel(task)
