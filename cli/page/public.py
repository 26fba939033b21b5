"""The page of a run for everybody: read-only, without a token, and bounded in what a stranger can make it do.

It knows four files and nothing else of this machine. It answers GET and HEAD alone, to host names that are this machine's, and each network
only so often. A rendering is shared by all viewers. A connection lives a minute at most, whatever its other end does.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gossamer.cli.page.run_view import Rendering, RunPage
from gossamer.protocol.budgets import Allowance, Budgets
from gossamer.protocol.errors import BadSettings

ANSWERS_IN_ALL = Allowance(1000, 20.0)  # a viewer asks every three seconds: 150 viewers
ANSWERS_EACH = Allowance(240, 20.0)  # of one network: an office of twenty viewers
LIFE_S = 60.0  # of a connection
MAX_CONNECTIONS = 256
MAX_OF_ONE = 32  # connections of one network
TARGET_BYTES = 64  # longest path
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
FILES = {"/page.css": "text/css", "/run.js": "text/javascript"}
LOCAL = ("localhost",)


class PublicPage:
    """The whole page as an ASGI application. `names`: the host names that lead to this machine, beside its addresses."""

    def __init__(self, page: RunPage, names: Iterable[str] = (), now_s: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._names = frozenset(name.lower().rstrip(".") for name in (*names, *LOCAL))
        self._budgets = Budgets(now_s, ANSWERS_IN_ALL, ANSWERS_EACH)
        self._files = {path: Rendering((files("gossamer.cli.page") / path[1:]).read_bytes()) for path in FILES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse, one request; its body is never read."""
        if scope["type"] != "http":
            return
        response = self._refusal(scope) or await self._answer(scope["path"], Headers(scope=scope))
        if scope["method"] == "HEAD":
            response.body = b""
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        client, headers = scope.get("client"), Headers(scope=scope)
        if not self._budgets.take(1, network(client[0] if client else "")):
            return refused("too many requests: retry in a few seconds", 429, {"Retry-After": "5"})
        if scope["method"] not in ("GET", "HEAD"):
            return refused("refused: this page is only read", 405, {"Allow": "GET, HEAD"})
        if not self._is_ours(headers.get("host", "")):
            return refused(
                "refused: this page is not known by that host name; the member that shows it adds a name with --public-name", 421
            )
        if scope["query_string"] or len(scope["path"]) > TARGET_BYTES:
            return refused("there is no such page", 404)
        return None

    async def _answer(self, path: str, headers: Headers) -> Response:
        try:
            if path == "/":
                return answered(await self._page.whole(), "text/html", headers)
            if path == "/live":
                return answered(await self._page.live(), "text/html", headers)
        except BadSettings:  # its words name a folder of this machine
            return refused("this member does not answer: another member can show the run", 503, {"Retry-After": "10"})
        if path in FILES:
            return answered(self._files[path], FILES[path], headers)
        return refused("there is no such page", 404)

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header is an address, or a name of this machine: a name of others may lead here to trick a browser."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower().rstrip(".") in self._names
        return True


def answered(rendering: Rendering, kind: str, headers: Headers, more: dict[str, str] | None = None) -> Response:
    """Return the response with a rendering: compressed if the viewer takes that, and empty if it has the same already."""
    given = HEADERS | {"ETag": rendering.tag, "Vary": "Accept-Encoding"} | (more or {})
    if headers.get("if-none-match") == rendering.tag:
        return Response(status_code=304, headers=given)
    if "gzip" in headers.get("accept-encoding", ""):
        return Response(rendering.packed, headers=given | {"Content-Encoding": "gzip"}, media_type=kind)
    return Response(rendering.content, headers=given, media_type=kind)


def refused(words: str, code: int, more: dict[str, str] | None = None) -> Response:
    """Return a refusal in words. The connection ends: a refused request may have a body that nobody reads."""
    return PlainTextResponse(f"{words}\n", code, HEADERS | {"Cache-Control": "no-store", "Connection": "close"} | (more or {}))


def network(address: str) -> str:
    """Return the network of a viewer's address, which one viewer cannot change at will: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


class BriefConnection(H11Protocol):
    """A connection of a stranger: it ends after a minute, and of too many the oldest ends at once, of the network that holds most."""

    _life: asyncio.TimerHandle | None = None
    _network = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place."""
        super().connection_made(transport)
        peer: Any = transport.get_extra_info("peername")
        self._network = network(peer[0]) if peer else ""
        self._life = self.loop.call_later(LIFE_S, transport.abort)
        held = [other for other in self.connections if isinstance(other, BriefConnection) and not other.transport.is_closing()]
        num_of = Counter(other._network for other in held)
        if len(held) > MAX_CONNECTIONS or num_of[self._network] > MAX_OF_ONE:
            largest = self._network if num_of[self._network] > MAX_OF_ONE else num_of.most_common(1)[0][0]
            min((other for other in held if other._network == largest), key=BriefConnection._ends_s).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place."""
        if self._life is not None:
            self._life.cancel()
        super().connection_lost(exc)

    def _ends_s(self) -> float:
        return self._life.when() if self._life is not None else 0.0
