"""The verified member records that this peer has seen: the latest valid one of each member, evenly over networks if there are too many."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from gossamer.protocol.addresses import network_of
from gossamer.protocol.errors import BadMessage, BadSignature
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.neighbours import Held, nearest
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.tasks import Changes

RECORDS_IN_VIEW = 256
LASTING_S = RECORD_LIFETIME_S / 2  # a record with this much remaining validity need not be sent again

_LENGTH_BYTES = 2


@dataclass(slots=True, eq=False)
class RecordStore:
    """Verified records of one run. `is_member` decides which records are kept. `now` returns Unix time in seconds.

    `changes` notifies after each record that is kept. Belongs to one event loop.
    """

    run_id: bytes
    is_member: Callable[[MemberRecord], bool] = lambda record: True
    now: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.Random)
    changes: Changes = field(default_factory=Changes)
    _view: dict[PeerId, Held] = field(default_factory=dict)

    def keep_latest(self, data: bytes) -> Held | None:
        """Parse and verify a record, and keep it if it is its peer's latest. Return None for an invalid record; never raise."""
        held = self._checked(data)
        if held is not None:
            old = self._view.get(held.peer)
            if old is None or held.record.supersedes(old.record):
                self._view[held.peer] = held
                self._make_room()
                self.changes.notify()
        return held

    def records(self) -> list[MemberRecord]:
        """Return the latest valid record of every peer."""
        self._drop_expired()
        return [held.record for held in self._view.values()]

    def latest(self, peer: PeerId) -> MemberRecord | None:
        """Return the latest record of a peer, valid or expired; None if there is none."""
        held = self._view.get(peer)
        return held.record if held is not None else None

    def known_to_last(self, place: int, most: int) -> list[Held]:
        """Return up to `most` records that need not be sent again, the nearest to a place first."""
        return nearest((held for held in self._view.values() if self.is_lasting(held)), place, most)

    def is_lasting(self, held: Held) -> bool:
        """Return whether a record remains valid for at least LASTING_S."""
        return held.record.expires_s >= self.now() + LASTING_S

    def is_in_force(self, held: Held) -> bool:
        """Return whether a verified record has not expired."""
        return held.record.expires_s > self.now()

    def _checked(self, data: bytes) -> Held | None:
        try:
            record = MemberRecord.from_bytes(data)
            known = self._view.get(record.peer_id)
            if known is not None and known.data == data and self.is_in_force(known):
                return known  # its signature has been verified before
            record.check(self.run_id, self.now())
            return Held(record, data) if self.is_member(record) else None
        except (BadMessage, BadSignature, ValueError):  # ValueError: an input that the checks miss must not crash this peer
            return None

    def _make_room(self) -> None:
        if len(self._view) > RECORDS_IN_VIEW:
            self._drop_expired()
        if len(self._view) > RECORDS_IN_VIEW:
            networks = {peer: _network_of_record(held.record) for peer, held in self._view.items()}
            crowded, _ = Counter(networks.values()).most_common(1)[0]
            del self._view[self.rng.choice([peer for peer, network in networks.items() if network == crowded])]

    def _drop_expired(self) -> None:
        for peer in [peer for peer, held in self._view.items() if not self.is_in_force(held)]:
            del self._view[peer]


def _network_of_record(record: MemberRecord) -> str:
    return network_of(record.addresses[0]) if record.addresses else ""


def gist_if_known(held: Held, known: Collection[bytes]) -> bytes:
    """Return a record's gist if the receiver's `known` gists contain it, else the whole record."""
    if known and (gist := held.record.gist) in known:
        return gist
    return held.data


def join_records(records: list[Held], known: Collection[bytes] = ()) -> bytes:
    """Encode a reply to a receiver with these `known` gists: each shortened record, preceded by its length (u16, little-endian)."""
    return b"".join(len(data).to_bytes(_LENGTH_BYTES, "little") + data for data in (gist_if_known(held, known) for held in records))


def split_reply(reply: bytes) -> Iterator[bytes]:
    """Yield the records and gists of a reply, up to the first truncated one."""
    start = 0
    while start + _LENGTH_BYTES <= len(reply):
        end = start + _LENGTH_BYTES + int.from_bytes(reply[start : start + _LENGTH_BYTES], "little")
        if end > len(reply):
            return
        yield reply[start + _LENGTH_BYTES : end]
        start = end
