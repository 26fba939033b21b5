"""The address book: which peers this peer may meet, and the choice of the next partner.

An entry means only that a peer with this key may be at this address, and only a newer record of the same peer replaces an older one. The
choice is uniform over the peers that are live and neither banned, nor in back-off, nor at rest. In a large enough swarm it skips the last
partners: NoLoCo's mixing needs random pairs (`optim/noloco.py`); a fixed rotation diverges.

`now_s` is a monotonic clock (the event loop's). Nothing here waits. All sizes are bounded, whatever other peers send.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection
from pathlib import Path

from gossamer.peer.swarm.known_peer import HOP_S, PARTNER_HOPS, KnownPeer
from gossamer.peer.swarm.turns import LONG_S, Turns
from gossamer.protocol.addresses import network_seen, with_peer
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.run.invite import Credential

log = logging.getLogger(__name__)

MAX_ENTRIES = 256  # a random sample of a larger swarm mixes as well as the whole swarm
MAX_BANS = 1024
MAX_HINTS = 8  # addresses of one peer
KEPT = 64  # peers that are saved to disk
BACK_OFF_S = 1.0  # after the first failure or refusal; doubles up to one of the next two
BACK_OFF_PER_WAIT = 2.0  # times our last wait for the peer, if that is longer: a silent peer takes a third of our time
BACK_OFF_FAILED_S = 60.0  # for a peer that cannot be reached, breaks off, or sends what our merge gate rejects
BACK_OFF_REFUSED_S = 8.0  # for a peer that answers with a refusal
SUCCESS_RATE = (0.2, 0.02)  # of meetings with strangers: the weight of the last one, and the least share of choices that may be strangers
BAN_S = 24 * 3600.0
SILENCE_S = 40.0  # a peer that announces itself after such a gap was disconnected: its back-off ends
FORGET_S = 900.0  # a peer without a new record for so long is no longer live
AVOIDED = 3  # last partners that are skipped, if there are enough others


class AddressBook:
    """Peers by id. Not thread-safe. In a staged run, `live` and what follows from it leave out those that hold another stage.

    `rests` returns whether a peer rests by its record: it is not called, and counts as absent.
    """

    def __init__(self, me: PeerId, rests: Callable[[PeerId], bool] = lambda peer: False) -> None:
        self._me, self._rests = me, rests
        self.stage = 0  # in a staged run: our own, plus one, once it is known
        self._entries: dict[PeerId, KnownPeer] = {}
        self._banned_until_s: dict[PeerId, float] = {}
        self._last: deque[PeerId] = deque(maxlen=AVOIDED)
        self._turns = Turns()
        self._success_rate = 1.0  # of our recent calls to strangers
        self.saved_s: float | None = None  # Unix time at which the last session saved it

    def __len__(self) -> int:
        """Return the number of entries, at most MAX_ENTRIES."""
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether a new entry replaces an old one; the swarm may then be larger than the book."""
        return len(self) >= MAX_ENTRIES

    def is_news(self, record: MemberRecord) -> bool:
        """Return whether a record is worth verifying: of another peer, and newer than ours."""
        entry = self._entries.get(record.peer_id)
        return record.peer_id != self._me and (entry is None or entry.is_newer(record))

    def learn(self, record: MemberRecord, now_s: float) -> None:
        """Add a verified record; one that is not newer than ours changes nothing."""
        if not self.is_news(record):
            return
        entry = self._entry(record.peer_id, now_s)
        entry.addresses = record.addresses or entry.addresses
        entry.global_step = record.global_step
        entry.finished = record.finished
        entry.paused = record.paused
        if now_s - entry.seen_s > SILENCE_S:
            entry.end_back_off()
        entry.seen_s = now_s
        entry.record = record

    def add_address(self, peer_id: PeerId, address: str, now_s: float) -> None:
        """Add an address from an invite, a command line or the last session."""
        if peer_id == self._me:
            return
        entry = self._entry(peer_id, now_s)
        if address not in entry.addresses:
            entry.addresses = (*entry.addresses, address)[-MAX_HINTS:]
        entry.seen_s = max(entry.seen_s, now_s)

    def note_call(self, peer_id: PeerId, now_s: float, global_step: int, *, finished: bool = False) -> None:
        """Note that a member of the run has called us, and its global step. Its back-off stays: a call proves less than a meeting."""
        if peer_id != self._me:
            entry = self._entry(peer_id, now_s)
            entry.seen_s = max(entry.seen_s, now_s)
            entry.global_step, entry.global_step_at_s = global_step, now_s
            entry.finished = entry.finished or finished

    def shows(self, peer_id: PeerId, credential: Credential | None) -> None:
        """Note the credential that a known peer has shown in a Hello."""
        self.get(peer_id).shown = credential

    def note_global_step(self, peer_id: PeerId, global_step: int) -> None:
        """Note the global step that a known peer has signed in an answer: newer than its record."""
        self.get(peer_id).global_step = global_step

    def connected(self, peer_id: PeerId, observed: str) -> None:
        """Note the multiaddr at which a connection shows a known peer, empty if that is unknown."""
        self.get(peer_id).network = network_seen(observed)

    def note_meeting(self, peer_id: PeerId, now_s: float, global_step: int, *, took_s: float = 0.0, finished: bool = False) -> None:
        """Note a completed meeting, how long it took, the partner's global step, and whether it has reached the end of the run."""
        entry = self._entry(peer_id, now_s)
        entry.finished = entry.finished or finished
        self._learn_success(entry, met=True)
        entry.meetings += 1
        entry.typical_s = max(took_s, entry.typical_s + 0.2 * (took_s - entry.typical_s))
        entry.global_step, entry.global_step_at_s = global_step, now_s
        entry.seen_s = now_s
        entry.end_back_off()
        entry.refusals, entry.breaks_off = 0, False
        self._last.append(peer_id)

    def note_held(self, peer_id: PeerId, now_s: float, took_s: float, *, breaks_off: bool = False) -> None:
        """Put a known peer behind the others after a meeting that was long, or that it broke off: it held a fragment meanwhile."""
        entry = self._entries.get(peer_id)
        if entry is not None and (breaks_off or took_s >= LONG_S):
            entry.breaks_off = entry.breaks_off or breaks_off
            entry.typical_s = max(entry.typical_s, took_s)
            partners = [other for other in self.live(now_s) if other.has_met and other is not entry]
            self._turns.note_held(entry, partners, now_s, took_s)

    def note_carried(self, peer_id: PeerId, now_s: float) -> None:
        """Note that a hop was answered between a known peer and us. It gets no vote by that: it holds another stage."""
        entry = self.get(peer_id)
        if now_s - entry.hop_s >= HOP_S:
            entry.num_hops, entry.hop_s = min(PARTNER_HOPS, entry.num_hops + 1), now_s

    def note_hop(self, peer_id: PeerId, now_s: float) -> None:
        """Note a hop, or an answer to one, as a sign of a live peer; one that has left stays away."""
        entry = self.get(peer_id)
        if now_s - entry.seen_s < FORGET_S:
            entry.seen_s = now_s

    def note_failure(self, peer_id: PeerId, now_s: float, waited_s: float = 0.0) -> None:
        """Back off from a peer after a failure that may be the network's: longer each time, and at least twice as long as we waited."""
        entry = self._entry(peer_id, now_s)
        self._back_off(entry, now_s, waited_s)
        self._learn_success(entry, met=False)

    def note_broken_meeting(self, peer_id: PeerId, now_s: float, waited_s: float = 0.0) -> None:
        """Back off from a peer that broke off a meeting or let it time out, and refuse its calls meanwhile."""
        self.note_failure(peer_id, now_s, waited_s)
        entry = self._entry(peer_id, now_s)
        entry.unwelcome_until_s = entry.backs_off_until_s

    def note_refusal(self, peer_id: PeerId, now_s: float, most_s: float = BACK_OFF_REFUSED_S) -> None:
        """Back off from a peer that answers but does not meet us: longer each time, at most `most_s`."""
        entry = self._entry(peer_id, now_s)
        entry.backs_off_until_s = now_s + min(most_s, BACK_OFF_S * 2 ** min(entry.refusals, 16))
        entry.failures = 0
        entry.refusals += 1
        self._learn_success(entry, met=False)

    def note_not_ready(self, peer_id: PeerId, now_s: float, *, finished: bool = False) -> None:
        """Back off shortly from a peer that cannot meet yet, or no longer."""
        entry = self._entry(peer_id, now_s)
        entry.finished = entry.finished or finished
        entry.backs_off_until_s = max(entry.backs_off_until_s, now_s + BACK_OFF_S)

    def forget_refusals(self) -> None:
        """End every back-off after a refusal, but no rest: our weights have changed."""
        for entry in self._entries.values():
            if entry.refusals:
                entry.refusals, entry.backs_off_until_s = 0, 0.0

    def forget_failures(self) -> None:
        """End every back-off after a failure, and all turns, but no rest: our own network failed."""
        self._turns = Turns()
        for entry in self._entries.values():
            if entry.failures:
                entry.end_back_off()
                entry.breaks_off = False

    def note_no_answer(self, peer_id: PeerId, now_s: float) -> None:
        """Back off from a peer that did not answer a request other than a meeting; adds no entry."""
        self._back_off(self.get(peer_id), now_s)

    def note_answer(self, peer_id: PeerId, now_s: float) -> None:
        """Note that a peer has just answered: it is reachable."""
        entry = self.get(peer_id)
        entry.seen_s = now_s
        if entry.failures:
            entry.end_back_off()

    def rest(self, peer_id: PeerId, now_s: float, seconds: float) -> None:
        """Neither call a peer nor answer its calls for so long: what it has sent is wrong."""
        self._entry(peer_id, now_s).rests_until_s = now_s + seconds

    def note_leaving(self, peer_id: PeerId, now_s: float) -> None:
        """Take a peer that leaves for not live until a newer record of it arrives."""
        entry = self._entry(peer_id, now_s)
        entry.seen_s = min(entry.seen_s, now_s - FORGET_S)

    def ban(self, peer_id: PeerId, now_s: float, why: str) -> None:
        """Ban a peer that violated the protocol, for a day. The log says why."""
        log.warning("%s is banned for a day: %s", peer_id.short(), why)
        keep_newest(self._banned_until_s, peer_id, now_s + BAN_S, MAX_BANS)

    def is_banned(self, peer_id: PeerId, now_s: float) -> bool:
        """Return whether a peer is banned now."""
        return self._banned_until_s.get(peer_id, now_s) > now_s

    def is_welcome(self, peer_id: PeerId, now_s: float) -> bool:
        """Return whether we answer a call of this peer, unless it rests by its record."""
        entry = self.get(peer_id)
        return max(entry.welcome_s, self._turns.of(entry)) <= now_s

    def everybody(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers of all stages, those in back-off included, in the order in which they were added."""
        return [entry for entry in self.seen_lately(now_s) if not entry.paused]

    def live(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers with whom we may share weights, as `everybody`: in a staged run, those that hold no other stage."""
        return [entry for entry in self.everybody(now_s) if not self.stage or entry.stage in (0, self.stage)]

    def holders(self, stage: int, now_s: float) -> list[KnownPeer]:
        """Return the live holders of a stage, counted from one, as `everybody`."""
        return [entry for entry in self.everybody(now_s) if entry.stage == stage]

    def claimed(self, stage: int, now_s: float) -> list[KnownPeer]:
        """Return the peers that hold a stage, counted from one, or are about to, paused ones included."""
        return [entry for entry in self.seen_lately(now_s) if entry.stage == stage]

    def seen_lately(self, now_s: float) -> list[KnownPeer]:
        """Return the peers of whom there was a sign within FORGET_S, paused ones and those that have left included."""
        known = (entry for entry in self._entries.values() if now_s - entry.seen_s < FORGET_S)
        return [entry for entry in known if not self.is_banned(entry.peer_id, now_s)]

    def carriers(self, stage: int) -> list[KnownPeer]:
        """Return the holders of a stage, counted from one, that have carried hops with us, live or not."""
        return [entry for entry in self._entries.values() if entry.stage == stage and entry.has_carried]

    def last_seen_s(self, stage: int) -> float | None:
        """Return when a holder of a stage, counted from one, was last seen, live or not; None if none ever was."""
        return max((entry.seen_s for entry in self._entries.values() if entry.stage == stage), default=None)

    @property
    def heard_s(self) -> float | None:
        """When any peer last gave a sign; None if none is known."""
        return max((entry.seen_s for entry in self._entries.values()), default=None)

    def reachable(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers whose last contact did not fail."""
        return [entry for entry in self.live(now_s) if not entry.failures]

    def known(self, now_s: float) -> list[KnownPeer]:
        """Return all peers with an address that are not banned, live or not."""
        return [entry for entry in self._entries.values() if entry.addresses and not self.is_banned(entry.peer_id, now_s)]

    def get(self, peer_id: PeerId) -> KnownPeer:
        """Return what is known of a peer; of an unknown one, an empty entry, which is not kept: what is noted there is lost."""
        return self._entries.get(peer_id) or KnownPeer(peer_id)

    def announced(self, now_s: float) -> list[KnownPeer]:
        """Return the live peers of all stages with a record."""
        return [entry for entry in self.everybody(now_s) if entry.record is not None]

    def records(self, now_s: float) -> list[MemberRecord]:
        """Return the newest record of each peer that is not banned and has one, expired ones too."""
        return [entry.record for entry in self._entries.values() if entry.record is not None and not self.is_banned(entry.peer_id, now_s)]

    def choose(self, now_s: float, rng: random.Random, exclude: Collection[PeerId] = ()) -> KnownPeer | None:
        """Choose the next partner, none of `exclude`; None if there is nobody to call now."""
        known = self._partners(now_s)
        familiar = [entry for entry in known if entry.is_familiar]
        if familiar and self._success_rate < 1.0 and rng.random() >= self._success_rate:
            known = familiar
        ready = [entry for entry in known if self._callable_s(entry) <= now_s and entry.peer_id not in exclude]
        num_avoided = min(AVOIDED, (len(ready) - 1) // 2)
        avoided = list(self._last)[-num_avoided:] if num_avoided > 0 else []
        fresh = [entry for entry in ready if entry.peer_id not in avoided]
        return rng.choice(fresh or ready) if ready else None

    def _callable_s(self, entry: KnownPeer) -> float:
        """Return from when a peer may be called."""
        return max(entry.callable_s, self._turns.of(entry))

    def _back_off(self, entry: KnownPeer, now_s: float, waited_s: float = 0.0) -> None:
        back_off_s = min(BACK_OFF_FAILED_S, max(BACK_OFF_S * 2 ** min(entry.failures, 16), BACK_OFF_PER_WAIT * waited_s))
        entry.backs_off_until_s = max(entry.backs_off_until_s, now_s + back_off_s)
        entry.failures += 1
        entry.typical_s = max(entry.typical_s, waited_s)  # a peer that is only slow gets a longer timeout the next time

    def _learn_success(self, entry: KnownPeer, *, met: bool) -> None:
        """Note the result of a call to a stranger, so that a hundred identities that only refuse cannot use up our searches."""
        if not entry.meetings:
            rate, least = SUCCESS_RATE
            self._success_rate = max(least, self._success_rate + rate * (met - self._success_rate))

    def soonest_s(self, now_s: float, exclude: Collection[PeerId] = ()) -> float | None:
        """Return when the first partner, none of `exclude`, may be called (now, if one may); None if there is none."""
        partners = (entry for entry in self._partners(now_s) if entry.peer_id not in exclude)
        return min((max(now_s, self._callable_s(entry)) for entry in partners), default=None)

    def _partners(self, now_s: float) -> list[KnownPeer]:
        return [entry for entry in self.live(now_s) if not self._rests(entry.peer_id)]

    def entry_addresses(self, now_s: float) -> list[str]:
        """Return the addresses of the best peers, each with its peer's id, live or not: bootstrap addresses for the next session."""
        return [with_peer(address, entry.peer_id) for entry in self._best(now_s) for address in entry.addresses]

    def to_bytes(self, now_s: float, unix_s: float | None = None) -> bytes:
        """Return the best peers and the bans as a file for the next session; `unix_s`: the time for `saved_s`."""
        known = [
            {"peer": str(entry.peer_id), "addresses": list(entry.addresses), "met": entry.has_met}
            | ({"carried": entry.num_hops} if entry.has_carried else {})
            for entry in self._best(now_s)
        ]
        bans = [{"peer": str(peer), "banned_for_s": until_s - now_s} for peer, until_s in self._banned_until_s.items() if until_s > now_s]
        return json.dumps({"saved_s": unix_s, "known": known, "banned": bans}, indent=1).encode()

    def load(self, path: Path, now_s: float) -> None:
        """Add the peers of the last session and the rest of its bans. An unreadable file counts as none: it only holds hints."""
        try:
            content = json.loads(path.read_text())
            for line in content["known"]:
                peer_id = PeerId.from_text(line["peer"])
                for address in line["addresses"]:
                    self.add_address(peer_id, str(address), now_s)
                if peer_id in self._entries:
                    self._entries[peer_id].was_met = bool(line.get("met", False))
                    self._entries[peer_id].num_hops = min(PARTNER_HOPS, max(0, int(line.get("carried", 0))))
            for line in content["banned"]:
                self._banned_until_s[PeerId.from_text(line["peer"])] = now_s + min(BAN_S, float(line["banned_for_s"]))
            self.saved_s = None if (saved_s := content.get("saved_s")) is None else float(saved_s)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, GossamerError):
            return

    def _best(self, now_s: float) -> list[KnownPeer]:
        return sorted(self.known(now_s), key=lambda entry: (-entry.meetings, not entry.is_partner, not entry.has_carried, -entry.seen_s))[
            :KEPT
        ]

    def _entry(self, peer_id: PeerId, now_s: float) -> KnownPeer:
        entry = self._entries.get(peer_id)
        if entry is None:
            if len(self._entries) >= MAX_ENTRIES:
                self._forget_one(now_s)
            entry = self._entries[peer_id] = KnownPeer(peer_id, seen_s=-FORGET_S)
        return entry

    def _forget_one(self, now_s: float) -> None:
        """Remove a peer that is not live or fails; else, of strangers, the oldest of the most common origin."""
        num_from = Counter(origin for entry in self._entries.values() for origin in entry.origins)
        live = {entry.peer_id for entry in self.everybody(now_s)}

        def badness(entry: KnownPeer) -> tuple[bool, int, bool, int, int]:
            num_alike = sum(num_from[origin] for origin in entry.origins if origin)
            return entry.peer_id not in live, entry.failures, not entry.is_partner, -entry.meetings, num_alike

        worst = max(self._entries.values(), key=badness)  # the first of equals
        del self._entries[worst.peer_id]
