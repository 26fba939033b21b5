"""Some peers, their records, and a book to put them in."""

from __future__ import annotations

from dataclasses import replace

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.records import MemberRecord
from tests.peer.two_sides import RUN_ID

ME = Identity(b"\x09" * 32)
NOW_S = 1_800_000_000


def somebody(number: int) -> Identity:
    return Identity(number.to_bytes(2, "little") * 16)


def record(who: Identity, sequence: int = 1, *, global_step: int = 0, finished: bool = False, lifetime_s: int = 90) -> MemberRecord:
    unsigned = MemberRecord(RUN_ID, who.peer_id, ("/ip4/192.0.2.7/tcp/4001",), global_step, finished, sequence, NOW_S + lifetime_s)
    return unsigned.signed(who)


def moved(old: MemberRecord, who: Identity, address: str) -> MemberRecord:
    return replace(old, addresses=(address,), sequence=old.sequence + 1, signature=b"").signed(who)


def book_of(*identities: Identity, now_s: float = 0.0) -> AddressBook:
    book = AddressBook(ME.peer_id)
    for identity in identities:
        book.learn(record(identity), now_s)
    return book


def ids(*identities: Identity) -> list[PeerId]:
    return [identity.peer_id for identity in identities]
