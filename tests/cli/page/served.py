"""A page behind its real server, and connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from gossamer.cli.dashboard import server


@contextlib.asynccontextmanager
async def served(page: Callable[[int], Any], *connection: Any) -> AsyncIterator[int]:
    """Serve the page of a port; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serving = server(page(port), *connection)
        task = asyncio.create_task(serving.serve([listener]))
        try:
            yield port
        finally:
            serving.should_exit = True
            await task


async def sent_until_end(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends until it hangs up."""
    sent = b""
    with contextlib.suppress(ConnectionError):
        while more := await reader.read(65536):
            sent += more
    return sent


async def until_fewer_than(number: int, readers: Iterable[asyncio.StreamReader]) -> None:
    """Wait until the server has hung up on all but fewer than so many connections."""
    left = {asyncio.create_task(sent_until_end(reader)) for reader in readers}
    while len(left) >= number:
        done, left = await asyncio.wait(left, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert done, f"{len(left)} connections are held"
    for task in left:
        task.cancel()
