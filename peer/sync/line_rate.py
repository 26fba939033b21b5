"""Measure this peer's line with another peer, by echoes of random bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final

from gossamer.peer.sync.client import Source

ECHO_BYTES: Final = (32 * 1024, 256 * 1024)  # the large echo only if the small one returns fast
SLOW_ECHO_S: Final = 1.5


async def line_rates(source: Source, round_trip_s: float) -> AsyncIterator[tuple[float, float]]:
    """Yield the rate up and down, in bytes a second, after each echo; the last one is the best. Raises as `Source.take`."""
    for num_bytes in ECHO_BYTES:
        up_s, down_s = await source.echo(num_bytes)
        yield num_bytes / max(1e-6, up_s - round_trip_s / 2), num_bytes / max(1e-6, down_s)
        if up_s + down_s > SLOW_ECHO_S:
            return


async def slower_rate(source: Source, within_s: float, carried: Callable[[], int]) -> float:
    """Return the rate of the slower direction, in bytes a second; 0 if no echo came back in time. Raises as `Source.take`.

    `carried`: the bytes that other streams have carried so far, in the busier direction: they share the line.
    """
    loop, rate = asyncio.get_running_loop(), 0.0
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            began_s = loop.time()
            await source.observed_address()
            round_trip_s = loop.time() - began_s
            began_s, before = loop.time(), carried()
            async for rates in line_rates(source, round_trip_s):
                now_s, now = loop.time(), carried()
                rate = min(rates) + (now - before) / max(1e-6, now_s - began_s)
                began_s, before = now_s, now
    return rate
