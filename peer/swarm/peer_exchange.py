"""Peer exchange: which member records are passed on to other peers, and which received ones enter the address book.

Every record is signed by its own peer, so the peer that passes it on need not be trusted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeGuard

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import ADDRESS_CHARS, MAX_LISTED, PASSED_RECORDS
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.replies import LISTED_BYTES, SEEN_BYTES, PeerList
from gossamer.protocol.messages.terms import RunTerms, check_record, sybil_group_key
from gossamer.protocol.tasks import loop_s

LAST_WORD_S = 5.0  # a record that expires so soon is a farewell (see Presence.leave) or is not renewed; it is not passed on
FAMILIARITY = 0.02  # the weight of one received record in `familiar`: it averages over some fifty


@dataclass(slots=True)
class PeerExchange:
    """Sends and receives member records. `own` is this peer's newest record, once it announces itself."""

    terms: RunTerms
    book: AddressBook
    time: SwarmTime
    rng: random.Random
    own: MemberRecord | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set when a peer appears or reappears; for a full book, only the latter
    familiar: float = 1.0  # the share of the received records whose peers were in the book: estimates the book's share of the swarm

    def take(self, record: MemberRecord) -> None:
        """Add a record to the book if it is newer than ours, valid, and its peer may take part."""
        if not self.book.is_news(record):
            return
        with suppress(GossamerError, ValueError):  # ValueError is a gap in our checks, which no stranger may exploit
            check_record(record, self.terms, self.time.now_s())
            before = self.book.get(record.peer_id).record
            is_back = not self.book.is_full if before is None else not self.is_in_force(before)
            self.book.learn(record, loop_s())
            if not self.is_in_force(record):
                self.book.note_leaving(record.peer_id, loop_s())
            elif is_back:
                self.news.set()

    def take_all(self, raw: Iterable[bytes]) -> None:
        """Add the valid ones of these encoded records."""
        for one in raw:
            with suppress(GossamerError, ValueError):
                self.take(MemberRecord.from_bytes(one))

    def list_peers(self, members: Iterable[bytes], by: PeerId) -> None:
        """Add the random members that peer `by` sent, and update `familiar`, the book's share of the swarm."""
        for raw in members:
            with suppress(GossamerError, ValueError):
                record = MemberRecord.from_bytes(raw)
                was_known = self.is_in_force(self.book.get(record.peer_id).record)
                self.take(record)
                if record.peer_id != by and self.is_in_force(self.book.get(record.peer_id).record):
                    self.familiar += FAMILIARITY * (was_known - self.familiar)

    def records_for(self, partner: PeerId, most: int = PASSED_RECORDS) -> tuple[bytes, ...]:
        """Choose records for a partner: our own, and a random sample of those of reachable peers."""
        known = [entry.record for entry in self.book.announced(loop_s()) if entry.peer_id != partner and not entry.failures]
        others = [record for record in known if self.is_in_force(record)]
        own = [self.own] if self.is_in_force(self.own) else []
        return tuple(record.to_bytes() for record in (own + self.rng.sample(others, min(most, len(others))))[:most])

    def peer_list(self, asker: PeerId, observed: str, most_bytes: int) -> bytes:
        """Return the answer to a peer that asks for members from this address: as many as fit into `most_bytes`."""
        members = self.records_for(asker, min(MAX_LISTED, max(0, most_bytes - SEEN_BYTES) // LISTED_BYTES))
        return PeerList(members, int(1000 * self.time.local_s()), observed if len(observed) <= ADDRESS_CHARS else "").to_bytes()

    def group_of(self, peer: PeerId) -> PeerId | None:
        """Return the key of a peer's Sybil group: in an open run its own id; None where its invite is unknown."""
        return peer if self.terms.access == "open" else sybil_group_key(peer, self.book.get(peer).credential, self.terms)

    def is_in_force(self, record: MemberRecord | None) -> TypeGuard[MemberRecord]:
        """Return whether there is a record and it does not expire soon."""
        return record is not None and record.expires_s >= self.time.now_s() + LAST_WORD_S
