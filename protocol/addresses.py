"""The multiaddrs that a record or an invite may hold: TCP to a host, directly or through a relay, and one of our own (`nearby.py`).

    /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...
    /dns4/peer.example.org/tcp/4001/p2p/12D3Koo.../p2p-circuit/p2p/12D3Koo...
    /near/4Vq9.../p2p/12D3Koo...

Everything else is refused before it reaches p2pd: the text comes from strangers. Only TCP, because the QUIC stack of the p2pd we
use is old and known to be weak. Not a multiaddr library: what is read here is what we write. The bytes are ours too: hivemind's
library wraps the id of a relay in a CID, and its own p2pd refuses every address of a list that has such a one in it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final, Literal

import base58

from gossamer.protocol import limits
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId

_ADDRESS: Final = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>[1-9][0-9]{0,4})"
    r"(?:/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{1,64})(?P<circuit>/p2p-circuit(?:/p2p/(?P<target>[1-9A-HJ-NP-Za-km-z]{1,64}))?)?)?"
)
NEAR: Final = "/near/"
_SEALED: Final = re.compile(r"/near/[1-9A-HJ-NP-Za-km-z]{1,128}(?:/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{1,64}))?")
Route = Literal["direct", "punched", "relayed", "local"]
"""How a partner is reached: over the internet, likewise where neither can be called, through a relay, or on this machine or the local
network."""

NETWORK_BITS: Final = {4: 16, 6: 32}
"""What one party can be expected to hold of an address: the length of the prefix that counts as one network."""
CIRCUIT: Final = "/p2p-circuit"
_CODES: Final = {"ip4": b"\x04", "ip6": b"\x29", "dns": b"\x35", "dns4": b"\x36", "dns6": b"\x37"}  # as multiaddr's table numbers them
_TCP_CODE: Final = b"\x06"
_PEER_CODE: Final = b"\xa5\x03"
_CIRCUIT_CODE: Final = b"\xa2\x02"
_MULTIHASHES: Final = {b"\x00\x24": 38, b"\x12\x20": 34}  # how the id of a libp2p host begins, and its length: Ed25519 and all other keys
_ENDS_IN_PEER: Final = re.compile(r"/p2p/[^/]+\Z")
_REMEMBERED: Final = 1024
"""Addresses that were read last: those of the peers in a book are asked about several times a second."""
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE | re.ASCII)  # without ASCII, [a-z] matches U+017F


def read_address(text: str) -> PeerId | None:
    """Return the peer that a multiaddr leads to, or None when it does not say. Raises ValueError with a sentence."""
    if sealed := _SEALED.fullmatch(text):
        target = sealed["peer"]
    else:
        match = _read(text)
        target = match["target"] if match["circuit"] else match["peer"]
    if target is None:
        return None
    try:
        return PeerId.from_text(target)
    except GossamerError:
        raise ValueError(f"{text!r} does not end in the id of a Gossamer peer") from None


def address_bytes(text: str) -> bytes:
    """Return a multiaddr as p2pd reads it. Raises ValueError with a sentence."""
    match = _read(text)
    host = match["host"]
    name = host.encode() if match["kind"].startswith("dns") else ipaddress.ip_address(host).packed
    parts = [_CODES[match["kind"]], bytes([len(name)]) if match["kind"].startswith("dns") else b"", name]
    parts += [_TCP_CODE, int(match["port"]).to_bytes(2, "big"), _id_bytes(match["peer"])]
    parts += [_CIRCUIT_CODE if match["circuit"] else b"", _id_bytes(match["target"])]
    return b"".join(parts)


def route(address: str) -> Route:
    """Say how a connection with this multiaddr at its other end runs, as far as the address tells; see `route_between`."""
    return "relayed" if CIRCUIT in address else "direct" if is_public(address) else "local"


@lru_cache(_REMEMBERED)
def is_loopback(address: str) -> bool:
    """Tell whether an address is of use on its own machine alone."""
    try:
        return ipaddress.ip_address(host_of(address)).is_loopback
    except ValueError:
        return False


def route_between(end: str, through: Collection[str], theirs: Collection[str]) -> Route:
    """Say how a connection runs with `end` at its other end: `through` are our own relays, `theirs` the partner's addresses, if known.

    p2pd does not tell of the holes that it punches; where neither side can be called, it has punched one.
    """
    is_hidden = bool(through) and bool(theirs) and not any(route(address) == "direct" for address in theirs)
    return "punched" if is_hidden and route(end) == "direct" else route(end)


def host_of(address: str) -> str:
    """Return the IP address or the name in a multiaddr, of a circuit the relay's; empty where there is none."""
    return address.split("/")[2] if address.count("/") > 1 else ""


def port_of(address: str) -> int:
    """Return the port in a multiaddr. Raises ValueError where there is none."""
    return int(address.partition("/tcp/")[2].partition("/")[0])


def by_peer(addresses: Iterable[str]) -> dict[PeerId, tuple[str, ...]]:
    """Group multiaddrs, each of which ends in a peer's id, by the peer to which they lead."""
    peers: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        peer = PeerId.from_text(address.rpartition("/p2p/")[2])
        peers[peer] = (*peers.get(peer, ()), address)
    return peers


@lru_cache(_REMEMBERED)
def is_public(address: str) -> bool:
    """Tell whether an address, or the relay that it leads through, may be dialled from anywhere; of a name one cannot know, so it may."""
    if address.startswith(NEAR):
        return False
    try:
        return ipaddress.ip_address(host_of(address)).is_global
    except ValueError:
        return True


@lru_cache(_REMEMBERED)
def network_of(address: str) -> str:
    """Name the network that an address, or the relay it leads through, lies in: /16 of IPv4, /32 of IPv6; a name is its own network."""
    host = host_of(address)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((ip, NETWORK_BITS[ip.version]), strict=False))


def with_peer(text: str, peer_id: PeerId) -> str:
    """Return a multiaddr with the id of its peer at the end: records leave it out. Does not read the rest; see `read_address`."""
    return text if _ENDS_IN_PEER.search(text) else f"{text}/p2p/{peer_id}"


@lru_cache(_REMEMBERED)
def _read(text: str) -> re.Match[str]:
    if len(text) > limits.ADDRESS_CHARS:
        raise ValueError(f"an address of {len(text)} characters; at most {limits.ADDRESS_CHARS} are read")
    match = _ADDRESS.fullmatch(text)
    if match is None or not _is_host(match["kind"], match["host"]) or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is not an address like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...")
    return match


def _id_bytes(peer: str | None) -> bytes:
    if peer is None:
        return b""
    raw = base58.b58decode(peer)
    if len(raw) != _MULTIHASHES.get(raw[:2]):
        raise ValueError(f"{peer!r} is not the id of a libp2p host")
    return _PEER_CODE + bytes([len(raw)]) + raw


def _is_host(kind: str, host: str) -> bool:
    if kind.startswith("dns"):
        return _HOST_NAME.fullmatch(host) is not None
    try:
        ip = ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return "%" not in str(ip)
