"""The multiaddrs that a record or an invite may hold: TCP to a host, directly or through a relay.

    /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...
    /dns4/peer.example.org/tcp/4001/p2p/12D3Koo.../p2p-circuit/p2p/12D3Koo...

Everything else is refused before it reaches p2pd: the text comes from strangers. Only TCP, because the QUIC stack of the p2pd we
use is old and known to be weak. Not a multiaddr library: what is read here is what we write.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from protocol import limits
from protocol.errors import GossamerError
from protocol.identity import PeerId

_ADDRESS: Final = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>[1-9][0-9]{0,4})"
    r"(?:/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{1,64})(?P<circuit>/p2p-circuit(?:/p2p/(?P<target>[1-9A-HJ-NP-Za-km-z]{1,64}))?)?)?"
)
_ENDS_IN_PEER: Final = re.compile(r"/p2p/[^/]+\Z")
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE | re.ASCII)  # without ASCII, [a-z] matches U+017F


def read_address(text: str) -> PeerId | None:
    """Return the peer that a multiaddr leads to, or None when it does not say. Raises ValueError with a sentence."""
    if len(text) > limits.ADDRESS_CHARS:
        raise ValueError(f"an address of {len(text)} characters; at most {limits.ADDRESS_CHARS} are read")
    match = _ADDRESS.fullmatch(text)
    if match is None or not _is_host(match["kind"], match["host"]) or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is not an address like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...")
    target = match["target"] if match["circuit"] else match["peer"]
    if target is None:
        return None
    try:
        return PeerId.from_text(target)
    except GossamerError:
        raise ValueError(f"{text!r} does not end in the id of a Gossamer peer") from None


def with_peer(text: str, peer_id: PeerId) -> str:
    """Return a multiaddr with the id of its peer at the end: records leave it out. Does not read the rest; see `read_address`."""
    return text if _ENDS_IN_PEER.search(text) else f"{text}/p2p/{peer_id}"


def route(text: str) -> str:
    """Say how a connection with this multiaddr at its other end runs: local (this machine or network), relayed, or direct."""
    if "/p2p-circuit" in text:
        return "relayed"
    host = text.split("/")[2] if text.count("/") > 1 else ""
    try:
        return "direct" if ipaddress.ip_address(host).is_global else "local"
    except ValueError:  # a name
        return "direct"


def _is_host(kind: str, host: str) -> bool:
    if kind.startswith("dns"):
        return _HOST_NAME.fullmatch(host) is not None
    try:
        ip = ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return "%" not in str(ip)
