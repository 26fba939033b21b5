"""Who this peer may meet: the address book, what may enter it, and the choice of the next partner.

The directory, the partners themselves (records in a Hello) and the last session's file all feed the book; none of them is trusted
for more than "somebody with this key may be at this address", and only a later word of the same peer replaces an earlier one. A record
that is not true costs the one who passed it on nothing: it may have been deceived itself. The choice is uniform over the peers that are
live, not resting after a failure and not banned, and in a large enough swarm passes over those met last: random pairs are what NoLoCo's
mixing needs (`optim/noloco.py`), a fixed rotation diverges.

Randomness is an argument, and so is time: `now_s` is a clock that only goes forward (the event loop's), so that a clock set back by hand
lets nobody rest for hours. Nothing here waits. Sizes are bounded, whoever calls.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gossamer.protocol.addresses import network_of, route, with_peer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.records import MemberRecord

MAX_ENTRIES = 256  # a random part of a larger swarm mixes as well as all of it
MAX_BANS = 1024
MAX_HINTS = 8  # addresses of one peer
KEPT = 64  # good peers remembered on disk
REST_S = 1.0  # after the first failure or refusal; doubles up to
REST_PER_WAIT = 2.0  # times as long as it kept us waiting, where that is longer: so a silent one takes a third of our time
REST_FAILED_S = 60.0  # for a peer that cannot be reached, breaks off, or sends what our gate rejects
REST_REFUSED_S = 8.0  # for one that answers, but will not meet
LUCK = (0.2, 0.02)  # how fast we learn whether strangers are worth a try, and how often one is tried at least
BAN_S = 24 * 3600.0
SILENCE_S = 40.0  # a peer that announces itself after so long was cut off, and is worth a try at once
FORGET_S = 900.0  # a peer that nobody has announced for so long is not tried any more
PATIENCE = (3.0, 5.0)  # times a usual meeting with somebody, and seconds: who is silent for longer than both is gone
AVOIDED = 3  # partners met last that are passed over, where there are enough others


def loop_s() -> float:
    """Return the running event loop's time, in which the book reckons: it only goes forward, and tests make it virtual."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class KnownPeer:
    """One peer in the book."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()
    clock_steps: int = 0
    finished: bool = False  # it has said that it has come to the end of the run
    paused: bool = False  # it has said that it rests: no use to call it, and its clock stands still
    seen_s: float = 0.0  # when it was last announced or met
    told_s: float = -math.inf  # when it last told us its clock itself, in a meeting or calling for one
    failures: int = 0  # in a row: could not be reached, or broke off
    refusals: int = 0  # in a row: answered, but did not meet
    rests_until_s: float = 0.0
    unwelcome_until_s: float = 0.0  # its calls are not answered either
    meetings: int = 0  # completed with it
    usual_s: float = 0.0  # how long they have taken lately, or the last one, if that was longer
    record: MemberRecord | None = None  # its latest word, to pass on

    @property
    def crowds(self) -> tuple[str, str]:
        """Return the network and the invite by which it is one of many; empty where there is none."""
        network = next((network_of(address) for address in self.addresses if route(address) != "local"), "")
        credential = self.record.credential if self.record else None
        return network, str(credential.bearer or "") if credential else ""

    @property
    def has_clock(self) -> bool:
        """Whether the peer has told its clock."""
        return self.record is not None or self.clock_steps > 0

    @property
    def is_familiar(self) -> bool:
        """Whether we have met it, and nothing has failed since."""
        return self.meetings > 0 and not self.failures

    @property
    def patience_s(self) -> float:
        """How long it may say nothing, going by its meetings with us and what has come of waiting; for ever where these say nothing."""
        times, least_s = PATIENCE
        return max(least_s, times * self.usual_s) if self.is_familiar else math.inf

    def is_newer(self, record: MemberRecord) -> bool:
        """Tell whether this record says more than the one we hold."""
        return self.record is None or record.supersedes(self.record)

    def is_back(self, now_s: float) -> None:
        """Forget that it could not be reached."""
        self.failures, self.rests_until_s, self.unwelcome_until_s = 0, min(self.rests_until_s, now_s), now_s


class AddressBook:
    """Peers by id. Not thread-safe."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._entries: dict[PeerId, KnownPeer] = {}
        self._banned_until_s: dict[PeerId, float] = {}
        self._last: deque[PeerId] = deque(maxlen=AVOIDED)
        self._luck = 1.0  # the share of our calls to strangers that have come to a meeting lately

    # ------------------------------------------------------------------ what is learnt

    def __len__(self) -> int:
        """Return the number of entries, at most MAX_ENTRIES."""
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether the swarm may be larger than the book: whoever comes in pushes somebody out."""
        return len(self) >= MAX_ENTRIES

    def is_news(self, record: MemberRecord) -> bool:
        """Tell whether a record is worth checking: another peer's, and later than the one that is held."""
        entry = self._entries.get(record.peer_id)
        return record.peer_id != self._me and (entry is None or entry.is_newer(record))

    def learn(self, record: MemberRecord, now_s: float) -> None:
        """Take in a verified record; one that is no later than the one we hold changes nothing."""
        if not self.is_news(record):
            return
        entry = self._entry(record.peer_id, now_s)
        entry.addresses = record.addresses or entry.addresses
        entry.clock_steps = record.clock_steps
        entry.finished = record.finished
        entry.paused = record.paused
        if now_s - entry.seen_s > SILENCE_S:
            entry.is_back(now_s)
        entry.seen_s = now_s
        entry.record = record

    def hint(self, peer_id: PeerId, address: str, now_s: float) -> None:
        """Take in an address from an invite, a command line or the last session."""
        if peer_id == self._me:
            return
        entry = self._entry(peer_id, now_s)
        if address not in entry.addresses:
            entry.addresses = (*entry.addresses, address)[-MAX_HINTS:]
        entry.seen_s = max(entry.seen_s, now_s)

    def saw(self, peer_id: PeerId, now_s: float, clock_steps: int, *, finished: bool = False) -> None:
        """Note that a member of the run has called us, and its clock. What it failed at stays: calling is easier than meeting."""
        if peer_id != self._me:
            entry = self._entry(peer_id, now_s)
            entry.seen_s = max(entry.seen_s, now_s)
            entry.clock_steps, entry.told_s = clock_steps, now_s
            entry.finished = entry.finished or finished

    def tells_clock(self, peer_id: PeerId, clock_steps: int) -> None:
        """Note the clock that a known peer has signed in answer to us: later than what it has announced."""
        if peer_id in self._entries:
            self._entries[peer_id].clock_steps = clock_steps

    def met(self, peer_id: PeerId, now_s: float, clock_steps: int, *, took_s: float = 0.0, finished: bool = False) -> None:
        """Note a completed meeting, how long it took, and how far the partner was: its clock, and whether it has come to the end."""
        entry = self._entry(peer_id, now_s)
        entry.finished = entry.finished or finished
        self._learn_luck(entry, met=True)
        entry.meetings += 1
        entry.usual_s = max(took_s, entry.usual_s + 0.2 * (took_s - entry.usual_s))
        entry.clock_steps, entry.told_s = clock_steps, now_s
        entry.seen_s = now_s
        entry.failures = entry.refusals = 0
        entry.rests_until_s = entry.unwelcome_until_s = now_s
        self._last.append(peer_id)

    def failed(self, peer_id: PeerId, now_s: float, waited_s: float = 0.0) -> None:
        """Let a peer rest after a failure that may be the network's; longer each time, and the longer we waited for nothing."""
        entry = self._entry(peer_id, now_s)
        self._rest(entry, now_s, waited_s)
        self._learn_luck(entry, met=False)

    def broke_off(self, peer_id: PeerId, now_s: float, waited_s: float = 0.0) -> None:
        """Let a peer rest after a meeting that it broke off or let run out, whoever had called: it must not keep others from us."""
        self.failed(peer_id, now_s, waited_s)
        entry = self._entry(peer_id, now_s)
        entry.unwelcome_until_s = entry.rests_until_s

    def refused(self, peer_id: PeerId, now_s: float, most_s: float = REST_REFUSED_S) -> None:
        """Let a peer rest with which there was no agreement; longer each time, but it is there, and either side may change."""
        entry = self._entry(peer_id, now_s)
        entry.rests_until_s = now_s + min(most_s, REST_S * 2 ** min(entry.refusals, 16))
        entry.failures = 0
        entry.refusals += 1
        self._learn_luck(entry, met=False)

    def not_now(self, peer_id: PeerId, now_s: float, *, finished: bool = False) -> None:
        """Let a peer rest a moment that said it cannot meet yet, or does not any more."""
        entry = self._entry(peer_id, now_s)
        entry.finished = entry.finished or finished
        entry.rests_until_s = max(entry.rests_until_s, now_s + REST_S)

    def forget_refusals(self, now_s: float) -> None:
        """Ask everybody anew who would not meet us: we have other weights now."""
        for entry in self._entries.values():
            if entry.refusals:
                entry.refusals, entry.rests_until_s = 0, now_s

    def lost(self, peer_id: PeerId, now_s: float) -> None:
        """Note that somebody did not answer a call that was no meeting; who is not in the book stays out of it."""
        if peer_id in self._entries:
            self._rest(self._entries[peer_id], now_s)

    def answered(self, peer_id: PeerId, now_s: float) -> None:
        """Note that somebody has just proven that it is there."""
        entry = self._entries.get(peer_id)
        if entry is not None:
            entry.seen_s = now_s
            if entry.failures:
                entry.is_back(now_s)

    def leaves(self, peer_id: PeerId, now_s: float) -> None:
        """Stop asking a peer that says it is leaving, until it announces itself again."""
        entry = self._entry(peer_id, now_s)
        entry.seen_s = min(entry.seen_s, now_s - FORGET_S)

    def ban(self, peer_id: PeerId, now_s: float) -> None:
        """Do not meet a peer that broke the rules for a day."""
        self._banned_until_s[peer_id] = now_s + BAN_S
        while len(self._banned_until_s) > MAX_BANS:
            del self._banned_until_s[min(self._banned_until_s, key=lambda banned: self._banned_until_s[banned])]

    # ------------------------------------------------------------------ what is asked

    def is_banned(self, peer_id: PeerId, now_s: float) -> bool:
        """Tell whether a peer is banned now."""
        return self._banned_until_s.get(peer_id, now_s) > now_s

    def is_welcome(self, peer_id: PeerId, now_s: float) -> bool:
        """Tell whether a peer's call may be answered."""
        return peer_id not in self._entries or self._entries[peer_id].unwelcome_until_s <= now_s

    def live(self, now_s: float) -> list[KnownPeer]:
        """Return the peers that may be met, resting ones included, in the order in which they were first heard of."""
        return [entry for entry in self._entries.values() if self._is_live(entry, now_s)]

    def reachable(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers that we have not failed to reach last."""
        return [entry for entry in self.live(now_s) if not entry.failures]

    def known(self, now_s: float) -> list[KnownPeer]:
        """Return all who are not banned and have an address, however long nothing was heard of them."""
        return [entry for entry in self._entries.values() if entry.addresses and not self.is_banned(entry.peer_id, now_s)]

    def record_of(self, peer_id: PeerId) -> MemberRecord | None:
        """Return the latest word of a peer."""
        entry = self._entries.get(peer_id)
        return entry.record if entry else None

    def announced(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers whose own record we hold."""
        return [entry for entry in self.live(now_s) if entry.record is not None]

    def patience_s(self, peer_id: PeerId) -> float:
        """Return how long somebody may say nothing, going by our meetings; for ever for whom we have not met, or not since a failure."""
        entry = self._entries.get(peer_id)
        return math.inf if entry is None else entry.patience_s

    def clock_of(self, peer_id: PeerId) -> int | None:
        """Return the clock that a peer has last signed, None when none is known."""
        entry = self._entries.get(peer_id)
        return entry.clock_steps if entry is not None and entry.has_clock else None

    def choose(self, now_s: float, rng: random.Random, *, exclude: Collection[PeerId] = ()) -> KnownPeer | None:
        """Choose the next partner, or None when nobody can be asked now."""
        known = self.live(now_s)
        familiar = [entry for entry in known if entry.is_familiar]
        if familiar and self._luck < 1.0 and rng.random() >= self._luck:
            known = familiar
        ready = [entry for entry in known if entry.rests_until_s <= now_s and entry.peer_id not in exclude]
        num_avoided = min(AVOIDED, (len(ready) - 1) // 2)
        avoided = list(self._last)[-num_avoided:] if num_avoided > 0 else []
        fresh = [entry for entry in ready if entry.peer_id not in avoided]
        return rng.choice(fresh or ready) if ready else None

    def _rest(self, entry: KnownPeer, now_s: float, waited_s: float = 0.0) -> None:
        rest_s = min(REST_FAILED_S, max(REST_S * 2 ** min(entry.failures, 16), REST_PER_WAIT * waited_s))
        entry.rests_until_s = max(entry.rests_until_s, now_s + rest_s)
        entry.failures += 1
        entry.usual_s = max(entry.usual_s, waited_s)  # it may be there, and slow: the next time it has longer, whatever it says till then

    def _learn_luck(self, entry: KnownPeer, *, met: bool) -> None:
        """Note how a call to a stranger went: a hundred keys that only refuse are not to use up our searches."""
        if not entry.meetings:
            rate, least = LUCK
            self._luck = max(least, self._luck + rate * (met - self._luck))

    def soonest_s(self, now_s: float) -> float | None:
        """Return when the first of the live peers can be asked; None when there is none."""
        return min((max(now_s, entry.rests_until_s) for entry in self.live(now_s)), default=None)

    def addresses(self, peer_id: PeerId) -> tuple[str, ...]:
        """Return the known addresses of a peer."""
        entry = self._entries.get(peer_id)
        return entry.addresses if entry else ()

    def ways_in(self, now_s: float) -> list[str]:
        """Return the addresses of the best peers, silent ones included, each with its peer's id: where the swarm may be found."""
        return [with_peer(address, entry.peer_id) for entry in self._best(now_s) for address in entry.addresses]

    # ------------------------------------------------------------------ for the next session

    def to_bytes(self, now_s: float) -> bytes:
        """Return the best peers and the bans, to be kept for the next session."""
        known = [{"peer": str(entry.peer_id), "addresses": list(entry.addresses)} for entry in self._best(now_s)]
        bans = [{"peer": str(peer), "banned_for_s": until_s - now_s} for peer, until_s in self._banned_until_s.items() if until_s > now_s]
        return json.dumps({"known": known, "banned": bans}, indent=1).encode()

    def load(self, path: Path, now_s: float) -> None:
        """Add the peers of the last session, and what was left of the bans then. An unreadable file is like none: it only holds hints."""
        try:
            content = json.loads(path.read_text())
            for line in content["known"]:
                for address in line["addresses"]:
                    self.hint(PeerId.from_text(line["peer"]), str(address), now_s)
            for line in content["banned"]:
                self._banned_until_s[PeerId.from_text(line["peer"])] = now_s + min(BAN_S, float(line["banned_for_s"]))
        except (OSError, ValueError, KeyError, TypeError, GossamerError):
            return

    # ------------------------------------------------------------------ bounds

    def _best(self, now_s: float) -> list[KnownPeer]:
        return sorted(self.known(now_s), key=lambda entry: (-entry.meetings, -entry.seen_s))[:KEPT]

    def _is_live(self, entry: KnownPeer, now_s: float) -> bool:
        return now_s - entry.seen_s < FORGET_S and not entry.paused and not self.is_banned(entry.peer_id, now_s)

    def _entry(self, peer_id: PeerId, now_s: float) -> KnownPeer:
        entry = self._entries.get(peer_id)
        if entry is None:
            if len(self._entries) >= MAX_ENTRIES:
                self._forget_one(now_s)
            entry = self._entries[peer_id] = KnownPeer(peer_id, seen_s=-FORGET_S)
        return entry

    def _forget_one(self, now_s: float) -> None:
        """Forget who is gone or fails; else, of whom we have not met, the one of the largest crowd that has been here longest.

        So a book that is full stays a mixed sample of a swarm that goes on, and many keys of one network or one invite push out each other.
        """
        crowds = Counter(crowd for entry in self._entries.values() for crowd in entry.crowds)

        def badness(entry: KnownPeer) -> tuple[bool, int, int, int]:
            return not self._is_live(entry, now_s), entry.failures, -entry.meetings, sum(crowds[crowd] for crowd in entry.crowds if crowd)

        worst = max(self._entries.values(), key=badness)  # of equals the first
        del self._entries[worst.peer_id]
