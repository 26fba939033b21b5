"""Addresses of a local network, sealed for those who are seen at the same public address: nobody else can use them.

A record goes to everybody. So what lies behind a router is written into it under a key that follows from the router's public address, as
others have told it: who stands behind the same router knows it, too. This keeps strangers from dialling addresses of no use to them, and
from reading them in passing; who tries all public addresses there are reads them nevertheless, and learns no secret.

    /near/4Vq9...        the ciphertext in base 58: AES-SIV, bound to the peer, of 7 or 19 bytes for each address
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable

import base58
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from gossamer.protocol.addresses import NEAR, host_of, port_of
from gossamer.protocol.identity import PeerId

SEALED = 3  # addresses at most
_BYTES = {4: 4, 6: 16}


def seal(addresses: Iterable[str], peer: PeerId, public_host: str) -> str:
    """Return the first few direct addresses of a peer as one that only those seen at `public_host` can open."""
    plain = b""
    for address in list(addresses)[:SEALED]:
        ip = ipaddress.ip_address(host_of(address))
        plain += bytes([ip.version]) + ip.packed + port_of(address).to_bytes(2, "big")
    return NEAR + base58.b58encode(_cipher(public_host).encrypt(plain, [peer.raw])).decode()


def unseal(address: str, peer: PeerId, public_host: str) -> list[str]:
    """Return the addresses in a sealed one of a peer; none where it was sealed for others, or is malformed."""
    try:
        sealed = base58.b58decode(address.removeprefix(NEAR).partition("/")[0])
        plain = _cipher(public_host).decrypt(sealed, [peer.raw])
        return [_read(part) for part in _parts(plain)]
    except (InvalidTag, ValueError, KeyError, IndexError):
        return []


def _parts(plain: bytes) -> list[bytes]:
    parts: list[bytes] = []
    while plain and len(parts) < SEALED:
        length = 1 + _BYTES[plain[0]] + 2
        parts.append(plain[:length])
        plain = plain[length:]
    return parts


def _read(part: bytes) -> str:
    ip = ipaddress.ip_address(part[1:-2])
    return f"/ip{ip.version}/{ip}/tcp/{int.from_bytes(part[-2:], 'big')}"


def _cipher(public_host: str) -> AESSIV:
    return AESSIV(hashlib.sha256(b"gossamer/near/1\n" + public_host.encode()).digest())
