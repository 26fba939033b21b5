"""`peer dashboard` and `peer watch`: the peers of one or several home folders, on a web page or on the whole terminal."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder
from gossamer.peer.machine.extras import need_extra
from gossamer.protocol.errors import BadSettings

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

HERE = "127.0.0.1"
GRACE_S = 1  # for open pages, when it is stopped

Homes = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[HOME...]", help="Home folders of the peers to show. Default: that of --home.", show_default=False),
]
PagePort = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port of the page; 0 takes any free one.")]


def dashboard(homes: Homes = None, home: HomeFolder = DEFAULT_HOME, port: PagePort = 0) -> None:
    """Serve a web page with the peers of this machine, until Ctrl-C.

    Prints the page's URL on stdout. Only this machine can open the page, and only with the token in the URL.
    """
    need_extra("dashboard")
    from gossamer.cli.page.server import application

    with listening(port) as listener:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(16)
        app = application(homes or [home], token, port)
        print(f"http://{HERE}:{port}/?token={token}", flush=True)
        print("Ctrl-C stops the page; from another machine: ssh -L", f"{port}:{HERE}:{port}", "this-machine", file=sys.stderr)
        server(app).run([listener])


def server(app: ASGIApp) -> uvicorn.Server:
    """Return the page's server, with limits on its connections."""
    import uvicorn  # with starlette: loaded only for the page

    from gossamer.cli.page.connections import BoundedConnection

    settings = uvicorn.Config(
        app, http=BoundedConnection, ws="none", log_level="critical", access_log=False, timeout_graceful_shutdown=GRACE_S, lifespan="off"
    )
    return uvicorn.Server(settings)


def watch(homes: Homes = None, home: HomeFolder = DEFAULT_HOME) -> None:
    """Show the peers of this machine in a full-screen terminal view: state, charts, partners. Press q to quit."""
    need_extra("watch")
    from gossamer.cli.full_screen import FullScreen  # textual: slow to import, and needed only now

    FullScreen(homes or [home]).run()


def listening(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address. Raises BadSettings."""
    try:
        return socket.create_server((HERE, port))  # before the address is printed: a program that reads it may connect at once
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise BadSettings(f"cannot show a page on port {port}: {reason}", hint="choose another with --port, or leave it out") from error
