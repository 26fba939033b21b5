"""Every cap on what a peer accepts, in one place, each with its reason.

A cap that protects memory is checked before anything is parsed or allocated; the message types check the rest. Sizes that the
manifest implies (payloads, state) are not here: see `protocol/messages/terms.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

from gossamer.protocol.errors import BadMessage

PROTOCOL_VERSION: Final = 1
"""What runs that begin here speak; a change that an older peer cannot read raises it."""
SPOKEN: Final = tuple(version for version in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1) if version)
"""Versions that this build speaks, the newest first: a run that exists goes on through one change of the protocol."""

KIB: Final = 1024

# ---- frames ----
CHUNK_BYTES: Final = 256 * KIB
"""Data in one chunk: large enough that framing costs under 0.1 %, small enough that the buffers of two streams stay in the megabytes."""
FRAME_BYTES: Final = 512 * KIB
"""Refused before parsing, and gRPC's receive limit. Protobuf can blow a message up 36 times in memory (measured): 18 MiB here."""
SMALL_FRAME_BYTES: Final = 8 * KIB
"""Every frame that carries neither data nor a bitmap: the largest Hello, with three of the largest records, takes 3.2 KiB."""
REFUSAL_DETAIL_CHARS: Final = 200
"""One line in a log."""
PASSED_RECORDS: Final = 3
"""Records in a Hello or a request, the sender's own among them: enough to refill an address book, too few to flood one."""
INTRODUCED: Final = 16
"""Records in an answer to who asks for members: a newcomer that hears three such answers can lose any door."""

# ---- rates ----
SLOWEST_BYTES_PER_S: Final = 32 * KIB
"""A quarter of a megabit each second: what a meeting is given time for at least, whatever is measured."""
LEAST_BYTES_PER_S: Final = 40_000
"""The least that a peer may limit itself to: one meeting at the slowest rate, and a fifth more for everything beside it."""

# ---- fixed sizes ----
NONCE_BYTES: Final = 16
RUN_ID_BYTES: Final = 32
DIGEST_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
SEED_BYTES: Final = 32
MEETING_ID_BYTES: Final = 16

# ---- counts ----
VERSIONS: Final = 1 << 16
"""The largest version number; a u32 on the wire, kept far from its end."""
RELEASES: Final = 10**9
"""Three numbers of at most three digits."""
CODECS: Final = 1 << 16
"""The largest wire id of a codec; likewise."""
FRAGMENTS: Final = 1 << 16
"""More fragments than any model has blocks."""
STEPS: Final = 1 << 48
"""A clock beyond this is a lie, and still exact in a float."""
TOKENS: Final = 1 << 53
"""The largest count that a float keeps exactly: token weights are computed in floats."""
TRANSFER_BYTES: Final = 1 << 40
"""A tebibyte: above any model's state; the manifest's own sizes are checked beside it."""
UNIX_SECONDS: Final = 253_402_300_799
"""The end of the year 9999, where date functions end."""

UNIX_MILLISECONDS: Final = 1000 * UNIX_SECONDS

# ---- records ----
RECORD_BYTES: Final = KIB
"""The largest with `announceable` addresses takes 934."""
RECORD_ADDRESSES: Final = 4
"""Public IPv4 and IPv6, and two relays."""
RECORD_ADDRESS_CHARS: Final = 4 * 128
"""All addresses of a record together; a circuit through an IPv6 relay takes 123 characters without the peer's own id."""
ADDRESS_CHARS: Final = 184
"""One address: a circuit through an IPv6 relay with both peer ids takes 180."""
RECORD_LIFETIME_S: Final = 300
"""A vanished peer is forgotten after at most this long; a live one announces again well before."""
CLOCK_SKEW_S: Final = 30
"""How far another machine's clock may run ahead of ours before its records look too long-lived."""

# ---- invites and manifests ----
INVITE_BOOTSTRAPS: Final = 8
"""Several independent ways in; more would make the text unwieldy."""
INVITE_CHARS: Final = 4 * KIB
"""Eight of the longest addresses and a credential take 2633 characters; pasted white space does not count."""
MANIFEST_BYTES: Final = 64 * KIB
"""An allow list of 512 members fits."""
ISSUERS: Final = 16
"""Peers that may sign invites."""
REVOCATIONS: Final = 1024
"""Names that the issuers of a run have revoked: all of them fit into one chunk."""
MEMBERS: Final = 512
"""Names on an allow list; a larger swarm uses invites."""
SOURCES: Final = 64
"""Of a mixture."""


# ---- where they hold: the name of a field means the same in every message, record and credential ----
_LENGTHS: Final = {
    "run_id": RUN_ID_BYTES,
    "nonce": NONCE_BYTES,
    "partner_nonce": NONCE_BYTES,
    "meeting_id": MEETING_ID_BYTES,
    "sha256": DIGEST_BYTES,
    "name": DIGEST_BYTES,
    "bootstraps_sha256": DIGEST_BYTES,
    "signature": SIGNATURE_BYTES,
    "bearer_signature": SIGNATURE_BYTES,
}
_MAY_BE_EMPTY: Final = ("partner_nonce", "name", "signature", "bearer_signature")
_COUNTS: Final = {
    "protocol_version": VERSIONS,
    "fragment": FRAGMENTS,
    "codec": CODECS,
    "tokens": TOKENS,
    "clock_steps": STEPS,
    "release": RELEASES,
    "sequence": STEPS,
    "sketch_bytes": TRANSFER_BYTES,
    "payload_bytes": TRANSFER_BYTES,
    "total_bytes": TRANSFER_BYTES,
    "offset": TRANSFER_BYTES,
    "num_bytes": CHUNK_BYTES,
    "expires_s": UNIX_SECONDS,
    "not_after_s": UNIX_SECONDS,
    "revoked_s": UNIX_SECONDS,
    "unix_ms": UNIX_MILLISECONDS,
}
_SIZES: Final = {
    "detail": REFUSAL_DETAIL_CHARS,
    "observed": ADDRESS_CHARS,
    "records": PASSED_RECORDS,
    "members": INTRODUCED,
    "addresses": RECORD_ADDRESSES,
    "failed_blocks": CHUNK_BYTES,
}


class Bounded:
    """A dataclass whose fields are within the caps that their names imply; raises BadMessage when made with others."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in field_names(type(self)):
            value = getattr(self, name)
            if name in _LENGTHS and (value or name not in _MAY_BE_EMPTY):
                need_length(name, value, _LENGTHS[name])
            elif name in _COUNTS:
                need_count(name, value, _COUNTS[name])
            elif name in _SIZES:
                need_count(f"size of {name}", len(value), _SIZES[name])


_NAMES: Final[dict[type[Any], tuple[str, ...]]] = {}


def field_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in order."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind))
    return _NAMES[kind]


def need_length(name: str, value: bytes, num_bytes: int) -> None:
    """Raise BadMessage unless `value` has exactly this many bytes."""
    if len(value) != num_bytes:
        raise BadMessage(f"{name} has {len(value)} bytes, not {num_bytes}")


def need_count(name: str, value: int, most: int) -> None:
    """Raise BadMessage unless 0 <= value <= most."""
    if not 0 <= value <= most:
        raise BadMessage(f"{name} is {value}, outside 0 to {most}")


def need_record_sizes(records: Iterable[bytes]) -> None:
    """Raise BadMessage unless each of these is of a size that a member record may have."""
    for record in records:
        need_count("size of a record", len(record), RECORD_BYTES)
