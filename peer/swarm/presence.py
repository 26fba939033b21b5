"""This peer in the directory: it announces itself there and looks for others, again and again, and says when it leaves.

The directory is a hint and may fail for hours; that costs newcomers, never training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from peer.swarm.address_book import RecordIntake, loop_s
from peer.swarm.membership import Membership
from protocol.errors import GossamerError
from protocol.messages.records import MemberRecord, announceable
from protocol.streams.transport import Directory, Transport

log = logging.getLogger(__name__)

ANNOUNCE_S = 20.0
RECORD_S = 90  # how long a record stays in force; the directory forgets a dead peer after so long
LOOK_S = (2.0, 20.0)  # between two looks: while too few are known or the end is near, and otherwise
FAREWELL_S = 1  # lifetime of the record that says we are gone
RECORDS_AT_ONCE = 32  # checked before others get their turn: a signature takes 0.1 ms


@dataclass(frozen=True, slots=True)
class World:
    """Where a node lives."""

    transport: Transport
    directory: Directory
    addresses: Callable[[], tuple[str, ...]]  # own ones, as others may dial them
    now_s: Callable[[], float]  # Unix time
    rng: random.Random  # nonces are drawn from it too: outside of tests, one that nobody can predict (SystemRandom)


@dataclass(slots=True)
class Standing:
    """How far this peer is, as others may know."""

    clock_steps: int = 0
    finished: bool = False


class Presence:
    """Announce and look, as two loops of the node. `standing` is the node's to keep up to date; `wait_for_peers` are enough to know."""

    def __init__(self, membership: Membership, world: World, intake: RecordIntake, standing: Standing, wait_for_peers: int) -> None:
        self.has_looked = asyncio.Event()  # once, with or without success
        self._membership = membership
        self._world = world
        self._hearsay = intake
        self._standing = standing
        self._enough = max(1, wait_for_peers)
        self._sequence = 0
        self._hurry = asyncio.Event()

    async def announce_for_ever(self) -> None:
        """Announce this peer until cancelled."""
        while True:
            self._hurry.clear()
            await self._announce(RECORD_S, ANNOUNCE_S)
            known = self._hearsay.book.live(loop_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_S if known else LOOK_S[0]):
                    await self._hurry.wait()

    async def look_for_ever(self) -> None:
        """Look for others until cancelled."""
        while True:
            with _unharmed("a look into the directory"):
                async with asyncio.timeout(LOOK_S[1]):
                    await self._look()
            self.has_looked.set()
            enough = len(self._hearsay.book.announced(loop_s())) >= self._enough
            await asyncio.sleep(LOOK_S[1] if enough and not self._standing.finished else LOOK_S[0])

    def hurry(self) -> None:
        """Announce at once: something has changed that others wait for."""
        self._hurry.set()

    async def leave(self) -> None:
        """Tell the directory that we are gone; takes a second at most."""
        await self._announce(FAREWELL_S, 1.0)

    async def _announce(self, lifetime_s: int, within_s: float) -> None:
        with _unharmed("an announcement"):
            async with asyncio.timeout(within_s):
                await self._world.directory.announce(self._record(lifetime_s))

    def _record(self, lifetime_s: int) -> MemberRecord:
        membership, now_s = self._membership, int(self._world.now_s())
        self._sequence = max(self._sequence + 1, now_s)  # grows over restarts too
        return MemberRecord(
            run_id=membership.terms.run_id,
            peer_id=membership.identity.peer_id,
            addresses=announceable(self._world.addresses(), membership.identity.peer_id),
            clock_steps=self._standing.clock_steps,
            finished=self._standing.finished,
            sequence=self._sequence,
            expires_s=now_s + lifetime_s,
            credential=membership.credential,
        ).signed(membership.identity)

    async def _look(self) -> None:
        for number, record in enumerate(await self._world.directory.members(), 1):
            self._hearsay.take(record)
            if number % RECORDS_AT_ONCE == 0:
                await asyncio.sleep(0)


@contextlib.contextmanager
def _unharmed(what: str) -> Iterator[None]:
    """Go on whatever happens in the body: what the network does is expected, anything else is our fault, and logged."""
    try:
        yield
    except (GossamerError, TimeoutError):
        return
    except Exception:
        log.exception("%s failed", what)
