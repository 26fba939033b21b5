"""What a peer tells others about itself.

A record is a hint: signed, so nobody can forge or shorten it; short-lived, so the dead are forgotten; and never proof that the peer
is there, which only a connection gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.addresses import NEAR, is_loopback, read_address, route
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import PeerId, Signed
from gossamer.protocol.limits import Bounded
from gossamer.protocol.messages.frames import need_signed, read_alone, write_alone
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.wire import peer_pb2

GIST_BYTES = 8


@dataclass(frozen=True, slots=True)
class MemberRecord(Signed):
    """One peer's announcement of itself in one run; at most 1 KiB as bytes."""

    CONTEXT = b"gossamer/member-record/1"

    run_id: bytes  # 32 bytes
    peer_id: PeerId  # who signs
    addresses: tuple[str, ...]  # at most 4 multiaddrs; hints for dialing
    clock_steps: int  # the peer's schedule clock when it signed
    finished: bool  # it has reached the end of the run and only averages
    sequence: int  # grows with each record of this peer
    expires_s: int  # Unix seconds
    credential: Credential | None = None  # so that others can check its membership
    paused: bool = False  # it is there, but meets nobody and gives nothing for now
    tokens: int = 0  # trained by the peer since it joined
    release: int = 0  # of the software it runs, as one number (peer/swarm/sight.py); 0 where it does not say
    signature: bytes = b""  # the peer's, over every other field

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
        """Return the record as it is stored. Raises BadMessage when it is not signed, or its addresses make it larger than 1 KiB."""
        need_signed(self)
        data = write_alone(peer_pb2.MemberRecord(), self)
        limits.need_count("size of a record", len(data), limits.RECORD_BYTES)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> MemberRecord:
        """Read a stored record. Raises BadMessage, and nothing else; says nothing about signature or time: see `check`."""
        record = read_alone(cls, peer_pb2.MemberRecord(), data, "a record", limits.RECORD_BYTES)
        need_signed(record)  # what we believe we pass on, and whoever is passed an incomplete one refuses it
        return record

    def check(self, run_id: bytes, now_s: float) -> None:
        """Raise BadSignature or BadMessage unless this is its peer's own word, about this run, and in force now.

        Membership is `terms.check_record`.
        """
        if self.run_id != run_id:
            raise BadMessage("a record of another run")
        if self.expires_s <= now_s:
            raise BadMessage(f"a record that expired {now_s - self.expires_s:.0f} s ago")
        if self.expires_s > now_s + limits.RECORD_LIFETIME_S + limits.CLOCK_SKEW_S:
            raise BadMessage(f"a record that expires only in {self.expires_s - now_s:.0f} s")
        self.verify(self.peer_id)

    @property
    def gist(self) -> bytes:
        """Return a hash of whose word it is and of what in it matters to others: where, whether it has come to the end, or is paused."""
        words = (str(self.peer_id), str(int(self.finished)), str(int(self.paused)), *self.addresses)
        return hashlib.sha256("\n".join(words).encode()).digest()[:GIST_BYTES]

    def supersedes(self, other: MemberRecord) -> bool:
        """Whether this is a later word of the same peer, and so replaces `other`."""
        return self.peer_id == other.peer_id and self.sequence > other.sequence


def announceable(addresses: Iterable[str], peer_id: PeerId) -> tuple[str, ...]:
    """Return the addresses that go into a peer's own record: the first ones that are legal, without its own id, and fit.

    Addresses of the local network, or else of this machine, are told only where there are no others: a record goes to everybody.
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
