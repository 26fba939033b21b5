"""The page's server over real connections: how long it waits for a request, and for how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from gossamer.cli.dashboard import server
from gossamer.cli.page import connections
from gossamer.cli.page.server import application

TOKEN = "a-token"


class Browser:
    """Raw connections to the page's server, which all end with the test."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def opened(self, start: str = "GET / HT") -> asyncio.StreamReader:
        """Open a connection and send the start of a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        writer.write(start.encode())
        await writer.drain()
        return reader

    def head(self, request: str, *headers: str) -> str:
        return "\r\n".join([f"{request}?token={TOKEN} HTTP/1.1", f"Host: 127.0.0.1:{self._port}", *headers, "", ""])

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


def play(test: Callable[[Browser], Awaitable[None]]) -> None:
    """Run a test against the page's server."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            serving = server(application([], TOKEN, port))
            task, browser = asyncio.create_task(serving.serve([listener])), Browser(port)
            try:
                async with asyncio.timeout(30):
                    await test(browser)
            finally:
                await browser.close()
                serving.should_exit = True
                await task

    asyncio.run(main())


async def has_ended(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


def test_a_request_that_is_not_whole_in_time_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)

    async def test(browser: Browser) -> None:
        body = browser.head("POST /peers/0/pause", "Content-Length: 9")
        for start in ("", "GET / HT", body[:-2], body, body + "{"):
            assert await has_ended(await browser.opened(start))

    play(test)


def test_unfinished_requests_hold_a_bounded_number_of_connections_and_keep_nobody_out() -> None:
    async def test(browser: Browser) -> None:
        crowd = [await browser.opened() for _ in range(300)]
        answer = await browser.opened(browser.head("GET /"))
        assert (await answer.readline()).startswith(b"HTTP/1.1 200")
        left = {asyncio.create_task(has_ended(reader)) for reader in crowd}
        while len(left) >= connections.MAX_CONNECTIONS:
            done, left = await asyncio.wait(left, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            assert done, f"{len(left)} connections are held"
        for task in left:
            task.cancel()

    play(test)


def test_an_open_page_stays_while_unfinished_requests_come_and_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)

    async def test(browser: Browser) -> None:
        page = await browser.opened(browser.head("GET /live/peers"))
        await page.readuntil(b"data: ")
        for _ in range(200):
            await browser.opened()
        await page.readuntil(b"data: ")  # a second later

    play(test)
