"""Whether the router can be asked to open a port (UPnP), and what it says its own address is. Asks, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import miniupnpc
import psutil

ASK_MS = 2000


@dataclass(frozen=True, slots=True)
class Router:
    """What a router that speaks UPnP says of itself."""

    outer_ip: str  # its address on the provider's side; empty where it does not tell


def own_addresses() -> set[str]:
    """Return the IP addresses of this machine's interfaces."""
    return {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}


def ask_router() -> Router | None:
    """Look for a router that speaks UPnP; None where none answers. Blocks for some seconds."""
    client = miniupnpc.UPnP()
    client.discoverdelay = ASK_MS
    try:
        client.discover()
        client.selectigd()
        return Router(client.externalipaddress() or "")
    except Exception:  # the library knows no other
        return None
