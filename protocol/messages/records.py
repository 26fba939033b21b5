"""Member records: what a peer announces about itself, signed and valid for a few minutes. Only a connection proves that it is alive."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.addresses import NEAR, is_loopback, read_address, route
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import PeerId, Signed
from gossamer.protocol.limits import Bounded
from gossamer.protocol.messages.figures import MemberFigures
from gossamer.protocol.messages.frames import need_signed, read_unframed, write_unframed
from gossamer.protocol.run.invite import Credential

GIST_BYTES = 8
GENERATION = 1 << 32  # of a sequence number: the rest is about the time of day in Unix seconds


@dataclass(frozen=True, slots=True)
class MemberRecord(Signed):
    """A peer's announcement in one run; at most 1 KiB when encoded."""

    CONTEXT = b"gossamer/member-record/1"

    run_id: bytes  # 32 bytes
    peer_id: PeerId  # the announced peer, which signs
    addresses: tuple[str, ...]  # at most 4 multiaddrs
    global_step: int  # the peer's global step at signing
    finished: bool  # the peer has reached the end of the run and only averages
    sequence: int  # increases with each record of this peer: GENERATION times the generation of its home, and the time
    expires_s: int  # Unix seconds
    credential: Credential | None = None  # proves the peer's membership
    paused: bool = False  # the peer is reachable, but neither meets nor serves state
    tokens: int = 0  # trained by the peer since it joined
    release: int = 0  # the peer's software release as one number (peer/swarm/presence.py); 0 if unknown
    signature: bytes = b""  # the peer's, over every other field
    figures: MemberFigures | None = None  # of its own part; none before it trains
    stage: int = 0  # in a staged run: the stage that the peer holds, plus one; 0: none yet

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        for address in self.addresses:
            try:
                target = read_address(address)
            except ValueError as error:
                raise BadMessage(str(error)) from None
            if target not in (None, self.peer_id):
                raise BadMessage(f"an address of another peer: {address}")

    def to_bytes(self) -> bytes:
        """Encode the record. Raises BadMessage if it is unsigned or larger than 1 KiB."""
        need_signed(self)
        data = write_unframed(self)
        limits.need_count("size of a record", len(data), limits.RECORD_BYTES)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> MemberRecord:
        """Parse an encoded record. Raises BadMessage. Signature and expiry are not checked: see `check`."""
        record = read_unframed(cls, data, "a record", limits.RECORD_BYTES)
        need_signed(record)  # records are forwarded, and other peers reject an unsigned one
        return record

    def check(self, run_id: bytes, now_s: float) -> None:
        """Raise BadSignature or BadMessage unless its peer signed it for this run and it is valid at `now_s` (Unix time)."""
        if self.run_id != run_id:
            raise BadMessage("a record of another run")
        if self.expires_s <= now_s:
            raise BadMessage(f"a record that expired {now_s - self.expires_s:.0f} s ago")
        if self.expires_s > now_s + limits.RECORD_LIFETIME_S + limits.CLOCK_SKEW_S:
            raise BadMessage(f"a record that is valid for too long: {self.expires_s - now_s:.0f} s")
        self.verify(self.peer_id)

    @property
    def generation(self) -> int:
        """Return the generation of the peer's home, which each restore from a backup raises."""
        return self.sequence // GENERATION

    @property
    def is_bare(self) -> bool:
        """Return whether this is like the record of a peer without a trainer (Membership.bare_record)."""
        return self.paused and not self.global_step and not self.tokens

    @property
    def is_starting(self) -> bool:
        """Return whether the peer is not paused by anybody: its trainer has not reported yet in this start, or since the last pause."""
        return self.paused and self.figures is None

    @property
    def gist(self) -> bytes:
        """Return a hash (8 bytes) of the parts that matter to other peers: peer id, addresses, stage, and the flags."""
        stage = [f"stage {self.stage}"] if self.stage else []
        flags = str(int(self.finished)), str(int(self.paused)), *(["starting"] if self.is_starting else [])
        parts = (str(self.peer_id), *flags, *stage, *self.addresses)
        return hashlib.sha256("\n".join(parts).encode()).digest()[:GIST_BYTES]

    def supersedes(self, other: MemberRecord) -> bool:
        """Return whether this is a later record of the same peer than `other`."""
        return self.peer_id == other.peer_id and self.sequence > other.sequence


def announceable(addresses: Iterable[str], peer_id: PeerId) -> tuple[str, ...]:
    """Select the addresses for a peer's own record: the first valid ones that fit, without the peer's own id.

    Every peer can read a record, so plain local addresses are included only if there are no wider ones, and loopback ones if no others.
    """
    short = dict.fromkeys(address.removesuffix(f"/p2p/{peer_id}") for address in addresses)
    legal = [address for address in short if _is_legal(address)]
    wide = [address for address in legal if route(address) != "local" or address.startswith(NEAR)]
    kept: list[str] = []
    for address in wide or [address for address in legal if not is_loopback(address)] or legal:
        if sum(map(len, kept)) + len(address) <= limits.RECORD_ADDRESS_CHARS:
            kept.append(address)
    return tuple(kept[: limits.RECORD_ADDRESSES])


def _is_legal(address: str) -> bool:
    try:
        return read_address(address) is None
    except ValueError:
        return False
