"""Every limit on what a peer accepts, with its reason; the sizes that a manifest implies are in `protocol/messages/terms.py`."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from gossamer.protocol.errors import BadMessage

PROTOCOL: Final = 1  # version of messages and manifests; a change that another release would misread takes the next number

KIB: Final = 1024

# ---- frames ----
CHUNK_BYTES: Final = 256 * KIB  # most data in one chunk: framing overhead below 0.1 %, and stream buffers of a few megabytes
ANSWER_BYTES: Final = 4096 * KIB  # most bytes of one answer over a bulk stream: an eighth of a second at 268 Mbit/s
FRAME_BYTES: Final = 512 * KIB  # largest frame, checked before parsing: a parsed message takes up to 36 times its size, 18 MiB
SMALL_FRAME_BYTES: Final = 8 * KIB  # largest frame without data or bitmap: the largest Hello, with three records, takes 3.2 KiB
REFUSAL_DETAIL_CHARS: Final = 200  # longest detail text of a refusal: one line in a log
PASSED_RECORDS: Final = 3  # most records in a Hello or a request: enough to refill an address book, too few to flood it
MAX_LISTED: Final = 16  # most records in a peer-exchange reply: after three replies a newcomer no longer depends on any bootstrap node

# ---- rates ----
SLOWEST_BYTES_PER_S: Final = 32 * KIB  # slowest rate for which a meeting's timeout allows: a quarter of a megabit per second
LEAST_BYTES_PER_S: Final = 40_000  # lowest rate limit that a peer may set itself: one meeting at the slowest rate, and a fifth more

# ---- fixed sizes ----
NONCE_BYTES: Final = 16
RUN_ID_BYTES: Final = 32
DIGEST_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
SEED_BYTES: Final = 32
MEETING_ID_BYTES: Final = 16
MICRO_BATCH_BYTES: Final = 16

# ---- counts ----
VERSIONS: Final = 1 << 16  # largest protocol version number, far below the range of its u32 field
RELEASES: Final = 10**9  # largest release number: three numbers of at most three digits each
CODECS: Final = 1 << 16  # largest wire id of a codec, far below the range of its u32 field
FRAGMENTS: Final = 1 << 16  # most fragments: more than any model has blocks
HOPS: Final = 1 << 48  # most hops on a lane
WINDOW: Final = 1 << 10  # most unanswered hops on a lane
STEPS: Final = 1 << 48  # largest credible global step, which a float still represents exactly
TOKENS: Final = 1 << 53  # largest token count that a float represents exactly: weights by tokens are computed in floats
TRANSFER_BYTES: Final = 1 << 40  # largest transfer, above any model's state; the sizes that the manifest implies are checked separately
STATE_BYTES: Final = 1 << 37  # largest state of a model, or of one stage: a bit for each piece of it, 64 KiB, fits into one chunk
UNIX_SECONDS: Final = 253_402_300_799  # latest timestamp: the end of the year 9999, the last that Python's datetime represents

# ---- records ----
RECORD_BYTES: Final = KIB  # largest record; one whose addresses pass `announceable` takes at most 961 bytes
MOST_GENERATIONS: Final = 0xFFFF  # most restores of a home from a backup: the upper 16 bits of a record's sequence number, below STEPS
RECORD_ADDRESSES: Final = 4  # most addresses in a record: public IPv4 and IPv6, and two relays
FIGURE: Final = (1 << 35) - 1  # largest figure of a member's own part, five bytes on the wire: a record with all of them still fits
LOSS: Final = 1000  # nats per token, far above that of any model that trains
LOSS_MILLI: Final = 1000 * LOSS + 1  # largest published loss in thousandths, plus one
RECORD_ADDRESS_CHARS: Final = 4 * 124  # in all addresses of a record; a circuit through an IPv6 relay takes 123, without the peer's own id
ADDRESS_CHARS: Final = 184  # longest address; a circuit through an IPv6 relay with both peer ids takes 180 characters
RECORD_LIFETIME_S: Final = 300  # longest validity of a record: a dead peer disappears within it, a live one renews its record before
RECORD_NEWS_S: Final = 120  # a live peer renews its record, and others see that, within about this time; a dead peer does not
CLOCK_SKEW_S: Final = 30  # tolerated lead of another machine's clock: a record may expire this much later than RECORD_LIFETIME_S allows

CURVE_POINTS: Final = 128  # most points of a run's curve that one member tells: a chart shows no more
CURVE_FIELDS: Final = {  # the lists of such a curve, and the largest value in each
    "times_s": UNIX_SECONDS, "steps": STEPS, "losses_milli": LOSS_MILLI, "lows_milli": LOSS_MILLI, "highs_milli": LOSS_MILLI,
    "lives": 1 << 16, "trained": TOKENS,
}  # fmt: skip

# ---- invites and manifests ----
INVITE_BOOTSTRAPS: Final = 8  # most bootstrap addresses in an invite: enough for redundancy, few enough to keep the text short
INVITE_CHARS: Final = 4 * KIB  # longest invite, without white space; eight addresses of the largest size and a credential take 2633
MANIFEST_BYTES: Final = 64 * KIB  # largest signed manifest: an allow list of 512 members fits
ISSUERS: Final = 16  # most peers that may issue invites in one run
REVOCATIONS: Final = 1024  # most revocations in one run: all of them fit into one chunk
MEMBERS: Final = 512  # most peers on an allow list; a larger swarm uses invites
SOURCES: Final = 64  # most data sources in a mixture
MANIFEST_LINE_DOTS: Final = 512  # most dots in a line of TOML: the parser's time grows with the square of a dotted key's length

# ---- models ----
CONFIG_INTEGER: Final = 1 << 24  # largest integer in a model's config: 64 times the largest vocabulary in use, and ten million positions
STAGES: Final = 256  # most stages of a model: of one block each, twice those of the deepest language models
LAYERS: Final = 1024  # most layers, eight times those of the deepest language models
TENSORS: Final = 1 << 16  # most parameter tensors: 64 in each of the layers
LAYOUT_CHARS: Final = 32 * KIB  # of the names and shapes in a program's manifest: half of it; a larger layout is known by its digest only
PARAMETERS: Final = TRANSFER_BYTES // 4  # most parameters: the state of a run with momentum has four bytes for each
BATCH_TOKENS: Final = 1 << 26  # most tokens in the batch of an inner step, of all a peer's devices


# ---- limits by field name: a name means the same in every message, record and credential ----
_LENGTHS: Final = {
    "run_id": RUN_ID_BYTES,
    "meeting_id": MEETING_ID_BYTES,
    "micro_batch": MICRO_BATCH_BYTES,
    **dict.fromkeys(("nonce", "partner_nonce"), NONCE_BYTES),
    **dict.fromkeys(("sha256", "name", "bootstraps_sha256"), DIGEST_BYTES),
    **dict.fromkeys(("signature", "bearer_signature"), SIGNATURE_BYTES),
}
_MAY_BE_EMPTY: Final = ("partner_nonce", "name", "signature", "bearer_signature")
_COUNTS: Final = {
    "protocol_version": VERSIONS,
    "fragment": FRAGMENTS,
    "codec": CODECS,
    "tokens": TOKENS,
    "release": RELEASES,
    "num_bytes": ANSWER_BYTES,
    "loss_milli": LOSS_MILLI,
    "number": HOPS,
    "window": WINDOW,
    "stage": STAGES,
    **dict.fromkeys(("global_step", "sequence"), STEPS),
    **dict.fromkeys(("own_steps", "joined_s", "carried_mb"), FIGURE),
    **dict.fromkeys(("sketch_bytes", "payload_bytes", "total_bytes", "offset"), TRANSFER_BYTES),
    **dict.fromkeys(("expires_s", "not_after_s", "revoked_s"), UNIX_SECONDS),
    "unix_ms": 1000 * UNIX_SECONDS,
}
_SIZES: Final = {
    "detail": REFUSAL_DETAIL_CHARS,
    "observed": ADDRESS_CHARS,
    "records": PASSED_RECORDS,
    "members": MAX_LISTED,
    "addresses": RECORD_ADDRESSES,
    "failed_blocks": CHUNK_BYTES,
    **dict.fromkeys(CURVE_FIELDS, CURVE_POINTS),
}
_RECORDS: Final = ("records", "members")  # encoded member records
_LIMITED: Final = frozenset({*_LENGTHS, *_COUNTS, *_SIZES, *_RECORDS})
_FIELD_NAMES: Final[dict[type, tuple[str, ...]]] = {}  # of each class, kept because every message asks for them


class Bounded:
    """A dataclass that enforces the limits of its field names on construction. Raises BadMessage."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in field_names(type(self)):
            if name not in _LIMITED:
                continue
            value = getattr(self, name)
            if name in _LENGTHS and (value or name not in _MAY_BE_EMPTY):
                need_length(name, value, _LENGTHS[name])
            elif name in _COUNTS:
                need_count(name, value, _COUNTS[name])
            elif name in _SIZES:
                need_count(f"size of {name}", len(value), _SIZES[name])
            if name in _RECORDS:
                for record in value:
                    need_count("size of a record", len(record), RECORD_BYTES)


def field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in order."""
    if kind not in _FIELD_NAMES:
        _FIELD_NAMES[kind] = tuple(field.name for field in fields(kind))
    return _FIELD_NAMES[kind]


def need_length(name: str, value: bytes, num_bytes: int) -> None:
    """Raise BadMessage unless `value` has exactly this many bytes."""
    if len(value) != num_bytes:
        raise BadMessage(f"{name} has {len(value)} bytes, not {num_bytes}")


def need_count(name: str, value: int, most: int) -> None:
    """Raise BadMessage unless 0 <= value <= most."""
    if not 0 <= value <= most:
        raise BadMessage(f"{name} is {value}, outside 0 to {most}")
