"""The port that a peer listens on: the one of its last start if it is free, so that old invites and address books stay valid."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.home import Home, write_whole
from gossamer.protocol.addresses import CIRCUIT
from gossamer.protocol.errors import BadSettings

_TCP = re.compile(r"/tcp/(\d+)")


def address_and_port(text: str, option: str, default: str) -> tuple[str, int]:
    """Read PORT or ADDRESS:PORT, as of this option; `default` is the address without one. Raises BadSettings."""
    address, _, port = text.rpartition(":")
    address = address.strip("[]") or default
    try:
        if address:
            ipaddress.ip_address(address)
    except ValueError as error:
        raise BadSettings(
            f"{address!r} is not an IP address", hint=f"{option} takes a port, or an address and a port like 0.0.0.0:9464"
        ) from error
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadSettings(f"{port!r} is not a port", hint="a port is a number from 1 to 65535, for example 9464")
    return address, int(port)


def free_port(home: Home, listen: str, wanted: int | None) -> int:
    """Return the port to listen on at this IP address: the wanted one (0: any), else that of the last start if it is free, else 0.

    Raises BadSettings if it cannot be listened on now.
    """
    try:
        ipaddress.ip_address(listen)
    except ValueError as error:
        raise BadSettings(
            f"{listen!r} is not an IP address to listen on", hint="0.0.0.0 for everybody, 127.0.0.1 for this machine only"
        ) from error
    port = kept_port(home) if wanted is None else wanted
    try:
        with socket.socket(socket.AF_INET6 if ":" in listen else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((listen, port))
    except (OSError, OverflowError) as error:
        if wanted is None and port:
            return free_port(home, listen, 0)
        reason = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise BadSettings(
            f"cannot listen on {listen}, port {port}: {(reason or str(error)).lower()}",
            hint="choose another with --port, or leave it out; `peer status` tells whether a peer of yours already runs",
        ) from error
    return port


def kept_port(home: Home) -> int:
    """Return the port of the last start, or of the running peer; 0 if none is known."""
    try:
        return int(home.port.read_text())
    except (OSError, ValueError):
        return 0


def keep_port(config: PeerConfig, addresses: Sequence[str]) -> None:
    """Remember the port in a peer's own addresses for its next start."""
    home, port = Home(config.home), own_port(config, addresses)
    if port and port != kept_port(home):
        with contextlib.suppress(OSError):  # a full disk: the next start takes another port, nothing worse
            write_whole(home.port, str(port).encode())


def own_port(config: PeerConfig, addresses: Sequence[str]) -> int:
    """Return the port in a peer's own addresses; 0 if there is none: announced addresses and a relay's do not contain it."""
    own = (match[1] for address in addresses if CIRCUIT not in address and (match := _TCP.search(address)))
    return 0 if config.announce else int(next(own, 0))
