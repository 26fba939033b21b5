"""Word of who is there, on its way between peers: what of it is passed on, and what is believed.

Every record is its own peer's signed word, so whoever brings it need not be trusted, and is not blamed if it is old. Our own record goes to
everybody whom we talk to. All is bounded: how many records go out at once, what one peer is told in a time, and the book that they end in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress

from gossamer.peer.swarm.address_book import AddressBook, loop_s
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import INTRODUCED, PASSED_RECORDS, RECORD_BYTES
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.replies import Introduction
from gossamer.protocol.messages.terms import RunTerms, check_record

LAST_WORD_S = 5.0  # a record that ends so soon is a farewell (see Presence.leave), or nobody renews it; it is not passed on
FAMILIARITY = 0.02  # how fast we learn how much of the swarm we know: from some fifty members named to us


class Hearsay:
    """Records to and from others. `own` is this peer's latest record, once it announces itself."""

    def __init__(self, terms: RunTerms, book: AddressBook, time: SwarmTime, rng: random.Random) -> None:
        self.terms = terms
        self.book = book
        self.time = time
        self.own: MemberRecord | None = None
        self.news = asyncio.Event()  # set when somebody turns up of whom nothing was known any more; of strangers a full book is never done
        self.familiar = 1.0  # the share of those named to us whom we knew: that of the swarm that is in our book
        self._rng = rng

    def take(self, record: MemberRecord) -> None:
        """Take in a record, if it says anything new, is in force, and its peer may take part."""
        if not self.book.is_news(record):
            return
        with suppress(GossamerError, ValueError):  # the latter is a gap in our checks: no stranger is to end us through it
            check_record(record, self.terms, self.time.now_s())
            before = self.book.record_of(record.peer_id)
            is_back = not self.book.is_full if before is None else not self.is_in_force(before)
            self.book.learn(record, loop_s())
            if not self.is_in_force(record):
                self.book.leaves(record.peer_id, loop_s())
            elif is_back:
                self.news.set()

    def take_all(self, raw: Iterable[bytes]) -> None:
        """Take in records as a partner passed them on."""
        for one in raw:
            with suppress(GossamerError, ValueError):
                self.take(MemberRecord.from_bytes(one))

    def introduce(self, members: Iterable[bytes], by: PeerId) -> None:
        """Take in members whom one of them has named at random, and learn from it how much of the swarm we know.

        A book ends at 256 and says nothing of a larger swarm, but it is a random part of it. Somebody who names made-up members
        needs an invite for each, and has us think the swarm larger than it is.
        """
        for raw in members:
            with suppress(GossamerError, ValueError):
                record = MemberRecord.from_bytes(raw)
                was_known = self._is_there(record.peer_id)
                self.take(record)
                if record.peer_id != by and self._is_there(record.peer_id):
                    self.familiar += FAMILIARITY * (was_known - self.familiar)

    def records_for(self, partner: PeerId, most: int = PASSED_RECORDS) -> tuple[bytes, ...]:
        """Choose records for a partner: our own, and at random those of others whom we have not failed to reach."""
        known = [entry.record for entry in self.book.announced(loop_s()) if entry.peer_id != partner and not entry.failures]
        others = [record for record in known if record is not None and self.is_in_force(record)]
        own = [self.own] if self.own is not None and self.is_in_force(self.own) else []
        return tuple(record.to_bytes() for record in (own + self._rng.sample(others, min(most, len(others))))[:most])

    def introduction(self, asker: PeerId, most_bytes: int) -> bytes:
        """Name members to one that asks for them, in no more than `most_bytes`."""
        members = self.records_for(asker, min(INTRODUCED, most_bytes // (RECORD_BYTES + 3)))
        return Introduction(members, int(1000 * self.time.local_s())).to_bytes()

    def _is_there(self, peer_id: PeerId) -> bool:
        record = self.book.record_of(peer_id)
        return record is not None and self.is_in_force(record)

    def is_in_force(self, record: MemberRecord) -> bool:
        """Tell whether a record holds for a while yet."""
        return record.expires_s >= self.time.now_s() + LAST_WORD_S
