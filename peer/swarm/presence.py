"""This peer's presence in the directory, which may fail for hours: newcomers are then found later, and training continues."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gossamer.peer.machine.events import AddressesChanged, Event, OthersTrained, PeersSeen, Warned
from gossamer.peer.machine.status import VERSION
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.addresses import NEAR
from gossamer.protocol.errors import GossamerError, RunRefusesUs
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.messages.figures import MemberFigures
from gossamer.protocol.messages.records import GENERATION, MemberRecord, announceable
from gossamer.protocol.streams.transport import Directory
from gossamer.protocol.tasks import loop_s

log = logging.getLogger(__name__)

ANNOUNCE_S = 20.0
RECORD_S = RECORD_LIFETIME_S  # long enough that a record is still valid after three hops of peer exchange
LOOK_S = (2.0, 20.0, 120.0)  # between two lookups: the first if too few peers are known or the end is near; else doubling up to the second
MANY = 32  # with so many known peers, doubling up to the third: peer exchange brings the rest
FAREWELL_S = 3  # lifetime of the record of a peer that leaves: longer than slow calls take and clocks differ, below LAST_WORD_S
REPORT_S = 0.5  # between two reports to the supervisor
TWIN = "another peer runs with this identity: stop one of them"
NEWS = 0.01  # a smaller relative change of the reported tokens is not emitted
RECORDS_AT_ONCE = 32  # verified before other tasks run: a signature takes 0.1 ms


@dataclass(slots=True)
class Presence:
    """Announces this peer and looks up others, often until `wait_for_peers` are known. `addresses` returns our own."""

    membership: Membership
    directory: Directory
    addresses: Callable[[], tuple[str, ...]]
    peer_exchange: PeerExchange
    lifecycle: Lifecycle
    reporter: SwarmReporter
    wait_for_peers: int
    _sequence: int = 0
    _moved: RunRefusesUs | None = None
    _began_s: float = 0.0  # loop time
    _has_looked: asyncio.Event = field(default_factory=asyncio.Event)
    _is_leaving: bool = False

    async def run(self) -> None:
        """Run until cancelled. Raises RunRefusesUs, in a group, once this identity runs elsewhere, from a restored backup."""
        self._began_s = loop_s()
        async with asyncio.TaskGroup() as tasks:
            for loop in (self._announce_for_ever, self._look_for_ever, self._report_for_ever):
                tasks.create_task(loop())

    async def first_look(self, most_s: float) -> bool:
        """Wait up to `most_s` until the directory was queried once, with or without success; return whether it was."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._has_looked.wait()
        return self._has_looked.is_set()

    async def look_now(self, most_s: float) -> None:
        """Query the directory beside the regular lookups, for `most_s` at most, with or without success."""
        with _logging_errors("a directory lookup"):
            async with asyncio.timeout(most_s):
                await self._look()

    async def _announce_for_ever(self) -> None:
        """Announce regularly once there is a trainer or a stage, and at once when this peer ends, pauses, resumes, or has other addresses.

        A stage is announced before its trainer is ready, as that of a peer that starts: others that choose one meanwhile count it.
        """
        await self.lifecycle.until(lambda: not self.lifecycle.is_starting or self.lifecycle.stage > 0)
        while not self._is_leaving:
            announced = self._announced_state()
            await self._announce(RECORD_S, ANNOUNCE_S)
            known = self.peer_exchange.book.everybody(loop_s())
            until_s = loop_s() + (ANNOUNCE_S if known else LOOK_S[0])
            while loop_s() < until_s and self._announced_state() == announced:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_S):
                        await self.lifecycle.until(lambda: self._announced_state() != announced)  # noqa: B023 (awaited here)

    def _announced_state(self) -> tuple[bool, bool, bool, int, tuple[str, ...]]:
        lifecycle, addresses = self.lifecycle, announceable(self.addresses(), self.membership.identity.peer_id)
        shows_start = lifecycle.is_paused and self._figures() is None
        return lifecycle.finished, lifecycle.is_paused, shows_start, lifecycle.stage, addresses

    def _figures(self) -> MemberFigures | None:
        """Return the figures to announce; none while the trainer starts, so that the record shows no pause."""
        return None if self.lifecycle.is_starting else self.lifecycle.figures

    async def _look_for_ever(self) -> None:
        pause_s = LOOK_S[0]
        while True:
            await self.look_now(LOOK_S[1])
            self._has_looked.set()
            if self._moved is not None:
                raise self._moved
            known = len(self.peer_exchange.book.announced(loop_s()))
            is_urgent = known < max(1, self.wait_for_peers) or self.lifecycle.finished
            pause_s = LOOK_S[0] if is_urgent else min(2 * pause_s, LOOK_S[2] if known >= MANY else LOOK_S[1])
            await asyncio.sleep(pause_s)

    async def _report_for_ever(self) -> None:
        while True:
            self.reporter.report(len(self.peer_exchange.book.announced(loop_s())), self.addresses())
            await asyncio.sleep(REPORT_S)

    async def leave(self, within_s: float) -> None:
        """Announce that this peer leaves, and nothing else from now on; takes `within_s` at most."""
        self._is_leaving = True
        await self._announce(FAREWELL_S, within_s)

    async def _announce(self, lifetime_s: int, within_s: float) -> None:
        with _logging_errors("an announcement"):
            async with asyncio.timeout(within_s):
                self.peer_exchange.own = self._record(lifetime_s)
                await self.directory.announce(self.peer_exchange.own)

    def _record(self, lifetime_s: int) -> MemberRecord:
        membership, now_s = self.membership, int(self.peer_exchange.time.now_s())
        self._sequence = max(self._sequence + 1, membership.generation * GENERATION + now_s)  # so that it also grows over restarts
        return MemberRecord(
            run_id=membership.terms.run_id,
            peer_id=membership.identity.peer_id,
            addresses=announceable(self.addresses(), membership.identity.peer_id),
            global_step=self.lifecycle.global_step,
            finished=self.lifecycle.finished,
            sequence=self._sequence,
            expires_s=now_s + lifetime_s,
            credential=membership.credential,
            paused=self.lifecycle.is_paused,
            tokens=self.lifecycle.tokens,
            release=RELEASE,
            figures=self._figures(),
            stage=self.lifecycle.stage,
        ).signed(membership.identity)

    async def _look(self) -> None:
        for number, record in enumerate(await self.directory.members(), 1):
            self._note_own(record)
            self.peer_exchange.take(record)
            if number % RECORDS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _note_own(self, record: MemberRecord) -> None:
        """Note if this identity runs elsewhere too: from a home that was restored later, or from one of the same generation."""
        own, now_s = self.membership, self.peer_exchange.time.now_s()
        if record.peer_id != own.identity.peer_id or record.generation < own.generation or record.sequence <= self._sequence:
            return
        with contextlib.suppress(GossamerError):
            record.check(own.terms.run_id, now_s)
            if record.generation > own.generation:
                self._moved = RunRefusesUs(
                    "this peer was restored from its backup elsewhere and runs there "
                    f"(generation {record.generation}; here {own.generation})",
                    hint="an identity runs once: delete this home, or restore a backup from there into a new one",
                )
            elif not self._may_be_ours(record, now_s):
                self.reporter.note_twin()

    def _may_be_ours(self, record: MemberRecord, now_s: float) -> bool:
        """Return whether our last start may have signed a record, or this one: it presents bare records after a restart of p2pd."""
        began_s = now_s - (loop_s() - self._began_s)
        return record.is_bare or record.sequence % GENERATION <= began_s + RECORD_LIFETIME_S


@contextlib.contextmanager
def _logging_errors(what: str) -> Iterator[None]:
    """Suppress every error of the body; errors other than the network's are our bugs, and are logged."""
    try:
        yield
    except (GossamerError, TimeoutError):
        return
    except Exception:
        log.exception("%s failed", what)


def release_number(version: str) -> int:
    """Return a version's three numbers as one: 1,002,003 for 1.2.3."""
    major, minor, patch = map(int, version.split("."))
    return (major * 1000 + minor) * 1000 + patch


def version_text(release: int) -> str:
    """Return the version with this `release_number`."""
    return f"{release // 1_000_000}.{release // 1000 % 1000}.{release % 1000}"


RELEASE = release_number(VERSION)


class SwarmReporter:
    """Emits an event for each change."""

    def __init__(self, emit: Callable[[Event], None], peer_exchange: PeerExchange) -> None:
        self._emit = emit
        self._peer_exchange = peer_exchange
        self._groups = SybilGroups(peer_exchange.book, peer_exchange.terms)
        self._reported: list[Event] = [Warned("time of day", ""), Warned("version", ""), Warned("identity", "")]
        self._reported_tokens = 0
        self._twin_until_s = 0.0  # loop time

    def note_twin(self) -> None:
        """Warn, until it was not noted for RECORD_LIFETIME_S, that another peer runs with this identity."""
        self._twin_until_s = loop_s() + RECORD_LIFETIME_S

    def report(self, num_peers: int, addresses: tuple[str, ...]) -> None:
        """Emit what has changed. `num_peers`: live peers other than this one; `addresses`: our own."""
        now_s = loop_s()
        plain = tuple(address for address in addresses if not address.startswith(NEAR))
        now: list[Event] = [PeersSeen(num_peers), AddressesChanged(plain)]
        now += [Warned("time of day", self._peer_exchange.time.warning), Warned("version", self._version_warning(now_s))]
        now += [Warned("identity", TWIN if now_s < self._twin_until_s else "")]
        for event in now:
            if event not in self._reported:
                self._emit(event)
        self._reported = now
        known = (entry.record for entry in self._peer_exchange.book.known(now_s))
        tokens = sum(record.tokens for record in known if self._peer_exchange.is_in_force(record))
        if abs(tokens - self._reported_tokens) > NEWS * self._reported_tokens:
            self._reported_tokens = tokens
            self._emit(OthersTrained(tokens))

    def _version_warning(self, now_s: float) -> str:
        """Return a warning if half of the other Sybil groups run a newer release; else an empty string."""
        if not self._groups.half_agree(self._groups.voters(now_s), _runs_newer):
            return ""
        newer = [entry.record.release for entry in self._peer_exchange.book.everybody(now_s) if entry.record and _runs_newer(entry)]
        theirs = version_text(statistics.median_low(newer))
        return f"many other peers run Gossamer {theirs}, this is {VERSION}: a future version may refuse old peers; update when you can"


def _runs_newer(entry: KnownPeer) -> bool:
    return entry.record is not None and entry.record.release > RELEASE
