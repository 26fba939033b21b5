"""Who this peer may meet: the address book, and the choice of the next partner.

The directory, the partners themselves (acquaintances in a Hello) and the last session's file all feed the book; none of them is trusted
for more than "somebody with this key may be at this address". The choice is uniform over the peers that are live, not resting after a
failure and not banned, and avoids meeting the same one twice in a row where there is another: random pairs are what NoLoCo's mixing
needs (`optim/noloco.py`), a fixed rotation diverges. Time and randomness are arguments; nothing here waits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import BadMessage
from protocol.identity import PeerId
from protocol.records import MemberRecord

KEPT = 64  # good peers remembered on disk
REST_S = 1.0  # after the first failure; doubles up to
REST_MAX_S = 60.0
BAN_S = 24 * 3600.0
FORGET_S = 900.0  # a peer that nobody has announced for so long is not tried any more


@dataclass(slots=True)
class Entry:
    """One peer in the book."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()
    clock_steps: int = 0
    seen_s: float = 0.0  # when it was last announced or met
    failures: int = 0  # in a row
    rests_until_s: float = 0.0
    banned_until_s: float = 0.0
    meetings: int = 0  # completed with it
    lane: str = ""  # how it was last reached
    record: bytes = field(default=b"", repr=False)  # its signed record, to pass on


class AddressBook:
    """Peers by id. Not thread-safe."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._entries: dict[PeerId, Entry] = {}
        self._last: PeerId | None = None

    def learn(self, record: MemberRecord, now_s: float) -> None:
        """Take in a verified record; an older one than we hold changes nothing."""
        if record.peer_id == self._me:
            return
        entry = self._entry(record.peer_id)
        entry.addresses = record.addresses or entry.addresses
        entry.clock_steps = max(entry.clock_steps, record.clock_steps)
        entry.seen_s = now_s
        entry.record = record.to_bytes()

    def hint(self, peer_id: PeerId, address: str, now_s: float) -> None:
        """Take in an address from an invite or a command line."""
        if peer_id == self._me:
            return
        entry = self._entry(peer_id)
        if address not in entry.addresses:
            entry.addresses = (*entry.addresses, address)
        entry.seen_s = max(entry.seen_s, now_s)

    def saw(self, peer_id: PeerId, now_s: float) -> None:
        """Note that a peer has called us."""
        if peer_id != self._me:
            entry = self._entry(peer_id)
            entry.seen_s = max(entry.seen_s, now_s)

    def announced(self, now_s: float) -> list[Entry]:
        """Return the live peers whose own record we hold."""
        return [entry for entry in self.live(now_s) if entry.record]

    def furthest_clock(self, now_s: float) -> int:
        """Return the largest schedule clock among peers that we have met or whose record we hold."""
        return max((entry.clock_steps for entry in self.live(now_s)), default=0)

    def met(self, peer_id: PeerId, now_s: float, clock_steps: int) -> None:
        """Note a completed meeting."""
        entry = self._entry(peer_id)
        entry.meetings += 1
        entry.clock_steps = max(entry.clock_steps, clock_steps)
        entry.seen_s = now_s
        entry.failures = 0
        entry.rests_until_s = 0.0
        self._last = peer_id

    def failed(self, peer_id: PeerId, now_s: float) -> None:
        """Let a peer rest after a failure that may be the network's; longer each time."""
        entry = self._entry(peer_id)
        entry.rests_until_s = now_s + min(REST_MAX_S, REST_S * 2**entry.failures)
        entry.failures += 1

    def leaves(self, peer_id: PeerId, now_s: float) -> None:
        """Stop asking a peer that says it is leaving, until it announces itself again."""
        entry = self._entry(peer_id)
        entry.seen_s = min(entry.seen_s, now_s - FORGET_S)

    def ban(self, peer_id: PeerId, now_s: float) -> None:
        """Do not meet a peer that broke the rules for a day."""
        self._entry(peer_id).banned_until_s = now_s + BAN_S

    def is_banned(self, peer_id: PeerId, now_s: float) -> bool:
        """Tell whether a peer is banned now."""
        entry = self._entries.get(peer_id)
        return entry is not None and entry.banned_until_s > now_s

    def live(self, now_s: float) -> list[Entry]:
        """Return the peers that may be met, resting ones included, in order of id."""
        return sorted(
            (entry for entry in self._entries.values() if entry.banned_until_s <= now_s and now_s - entry.seen_s < FORGET_S),
            key=lambda entry: entry.peer_id,
        )

    def choose(self, now_s: float, rng: random.Random, *, exclude: Collection[PeerId] = ()) -> Entry | None:
        """Choose the next partner, or None when nobody can be asked now."""
        ready = [entry for entry in self.live(now_s) if entry.rests_until_s <= now_s and entry.peer_id not in exclude]
        fresh = [entry for entry in ready if entry.peer_id != self._last]
        return rng.choice(fresh or ready) if ready else None

    def addresses(self, peer_id: PeerId) -> tuple[str, ...]:
        """Return the known addresses of a peer."""
        entry = self._entries.get(peer_id)
        return entry.addresses if entry else ()

    def acquaintances(self, partner: PeerId, now_s: float, rng: random.Random, num: int) -> tuple[bytes, ...]:
        """Choose signed records of other live peers to pass on to a partner."""
        others = [entry.record for entry in self.live(now_s) if entry.record and entry.peer_id != partner and entry.failures == 0]
        return tuple(rng.sample(others, min(num, len(others))))

    def save(self, path: Path) -> None:
        """Write the best peers to disk, atomically."""
        best = sorted(self._entries.values(), key=lambda entry: (-entry.meetings, -entry.seen_s))[:KEPT]
        lines = [
            {"peer": str(e.peer_id), "addresses": e.addresses, "meetings": e.meetings, "banned_until_s": e.banned_until_s}
            for e in best
            if e.addresses
        ]
        whole = path.with_suffix(".new")
        whole.write_text(json.dumps(lines, indent=1))
        whole.replace(path)

    def load(self, path: Path, now_s: float) -> None:
        """Add the peers of the last session. An unreadable file is the same as none: it only holds hints."""
        try:
            lines = json.loads(path.read_text())
            for line in lines:
                self._restore(line, now_s)
        except (OSError, ValueError, KeyError, TypeError, BadMessage):
            return

    def _restore(self, line: dict[str, object], now_s: float) -> None:
        addresses = line["addresses"]
        if isinstance(addresses, Iterable):
            for address in addresses:
                self.hint(PeerId.from_text(str(line["peer"])), str(address), now_s)
        entry = self._entry(PeerId.from_text(str(line["peer"])))
        entry.banned_until_s = float(str(line["banned_until_s"]))

    def _entry(self, peer_id: PeerId) -> Entry:
        return self._entries.setdefault(peer_id, Entry(peer_id))
