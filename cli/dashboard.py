"""`peer dashboard` and `peer watch`: the peers of one or several home folders, on a web page or on the whole terminal."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.invite import issued_to_anybody, known_addresses, need_issuer
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Uses
from gossamer.cli.whole_run import run_shown
from gossamer.peer.machine.extras import need_extra
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.port import address_and_port
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

HERE = "127.0.0.1"
GRACE_S = 1  # for open pages, when it is stopped

Homes = Annotated[
    list[Path] | None,
    typer.Argument(metavar="HOME", help="Home folders of the peers to show. Default: that of --home.", show_default=False),
]
PagePort = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port of the page; 0 takes any free one.")]


WholeRun = Annotated[bool, typer.Option("--run", help="Open the page of the whole run instead of that of the peers.")]
Public = Annotated[
    str,
    typer.Option(
        "--public",
        metavar="[ADDRESS:]PORT",
        help="Also serve the page of the whole run to everybody: read-only, without a token, addresses or settings.",
    ),
]
PublicName = Annotated[
    list[str] | None,
    typer.Option("--public-name", metavar="NAME", help="A host name under which others reach the public page. May repeat."),
]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="URL|FILE",
        help="Show the peers of another machine too: the URL that its `peer dashboard` printed, or a file of such URLs. May repeat.",
    ),
]
ShowInvite = Annotated[
    bool,
    typer.Option(
        "--invite",
        help="Show an invite for anybody on the page of the run: whoever sees the page can join, unless the run has a list of members.",
    ),
]


def dashboard(
    homes: Homes = None,
    home: HomeFolder = DEFAULT_HOME,
    port: PagePort = 0,
    run: WholeRun = False,
    public: Public = "",
    public_name: PublicName = None,
    show_invite: ShowInvite = False,
    uses: Uses = None,
    others: With = None,
) -> None:
    """Serve a web page with the peers of this machine, until Ctrl-C.

    Prints the page's URL on stdout. Only this machine can open the page, and only with the token in the URL. With --public, everybody can
    open a second page: the run as a whole, read-only, at the URL that is printed last.
    """
    need_extra("dashboard")
    from gossamer.cli.page.machines import machines_of
    from gossamer.cli.page.public import BriefConnection, PublicPage
    from gossamer.cli.page.run_view import RunPage
    from gossamer.cli.page.server import application

    shown, machines = homes or [home], machines_of(others or [])
    if public:
        run_shown(shown[0])  # raises where there is no run
    with ExitStack() as stack:
        outside = stack.enter_context(listening_for_all(public)) if public else None
        listener = stack.enter_context(listening(port))
        port = listener.getsockname()[1]
        invite = invite_link(Home(shown[0]), uses) if show_invite else ""
        token = secrets.token_urlsafe(16)
        servers = [(server(application(shown, token, port, invite, machines)), listener)]
        print(f"http://{HERE}:{port}/{'runs/0/page' if run else ''}?token={token}", flush=True)
        print("Ctrl-C stops the page; from another machine: ssh -L", f"{port}:{HERE}:{port}", "this-machine", file=sys.stderr)
        if outside is not None:
            names = [*(public_name or []), socket.gethostname()]
            page = PublicPage(RunPage(partial(run_shown, shown[0]), invite=invite), names)
            servers.append((server(page, BriefConnection), outside))
            print(public_url(outside, names[0]), flush=True)
            print("everybody who reaches this port can read the page of the run, and nothing else", file=sys.stderr)
        asyncio.run(serve(servers))


async def serve(servers: Sequence[tuple[uvicorn.Server, socket.socket]]) -> None:
    """Serve until Ctrl-C."""
    await asyncio.gather(*(each.serve([listener]) for each, listener in servers))


def server(app: ASGIApp, connection: type[asyncio.Protocol] | None = None) -> uvicorn.Server:
    """Return a page's server, with limits on its connections; `connection`: how one is held, by default as for one's own page."""
    import uvicorn  # with starlette: loaded only for the page

    from gossamer.cli.page.connections import BoundedConnection

    settings = uvicorn.Config(
        app, http=connection or BoundedConnection, ws="none", log_level="critical", access_log=False, server_header=False,
        timeout_graceful_shutdown=GRACE_S, lifespan="off",
    )  # fmt: skip
    return uvicorn.Server(settings)


def invite_link(folder: Home, uses: int | None) -> str:
    """Issue an invite for anybody, for the page. Raises BadSettings if this peer may not, or knows no bootstrap address."""
    signed, identity = need_manifest(folder), Identity.load_or_create(folder.identity)
    need_issuer(signed.manifest(), identity.peer_id)
    return issued_to_anybody(folder, identity, signed.run_id, known_addresses(folder, identity.peer_id), uses).to_link()


def watch(homes: Homes = None, home: HomeFolder = DEFAULT_HOME) -> None:
    """Show the peers of this machine in a full-screen terminal view: state, charts, partners. Press q to quit."""
    need_extra("watch")
    if sys.__stderr__ is None or not sys.__stderr__.isatty():  # where textual draws
        raise BadSettings(
            "`peer watch` needs a terminal", hint="`peer status` prints the same once, and `peer dashboard` shows it in a browser"
        )
    from gossamer.cli.full_screen import FullScreen  # textual: slow to import, and needed only now

    FullScreen(homes or [home]).run()


def public_url(listener: socket.socket, name: str) -> str:
    """Return where others find the page: at this name, or at the one address that it listens on."""
    address, port = listener.getsockname()[:2]
    host = name if address in ("::", "0.0.0.0") else f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/"


def listening_for_all(text: str) -> socket.socket:
    """Return a socket that listens where everybody can reach it: at PORT of every address, or at ADDRESS:PORT. Raises BadSettings."""
    address, port = address_and_port(text, "--public", "")
    family = socket.AF_INET6 if not address or ":" in address else socket.AF_INET
    both = not address and socket.has_dualstack_ipv6()
    try:
        if not address and not both:
            return socket.create_server(("0.0.0.0", port))
        return socket.create_server((address, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise BadSettings(f"cannot show a page at {text}: {reason}", hint="choose another port with --public") from error


def listening(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address. Raises BadSettings."""
    try:
        return socket.create_server((HERE, port))  # before the address is printed: a program that reads it may connect at once
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise BadSettings(f"cannot show a page on port {port}: {reason}", hint="choose another with --port, or leave it out") from error
