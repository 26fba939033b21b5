"""The server of the page: it answers this machine with the token, and refuses requests from pages of other sites in the same browser."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gossamer.cli.page.machines import PATH, Machine, Machines, PeerRow
from gossamer.cli.page.peers import Peers
from gossamer.cli.page.public import answered
from gossamer.cli.page.run_view import RunPage
from gossamer.cli.whole_run import run_shown
from gossamer.peer.machine.config import LIMITS
from gossamer.peer.machine.control_socket import ask
from gossamer.protocol.errors import BadSettings

SEND_S = 1.0
YEAR_S = 365 * 24 * 3600
KINDS = {"page.js": "text/javascript", "run.js": "text/javascript", "page.css": "text/css", "plotly.min.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",  # the charts use inline styles
    "Referrer-Policy": "no-referrer",  # it would hold the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Guard:
    """Accepts only requests to our own host names, from our own page or none, with the token."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse, one request."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(Headers(scope=scope), QueryParams(scope["query_string"]))
        if refusal:
            await PlainTextResponse(f"{refusal}\n", 403, HEADERS)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, query: QueryParams) -> str:
        """Return why the request is refused, or nothing. A foreign host name means DNS rebinding; a foreign origin, another site."""
        if headers.get("host") not in self._hosts:
            return "refused: this page is for 127.0.0.1 only"
        if headers.get("origin", f"http://{headers['host']}") != f"http://{headers['host']}":
            return "refused: another site asks"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "refused: another site asks"
        if not secrets.compare_digest(query.get("token", "").encode(), self._token.encode()):
            return "refused: use the whole address that `peer dashboard` has printed, with its token"
        return ""


def application(homes: Sequence[Path], token: str, port: int, invite: str = "", machines: Sequence[Machine] = ()) -> ASGIApp:
    """Return the whole page as an ASGI application.

    `invite`: the link of one to the run of the first home, which its page shows. `machines`: further ones, which the page shows too.
    """
    return Guard(Page(homes, token, invite, machines).app, token, port)


class Page:
    """The page, its files, the stream of what it shows, and the requests of its buttons. Belongs to one event loop."""

    def __init__(self, homes: Sequence[Path], token: str, invite: str = "", machines: Sequence[Machine] = ()) -> None:
        self._peers = Peers(homes)
        self._machines = Machines(machines)
        invites = [invite] + [""] * len(self._peers.homes)
        self._runs = [
            RunPage(partial(run_shown, home), f"?token={token}", shown) for home, shown in zip(self._peers.homes, invites, strict=False)
        ]
        self._token = token
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route(f"/{PATH}", self._machine),
                Route("/{name}", self._asset),
                Route("/live/peers", self._live),
                Route("/runs/{number:int}/{name}", self._run),
                Route("/peers/{number:int}/{verb}", self._act, methods=["POST"]),
            ]
        )

    async def _page(self, request: Request) -> Response:
        return HTMLResponse((files("gossamer.cli.page") / "page.html").read_text().replace("TOKEN", self._token), headers=HEADERS)

    async def _asset(self, request: Request) -> Response:
        """Serve our own script and style, and the charts' library out of its package."""
        name = request.path_params["name"]
        if name not in KINDS:
            return PlainTextResponse("there is no such page\n", 404, HEADERS)
        folder = files("plotly") / "package_data" if name.startswith("plotly") else files("gossamer.cli.page")
        caching = {"Cache-Control": f"private, max-age={YEAR_S}"} if name.startswith("plotly") else {}
        return Response((folder / name).read_bytes(), headers=HEADERS | caching, media_type=KINDS[name])

    async def _run(self, request: Request) -> Response:
        """Serve the page of the whole run of a peer: `page`, its sections that change at `live`, and its files."""
        number, name = request.path_params["number"], request.path_params["name"]
        if name in KINDS:
            return await self._asset(request)
        if number >= len(self._runs) or name not in ("page", "live"):
            return PlainTextResponse("there is no such page\n", 404, HEADERS)
        try:
            drawn = await (self._runs[number].whole() if name == "page" else self._runs[number].live())
        except BadSettings as error:
            return PlainTextResponse(f"{error}\n", 503, HEADERS)
        return answered(drawn, "text/html", request.headers, HEADERS)

    async def _machine(self, request: Request) -> Response:
        """Tell another page of the same owner about the peers of this machine."""
        return JSONResponse([asdict(row) for row in await self._rows()], headers=HEADERS)

    async def _rows(self) -> list[PeerRow]:
        return [PeerRow.of(peer) for peer in await self._peers.look()]

    async def _live(self, request: Request) -> Response:
        return StreamingResponse(self._events(), headers=HEADERS, media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        while True:
            yield f"data: {json.dumps(await self._peers.look())}\n\n"
            if self._machines.all:
                self._machines.look()
                yield f"event: machines\ndata: {json.dumps(self._machines.shown(await self._rows(), time.time()))}\n\n"
            await asyncio.sleep(SEND_S)

    async def _act(self, request: Request) -> Response:
        """Pause, resume, leave, or set a limit."""
        number, verb = request.path_params["number"], request.path_params["verb"]
        try:
            wanted = json.loads(await request.body() or b"{}")
        except ValueError:
            wanted = None
        asked = _request(verb, wanted) if isinstance(wanted, dict) else None
        if asked is None or number >= len(self._peers.homes):
            return JSONResponse({"error": "there is no such request"}, 400, HEADERS)
        try:
            return JSONResponse(await asyncio.to_thread(ask, self._peers.homes[number], asked), headers=HEADERS)
        except BadSettings as error:
            return JSONResponse({"error": str(error), "hint": error.hint}, 409, HEADERS)


def _request(verb: str, wanted: dict[str, object]) -> dict[str, object] | None:
    """Return the request to the peer; None for requests that the page may not make."""
    match verb, wanted:
        case "pause", {"seconds": int() | float() | None as seconds}:
            return {"verb": "pause", "seconds": seconds}
        case "resume", _:
            return {"verb": "resume"}
        case "leave", {"finish": bool() as finish}:
            return {"verb": "leave", "finish": finish}
        case "set", {"key": str(key), "value": str() | None as value} if key in LIMITS:
            return {"verb": "set", "key": key, "value": value}
    return None
