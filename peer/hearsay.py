"""What others say about who is in the run: member records from the directory and from partners, checked before the book believes them.

A record that is not true costs the one who passed it on nothing: it may have been deceived itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from peer.loop_time import loop_s
from peer.partners import AddressBook
from protocol.errors import GossamerError
from protocol.records import MemberRecord
from protocol.terms import RunTerms, check_record

LAST_WORD_S = 5.0  # a record that ends so soon is a farewell (see Presence.leave), or nobody renews it


@dataclass(frozen=True, slots=True)
class Hearsay:
    """The way from a record into the book."""

    terms: RunTerms
    book: AddressBook
    now_s: Callable[[], float]  # Unix time

    def take(self, record: MemberRecord) -> None:
        """Take in a record, if it says anything new, is in force, and its peer may take part."""
        if not self.book.is_news(record):
            return
        with suppress(GossamerError, ValueError):  # the latter is a gap in our checks: no stranger is to end us through it
            check_record(record, self.terms, self.now_s())
            self.book.learn(record, loop_s())
            if record.expires_s < self.now_s() + LAST_WORD_S:
                self.book.leaves(record.peer_id, loop_s())

    def take_bytes(self, raw: bytes) -> None:
        """Take in a record as a partner passed it on."""
        with suppress(GossamerError, ValueError):
            self.take(MemberRecord.from_bytes(raw))
