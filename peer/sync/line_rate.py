"""Measure this peer's line with another peer, by echoes of random bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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


async def slower_rate(source: Source) -> float:
    """Return the rate of the slower direction, in bytes a second. Raises as `Source.take`."""
    loop, rate = asyncio.get_running_loop(), 0.0
    began_s = loop.time()
    await source.observed_address()
    async for rates in line_rates(source, loop.time() - began_s):
        rate = min(rates)
    return rate
