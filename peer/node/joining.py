"""How a peer gets another's weights: a joiner when it starts, a straggler when it has fallen too far behind.

It asks one live donor after another until one delivers. A donor's weights cannot be checked against anybody else's, for no two peers have
the same; what can be checked is size, hash, that every number is finite, and that the clock is about where most others say that theirs are.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from peer.link import records as ask
from peer.link.socket import LinkLost
from peer.machine.events import Event, ProcessSays, StateCloned
from peer.meeting.driver import OwnSide
from peer.node.fetching import FetchClient, as_final
from peer.node.meetings import Meetings
from peer.swarm.address_book import AddressBook, KnownPeer, loop_s
from protocol.errors import (
    BadContents,
    BadMessage,
    GossamerError,
    PeerMisbehaved,
    Refused,
    SwarmUnreachable,
    TransportError,
)
from protocol.messages.messages import Contents

PATIENCE_S = 60.0  # without any donor that answers at all
PAUSE_S = 1.0  # between two rounds of asking everybody
ROUNDS_TO_BELIEVE = 3  # in which every donor that answers does not want us: a single one must not send us away


class NoUse(GossamerError):
    """A donor's weights would not help us; nobody's fault."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which clone is of use."""

    state_bytes: int
    earliest_clock_steps: int
    latest_clock_steps: int  # one that is further than anybody else is would end our training
    total_steps: int

    def check(self, header: Contents) -> None:
        """Raise BadMessage for a clone that cannot be, NoUse for one of another time, before any of its bytes come."""
        if header.total_bytes != self.state_bytes:
            raise BadMessage(f"a clone of {header.total_bytes} bytes; the manifest implies {self.state_bytes}")
        if header.clock_steps > self.total_steps:
            raise BadMessage(f"a clock of {header.clock_steps} steps in a run of {self.total_steps}")
        if header.clock_steps < self.earliest_clock_steps:
            raise NoUse(f"its clock shows {header.clock_steps} steps, others are at {self.earliest_clock_steps} or more")
        if header.clock_steps > self.latest_clock_steps:
            raise NoUse(f"its clock shows {header.clock_steps} steps, others are at {self.latest_clock_steps} or less")


class Joining:
    """Take over a donor's slow weights, momentum and clock."""

    def __init__(
        self,
        client: FetchClient,
        book: AddressBook,
        meetings: Meetings,
        own: OwnSide,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._client = client
        self._book = book
        self._meetings = meetings
        self._own = own
        self._rng = rng
        self._emit = emit
        self._names = itertools.count(1)

    async def take_over(self, wanted: Callable[[], Wanted]) -> None:
        """Fetch a clone and have the trainer adopt it; ask everybody again and again until that is done.

        Waits as long as donors answer that they have not begun themselves. Raises SwarmUnreachable when none has answered for
        PATIENCE_S, RunRefusesUs or WrongVersion when all that answer do not want us.
        """
        heard_s, num_unwanted = loop_s(), 0
        while loop_s() - heard_s < PATIENCE_S:
            answers = await self.ask_everybody(wanted())
            if answers is None:
                return
            final = _unanimous(answers)
            num_unwanted = num_unwanted + 1 if final else 0
            if final is not None and num_unwanted >= ROUNDS_TO_BELIEVE:
                raise final
            if answers:
                heard_s = loop_s()
            await asyncio.sleep(PAUSE_S)
        raise SwarmUnreachable(
            f"no peer of the run answered for {PATIENCE_S:.0f} s",
            hint="check that the host is running and that its address in the invite can be reached from here, then join again; "
            "peers that have banned this one do not answer it either",
        )

    async def ask_everybody(self, wanted: Wanted) -> list[GossamerError] | None:
        """Ask every live peer once, in random order. Return None once a clone is adopted, else what those that answered said."""
        donors = self._book.live(loop_s())
        self._rng.shuffle(donors)
        answers = []
        for donor in donors:
            error = await self._try(donor, wanted)
            if error is None:
                return None
            self._emit(ProcessSays("joining", f"{donor.peer_id.short()} cannot give its weights: {error}"))
            if not isinstance(error, TransportError):
                answers.append(error)
        return answers

    async def _try(self, donor: KnownPeer, wanted: Wanted) -> GossamerError | None:
        try:
            await self._take_from(donor, wanted)
        except PeerMisbehaved as error:
            self._book.ban(donor.peer_id, loop_s())
            return error
        except LinkLost:
            return NoUse("our own trainer is being restarted")
        except OSError as error:
            return NoUse(f"no room for them here: {error.strerror}")
        except GossamerError as error:
            return error
        return None

    async def _take_from(self, donor: KnownPeer, wanted: Wanted) -> None:
        name, done, told = f"adopt-{next(self._names)}", 0, -1
        started_s = loop_s()

        def check(header: Contents) -> None:
            self._book.tells_clock(donor.peer_id, header.clock_steps)  # records are old by some seconds: the next round knows better
            wanted.check(header)

        def keep(data: bytes) -> None:
            nonlocal done, told
            self._own.payloads.append(name, data)
            done += len(data)
            if (percent := 100 * done // wanted.state_bytes) > told:
                told = percent
                self._emit(ProcessSays("joining", f"downloading weights from {donor.peer_id.short()}: {percent} %"))

        try:
            header = await self._client.state(donor.peer_id, donor.addresses, check, keep)
            async with self._meetings.set_aside():
                adopted = await self._own.link.request(ask.Adopt(name, header.clock_steps))
        finally:
            self._own.payloads.remove(name)
        if isinstance(adopted, ask.Adopted) and not adopted.accepted:
            raise BadContents(adopted.reason)
        self._emit(StateCloned(str(donor.peer_id), header.clock_steps, done, loop_s() - started_s))


def _unanimous(answers: list[GossamerError]) -> GossamerError | None:
    """Return the final error behind what everybody said, None unless all of it is final."""
    finals = [as_final(answer) if isinstance(answer, Refused) else None for answer in answers]
    return finals[0] if finals and None not in finals else None
