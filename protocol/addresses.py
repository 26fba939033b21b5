"""Parse and classify the multiaddrs that a record or an invite may hold: TCP, circuit relay, and sealed local addresses (`nearby.py`).

    /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...
    /dns4/peer.example.org/tcp/4001/p2p/12D3Koo.../p2p-circuit/p2p/12D3Koo...
    /near/4Vq9.../p2p/12D3Koo...

Untrusted peers write this text, so every other form is rejected, QUIC included: the bundled p2pd's stack has known vulnerabilities. The
binary form is encoded here because hivemind's library wraps a relay's peer id in a CID, which p2pd rejects.
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
"""How a partner is reached: "direct" over the internet, "punched" over the internet by NAT hole punching, "relayed" through a circuit
relay, or "local" on this machine or the local network."""

NETWORK_BITS: Final = {4: 16, 6: 32}  # prefix length of the block that counts as one network: one party easily controls a whole block
CIRCUIT: Final = "/p2p-circuit"
_CODES: Final = {"ip4": b"\x04", "ip6": b"\x29", "dns": b"\x35", "dns4": b"\x36", "dns6": b"\x37"}  # multicodec numbers
_TCP_CODE: Final = b"\x06"
_PEER_CODE: Final = b"\xa5\x03"
_CIRCUIT_CODE: Final = b"\xa2\x02"
_MULTIHASHES: Final = {b"\x00\x24": 38, b"\x12\x20": 34}  # multihash prefix of a libp2p peer id -> its length: Ed25519 keys, all other keys
_ENDS_IN_PEER: Final = re.compile(r"/p2p/[^/]+\Z")
_REMEMBERED: Final = 1024  # cache size: the address book queries the same addresses several times a second
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE | re.ASCII)  # without ASCII, [a-z] matches U+017F


def read_address(text: str) -> PeerId | None:
    """Return the peer id of a multiaddr's final destination, None if it has none. Raises ValueError with a message for the operator."""
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
    """Return the binary form of a multiaddr, as p2pd expects it. Raises ValueError with a message for the operator."""
    match = _read(text)
    host = match["host"]
    name = host.encode() if match["kind"].startswith("dns") else ipaddress.ip_address(host).packed
    parts = [_CODES[match["kind"]], bytes([len(name)]) if match["kind"].startswith("dns") else b"", name]
    parts += [_TCP_CODE, int(match["port"]).to_bytes(2, "big"), _id_bytes(match["peer"])]
    parts += [_CIRCUIT_CODE if match["circuit"] else b"", _id_bytes(match["target"])]
    return b"".join(parts)


def route(address: str) -> Route:
    """Return the route that a remote multiaddr implies. It never returns "punched": see `route_between`."""
    return "relayed" if CIRCUIT in address else "direct" if is_public(address) else "local"


@lru_cache(_REMEMBERED)
def is_loopback(address: str) -> bool:
    """Return whether an address leads to this machine itself: a loopback address, or the unspecified one."""
    ip = _ip(address)
    return ip is not None and (ip.is_loopback or ip.is_unspecified)


def route_between(end: str, through: Collection[str], theirs: Collection[str]) -> Route:
    """Return the route of a connection with remote multiaddr `end`; `through`: our relays, `theirs`: the partner's addresses.

    p2pd does not report hole punching: a direct connection of two peers that cannot accept inbound connections counts as punched.
    """
    is_hidden = bool(through) and bool(theirs) and not any(route(address) == "direct" for address in theirs)
    return "punched" if is_hidden and route(end) == "direct" else route(end)


def host_of(address: str) -> str:
    """Return the IP address or DNS name in a multiaddr, the relay's for a circuit; an empty string if there is none."""
    return address.split("/")[2] if address.count("/") > 1 else ""


@lru_cache(_REMEMBERED)
def machine_of(address: str) -> str:
    """Return the IP address or DNS name in a multiaddr as `host_of` does, in one form however it is written."""
    return str(_ip(address) or host_of(address).lower())


def port_of(address: str) -> int:
    """Return the TCP port in a multiaddr. Raises ValueError if there is none."""
    return int(address.partition("/tcp/")[2].partition("/")[0])


def by_peer(addresses: Iterable[str]) -> dict[PeerId, tuple[str, ...]]:
    """Group multiaddrs by their final peer id. Every address must end in /p2p/<peer id>."""
    peers: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        peer = PeerId.from_text(address.rpartition("/p2p/")[2])
        peers[peer] = (*peers.get(peer, ()), address)
    return peers


@lru_cache(_REMEMBERED)
def is_public(address: str) -> bool:
    """Return whether an address, or the relay in it, is globally routable. A DNS name counts as public."""
    ip = _ip(address)
    return not address.startswith(NEAR) and (ip is None or ip.is_global)


@lru_cache(_REMEMBERED)
def network_of(address: str, ip4_bits: int = NETWORK_BITS[4], ip6_bits: int = NETWORK_BITS[6]) -> str:
    """Return the network of an address, or of the relay in it, as a block of this prefix length; the name itself for a DNS name."""
    ip = _ip(address)
    return host_of(address) if ip is None else str(ipaddress.ip_network((ip, ip4_bits if ip.version == 4 else ip6_bits), strict=False))


def network_seen(observed: str) -> str:
    """Return the network in which a connection's remote multiaddr lies: on a local network the host, empty behind a relay."""
    if not observed or route(observed) == "relayed":
        return ""
    return network_of(observed) if route(observed) == "direct" else host_of(observed)


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host_of(address))
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip  # a mapped one leads to the IPv4 host


def with_peer(text: str, peer_id: PeerId) -> str:
    """Append /p2p/<peer id> to a multiaddr unless it already ends in a peer id. Does not validate the rest: see `read_address`."""
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
