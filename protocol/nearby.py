"""Sealed local addresses: local-network addresses that only peers behind the same router can read.

Every peer can read a member record. A peer behind a router therefore encrypts its local addresses with a key from the router's public
address. Trying all public addresses recovers them: this spares strangers useless dials, and is not secrecy.

    /near/4Vq9...        base 58 of AES-SIV ciphertext, with the peer id as associated data; 7 or 19 bytes per IPv4 or IPv6 address
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Iterator
from itertools import islice

import base58
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from gossamer.protocol.addresses import NEAR, host_of, port_of
from gossamer.protocol.identity import PeerId

MAX_SEALED = 3  # addresses in one sealed address
_BYTES = {4: 4, 6: 16}


def seal(addresses: Iterable[str], peer: PeerId, public_host: str) -> str:
    """Encrypt the first MAX_SEALED local TCP addresses of a peer into one /near address, readable by peers seen at `public_host`."""
    plain = b""
    for address in list(addresses)[:MAX_SEALED]:
        ip = ipaddress.ip_address(host_of(address))
        plain += bytes([ip.version]) + ip.packed + port_of(address).to_bytes(2, "big")
    return NEAR + base58.b58encode(_cipher(public_host).encrypt(plain, [peer.raw])).decode()


def unseal(address: str, peer: PeerId, public_host: str) -> list[str]:
    """Return the addresses inside a peer's /near address; none if it was sealed for another public host or is malformed."""
    try:
        sealed = base58.b58decode(address.removeprefix(NEAR).partition("/")[0])
        plain = _cipher(public_host).decrypt(sealed, [peer.raw])
        return list(islice(_addresses(plain), MAX_SEALED))
    except (InvalidTag, ValueError, KeyError, IndexError):
        return []


def _addresses(plain: bytes) -> Iterator[str]:
    while plain:
        end = 1 + _BYTES[plain[0]]
        ip = ipaddress.ip_address(plain[1:end])
        yield f"/ip{ip.version}/{ip}/tcp/{plain[end] << 8 | plain[end + 1]}"
        plain = plain[end + 2 :]


def _cipher(public_host: str) -> AESSIV:
    return AESSIV(hashlib.sha256(b"gossamer/near/1\n" + public_host.encode()).digest())
