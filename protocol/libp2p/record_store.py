"""The member records that this peer has seen and checked: a bounded, mixed view of the swarm.

No network here. Only signed records of members of this run are kept, only for minutes, only newer than what is held, only so many; where
there is no room, one of the most crowded network goes, drawn at random. Not a proof of anything: see `Directory`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from gossamer.protocol.addresses import network_of
from gossamer.protocol.errors import BadMessage, BadSignature
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.neighbours import Held, nearest
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.messages.records import MemberRecord

RECORDS_IN_VIEW = 256
LASTING_S = RECORD_LIFETIME_S / 2  # a record that is in force for so long yet need not be told again

_LENGTH_BYTES = 2


class RecordShelf:
    """Checked records of one run. `is_member` says whose records to keep; `now` is Unix time in seconds."""

    def __init__(
        self,
        run_id: bytes,
        is_member: Callable[[MemberRecord], bool] = lambda record: True,
        now: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.now = now
        self._run_id = run_id
        self._is_member = is_member
        self.rng = rng or random.Random()
        self._view: dict[PeerId, Held] = {}

    def read(self, data: bytes) -> Held | None:
        """Check a record and keep it, if it is its owner's latest; None when it is no member's word in force. Never raises."""
        held = self._checked(data)
        if held is not None:
            old = self._view.get(held.peer)
            if old is None or held.record.supersedes(old.record):
                self._view[held.peer] = held
                self._make_room()
        return held

    def records(self) -> list[MemberRecord]:
        """Return the latest record in force of every peer seen."""
        self._drop_expired()
        return [held.record for held in self._view.values()]

    def latest(self, peer: PeerId) -> MemberRecord | None:
        """Return the latest record of a peer, in force or not; None where it is not in view."""
        held = self._view.get(peer)
        return held.record if held is not None else None

    def lasting(self, place: int, most: int) -> list[Held]:
        """Return records that need not be told again, the nearest to a place first."""
        return nearest((held for held in self._view.values() if self.is_lasting(held)), place, most)

    def is_lasting(self, held: Held) -> bool:
        """Whether a record will be in force for a good while."""
        return held.record.expires_s >= self.now() + LASTING_S

    def is_in_force(self, held: Held) -> bool:
        """Whether a record that was checked before has not expired."""
        return held.record.expires_s > self.now()

    def _checked(self, data: bytes) -> Held | None:
        try:
            record = MemberRecord.from_bytes(data)
            known = self._view.get(record.peer_id)
            if known is not None and known.data == data and self.is_in_force(known):
                return known  # its signature was checked when it came first
            record.check(self._run_id, self.now())
            return Held(record, data) if self._is_member(record) else None
        except (BadMessage, BadSignature, ValueError):  # a ValueError is a gap in our checks: a stranger must not end us through it
            return None

    def _make_room(self) -> None:
        if len(self._view) > RECORDS_IN_VIEW:
            self._drop_expired()
        if len(self._view) > RECORDS_IN_VIEW:
            networks = {peer: _network(held.record) for peer, held in self._view.items()}
            crowded, _ = Counter(networks.values()).most_common(1)[0]
            del self._view[self.rng.choice([peer for peer, network in networks.items() if network == crowded])]

    def _drop_expired(self) -> None:
        for peer in [peer for peer, held in self._view.items() if not self.is_in_force(held)]:
            del self._view[peer]


def _network(record: MemberRecord) -> str:
    return network_of(record.addresses[0]) if record.addresses else ""


def told(held: Held, known: Collection[bytes]) -> bytes:
    """Return what is told of a record to one that has what is `known`: its gist, or all of it."""
    if known and (gist := held.record.gist) in known:
        return gist
    return held.data


def join_records(records: list[Held], known: Collection[bytes] = ()) -> bytes:
    """Return an answer to one that has what is `known`: what is told of each record, after its length (u16, little-endian)."""
    return b"".join(len(data).to_bytes(_LENGTH_BYTES, "little") + data for data in (told(held, known) for held in records))


def split_answer(answer: bytes) -> Iterator[bytes]:
    """Yield the records and gists of an answer, up to the first that is cut off."""
    start = 0
    while start + _LENGTH_BYTES <= len(answer):
        end = start + _LENGTH_BYTES + int.from_bytes(answer[start : start + _LENGTH_BYTES], "little")
        if end > len(answer):
            return
        yield answer[start + _LENGTH_BYTES : end]
        start = end
