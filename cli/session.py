"""One peer that runs from this shell: its settings, and its progress on stderr, until its run ends, it leaves, or it cannot go on.

It listens on the port of last time where that is free, so that its old invites and its partners' address books still lead to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cli.figures import loss_text
from cli.screen import Screen, screen
from peer.machine.config import PeerConfig, peer_config
from peer.machine.home import Home
from peer.machine.status import Status
from peer.supervisor.supervisor import run_peer
from protocol.errors import BadSettings
from protocol.identity import Identity
from protocol.run.invite import Invite
from protocol.run.manifest import SignedManifest

PORT_FILE = "port"
_TCP = re.compile(r"/tcp/(\d+)")

Also = Callable[[Status, Screen], None]


def settings(
    home: Path,
    data: Path | None = None,
    device: str = "auto",
    threads: int = 0,
    *,
    listen: str,
    port: int | None,
    announce: list[str] | None,
    checkpoint_every_s: float | None = None,
    trains: bool = True,
) -> PeerConfig:
    """Check the options that make up a peer's local settings. Raises BadSettings."""
    home = home.expanduser().absolute()
    if port is None:
        port = usual_port(Home(home), listen)
    need_port(listen, port)
    values: dict[str, object] = {
        "home": home,
        "data": data.expanduser().absolute() if data else None,
        "device": device,
        "num_threads": threads,
        "listen_host": listen,
        "listen_port": port,
        "announce": tuple(announce or ()),
        "trains": trains,
    }
    if checkpoint_every_s is not None:
        values |= {"checkpoint_interval_s": checkpoint_every_s, "checkpoint_interval_steps": None}
    return peer_config(values)


def hold_session(
    config: PeerConfig,
    identity: Identity,
    manifest: SignedManifest | None,
    invite: Invite | None,
    also: Also | None = None,
    metrics: str | None = None,
) -> None:
    """Run the peer, draw its status after each change, and call `also` with it. Raises what `run_peer` raises.

    `metrics`: where Prometheus may ask for it too, as `--metrics` says it.
    """
    newest = Status()
    with screen(sys.stderr) as drawn, showing_metrics(metrics, lambda: newest):

        def watch(status: Status) -> None:
            nonlocal newest
            newest = status
            drawn.show(status.peer_id[-6:], status.to_json())
            keep_port(config, status.addresses)
            if also is not None:
                also(status, drawn)

        status = asyncio.run(run_peer(config, identity, manifest, invite, watch))
    print(farewell(status, config), file=sys.stderr)


@contextlib.contextmanager
def showing_metrics(text: str | None, status: Callable[[], Status]) -> Iterator[None]:
    """Answer Prometheus while inside, if asked to. Raises BadSettings."""
    if text is None:
        yield
        return
    from peer.machine.metrics import place, serving_metrics  # prometheus_client: only for who wants it

    with serving_metrics(*place(text), status):
        yield


def farewell(status: Status, config: PeerConfig) -> str:
    """Return the last sentence: how it ended, and what can be done next."""
    if not config.trains:
        return "the seed has left"
    figures = f"step {status.step} of {status.total_steps}, loss {loss_text(status.loss)}"
    if status.state == "done":
        return f"the run is over: {figures}\nhint: `peer export FOLDER --home {config.home}` writes the model"
    return f"left the run: {figures}\nhint: the same command, or `peer join --home {config.home}`, goes on from here"


def usual_port(home: Home, listen: str) -> int:
    """Return the port of last time if it is free now, else 0: any free one."""
    try:
        port = int((home.path / PORT_FILE).read_text())
        _try(listen, port)
    except (OSError, ValueError, OverflowError):
        return 0
    return port


def keep_port(config: PeerConfig, addresses: Sequence[str]) -> None:
    """Remember the port in a peer's own addresses. Announced ones and a relay's say nothing about it."""
    own = [match[1] for address in addresses if "p2p-circuit" not in address and (match := _TCP.search(address))]
    file = config.home / PORT_FILE
    if own and not config.announce and (not file.exists() or file.read_text() != own[0]):
        with contextlib.suppress(OSError):  # a full disk: the next start takes another port, nothing worse
            file.write_text(own[0])


def need_port(listen: str, port: int) -> None:
    """Raise BadSettings where nobody could listen on this port (0: any) of this IP address now."""
    try:
        ipaddress.ip_address(listen)
    except ValueError as error:
        raise BadSettings(
            f"{listen!r} is not an IP address to listen on", hint="0.0.0.0 for everybody, 127.0.0.1 for this machine only"
        ) from error
    try:
        _try(listen, port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise BadSettings(
            f"cannot listen on {listen}, port {port}: {(reason or str(error)).lower()}",
            hint="choose another with --port, or leave it out; `peer status` tells whether a peer of yours already runs",
        ) from error


def _try(listen: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((listen, port))
