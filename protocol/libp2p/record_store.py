"""The member records that this peer has seen and checked: those it holds for the directory, and its own view of the swarm.

No network here. Each rule answers an attack that succeeded against a stock DHT: only keys of this run, only signed records, only
under their owner's key, only for minutes, only newer than what is held, only so many. Not a proof of anything: see `Directory`.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocol import limits
from protocol.errors import BadMessage, BadSignature
from protocol.identity import PeerId
from protocol.messages.records import MemberRecord, lookup_keys, own_shard_key

RECORDS_PER_KEY = 512
RECORDS_IN_VIEW = 4096

_LENGTH_BYTES = 2


@dataclass(frozen=True, slots=True)
class _Held:
    record: MemberRecord
    data: bytes  # as its owner signed it


def key_id(key: str) -> bytes:
    """Return where in the DHT a key lies (20 bytes)."""
    return hashlib.sha1(key.encode("ascii"), usedforsecurity=False).digest()


class RecordShelf:
    """Checked records of one run. `is_member` says whose records to keep; `now` is Unix time in seconds."""

    def __init__(
        self, run_id: bytes, is_member: Callable[[MemberRecord], bool] = lambda record: True, now: Callable[[], float] = time.time
    ) -> None:
        self._run_id = run_id
        self._is_member = is_member
        self._now = now
        self._keys: dict[bytes, dict[PeerId, _Held]] = {}
        self._view: dict[PeerId, _Held] = {}

    def key_ids(self) -> tuple[bytes, ...]:
        """Return the ids of every key under which a record in force may lie."""
        return tuple(key_id(key) for key in lookup_keys(self._run_id, self._now()))

    def own_key(self, peer_id: PeerId) -> bytes:
        """Return the id of the key under which a peer announces itself now."""
        return key_id(own_shard_key(self._run_id, peer_id, self._now()))

    def offer(self, key: bytes, data: bytes) -> bool:
        """Check a record and hold it under `key`; return whether it is held now. Never raises, whatever the bytes."""
        held = self._checked(data)
        if held is None or key not in self._keys_of(held.record.peer_id):
            return False
        self._keep(self._view, held, RECORDS_IN_VIEW)
        return self._keep(self._shelf(key), held, RECORDS_PER_KEY)

    def notice(self, data: bytes) -> bool:
        """Check a record that somebody told us, for our own view only. Never raises, whatever the bytes."""
        held = self._checked(data)
        return held is not None and self._keep(self._view, held, RECORDS_IN_VIEW)

    def records(self) -> list[MemberRecord]:
        """Return the latest record in force of every peer seen."""
        self._drop_expired(self._view)
        return [held.record for held in self._view.values()]

    def answer(self, key: bytes, max_bytes: int) -> bytes:
        """Return the records under `key`, each after its length (u16, little-endian); a random choice when not all fit."""
        shelf = self._keys.get(key)
        if shelf is None:
            return b""
        self._drop_expired(shelf)
        parts: list[bytes] = []
        for held in random.sample(list(shelf.values()), len(shelf)):
            max_bytes -= _LENGTH_BYTES + len(held.data)
            if max_bytes < 0:
                break
            parts.append(len(held.data).to_bytes(_LENGTH_BYTES, "little") + held.data)
        return b"".join(parts)

    def _checked(self, data: bytes) -> _Held | None:
        try:
            record = MemberRecord.from_bytes(data)
            known = self._view.get(record.peer_id)
            if known is not None and known.data == data and record.expires_s > self._now():
                return known  # its signature was checked when it came first
            record.check(self._run_id, self._now())
            return _Held(record, data) if self._is_member(record) else None
        except (BadMessage, BadSignature, ValueError):  # a ValueError is a gap in our checks: a stranger must not end us through it
            return None

    def _keys_of(self, peer_id: PeerId) -> set[bytes]:
        """Where this peer's record may lie: its key now, or in the neighbouring period."""
        times = (self._now(), self._now() - limits.RECORD_LIFETIME_S - limits.CLOCK_SKEW_S, self._now() + limits.CLOCK_SKEW_S)
        return {key_id(own_shard_key(self._run_id, peer_id, at_s)) for at_s in times}

    def _shelf(self, key: bytes) -> dict[PeerId, _Held]:
        if key not in self._keys:
            current = set(self.key_ids())
            self._keys = {kept: shelf for kept, shelf in self._keys.items() if kept in current}
            self._keys[key] = {}
        return self._keys[key]

    def _keep(self, shelf: dict[PeerId, _Held], new: _Held, capacity: int) -> bool:
        old = shelf.get(new.record.peer_id)
        if old is not None and old.data != new.data and not new.record.supersedes(old.record):
            return False
        if old is None and len(shelf) >= capacity:
            self._drop_expired(shelf)
            if len(shelf) >= capacity:
                return False
        shelf[new.record.peer_id] = new
        return True

    def _drop_expired(self, shelf: dict[PeerId, _Held]) -> None:
        now = self._now()
        for peer_id in [peer_id for peer_id, held in shelf.items() if held.record.expires_s <= now]:
            del shelf[peer_id]


def split_answer(answer: bytes) -> Iterator[bytes]:
    """Yield the records of an answer, up to the first that is cut off."""
    start = 0
    while start + _LENGTH_BYTES <= len(answer):
        end = start + _LENGTH_BYTES + int.from_bytes(answer[start : start + _LENGTH_BYTES], "little")
        if end > len(answer):
            return
        yield answer[start + _LENGTH_BYTES : end]
        start = end
