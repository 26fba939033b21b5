"""The page's server over real connections: how long it waits for a request, and for how many at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gossamer.cli.page import connections
from gossamer.cli.page.server import application
from tests.cli.page.served import sent_until_end, served, until_fewer_than

pytestmark = pytest.mark.real_time

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


@pytest.fixture
@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with served(lambda port: application([], TOKEN, port)) as port:
        browser = Browser(port)
        yield browser
        await browser.close()


async def test_a_request_that_is_not_whole_in_time_ends_its_connection(monkeypatch: pytest.MonkeyPatch, browser: Browser) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    body = browser.head("POST /peers/0/pause", "Content-Length: 9")
    for start in ("", "GET / HT", body[:-2], body, body + "{"):
        assert not await sent_until_end(await browser.opened(start))


async def test_unfinished_requests_hold_a_bounded_number_of_connections_and_keep_nobody_out(browser: Browser) -> None:
    crowd = [await browser.opened() for _ in range(300)]
    answer = await browser.opened(browser.head("GET /"))
    assert (await answer.readline()).startswith(b"HTTP/1.1 200")
    await until_fewer_than(connections.MAX_CONNECTIONS, crowd)


async def test_an_open_page_stays_while_unfinished_requests_come_and_time_passes(monkeypatch: pytest.MonkeyPatch, browser: Browser) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    page = await browser.opened(browser.head("GET /live/peers"))
    await page.readuntil(b"data: ")
    for _ in range(200):
        await browser.opened()
    await page.readuntil(b"data: ")  # a second later
