"""All meetings of one node: find a partner for each fragment that is due, answer those who ask, one meeting per fragment at a time.

Each `Due` starts a search: choose a partner, hold a meeting, and on any failure choose the next, until the deadline; then the fragment
takes a solo step (or waits on, where the manifest says `defer`). A meeting that somebody else began on the same fragment satisfies the
search.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from peer import requests as ask
from peer.driver import Driver, Tools
from peer.events import MeetingDone
from peer.meeting import Meeting
from peer.meeting import Stage as MeetingStage
from peer.meeting_events import Finish, Greeting, MeetingOver
from peer.partners import AddressBook, Entry
from protocol.errors import BadMessage, GossamerError, PeerMisbehaved, TransportError
from protocol.identity import Identity, PeerId
from protocol.messages import Credential, Decision, Hello, Outcome, Phase, Refusal, RefusalCode, Refused, Resolve
from protocol.records import MemberRecord
from protocol.terms import RunTerms, check_hello
from protocol.transport import Purpose, Stream, Transport

CONNECT_S = 15.0
FIRST_FRAME_S = 10.0
MAX_INBOUND = 2
MAX_OUTBOUND = 2
PAUSE_S = (0.05, 0.4)  # between two tries, so that two peers that called each other do not do it again in step
RESOLVE_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Membership:
    """Who we are in this run, and by whose word."""

    identity: Identity
    terms: RunTerms
    credential: Credential | None
    deadline_s: float
    defer: bool  # without a partner: wait on instead of a solo step


@dataclass(slots=True)
class Active:
    """A meeting in progress."""

    meeting: Meeting
    driver: Driver
    partner: PeerId
    over: asyncio.Event


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What meetings take from the node around them."""

    transport: Transport
    book: AddressBook
    now_s: Callable[[], float]  # Unix time
    rng: random.Random
    report: Callable[[MeetingDone], None]


class Meetings:
    """The meetings of one node. Every method belongs to the node's event loop."""

    def __init__(self, membership: Membership, surroundings: Surroundings, tools: Tools) -> None:
        self.clock_steps = 0  # own schedule clock, as the trainer last told
        self.stage = ask.Stage.TRAIN  # likewise
        self.open = True  # whether inbound meetings are answered
        self._membership = membership
        self._around = surroundings
        self._tools = tools
        self._numbers = itertools.count(1)
        self._active: dict[int, Active] = {}
        self._completed: Counter[int] = Counter()
        self._searches: dict[int, asyncio.Task[None]] = {}
        self._outbound = asyncio.Semaphore(MAX_OUTBOUND)
        self._num_inbound = 0

    # ------------------------------------------------------------------ searching

    def on_due(self, due: ask.Due) -> None:
        """Begin to search a partner for a fragment, unless a search for it goes on already."""
        if due.fragment not in self._searches:
            search = asyncio.create_task(self._search_or_solo(due), name=f"search {due.fragment}")
            self._searches[due.fragment] = search
            search.add_done_callback(lambda _: self._searches.pop(due.fragment, None))

    async def _search_or_solo(self, due: ask.Due) -> None:
        if not await self.search(due):
            give_up = ask.Defer if self._membership.defer else ask.Solo
            self._tools.link.tell(give_up(due.fragment))

    async def search(self, due: ask.Due) -> bool:
        """Find a partner for a fragment and meet it; False when nobody could be met.

        The run's deadline bounds the search; a meeting that has begun by then has its own.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._membership.deadline_s
        completed = self._completed[due.fragment]
        tried: set[PeerId] = set()
        while loop.time() < until_s:
            if (active := self._active.get(due.fragment)) is not None:
                await active.over.wait()
            else:
                await self._try_next(due.fragment, tried)
            if self._completed[due.fragment] > completed:
                return True  # whoever began it
            if not self._around.book.live(self._around.now_s()):
                return False
            await asyncio.sleep(self._around.rng.uniform(*PAUSE_S))
        return False

    async def _try_next(self, fragment: int, tried: set[PeerId]) -> None:
        partner = self._around.book.choose(self._around.now_s(), self._around.rng, exclude=tried)
        if partner is None:
            tried.clear()
            return
        tried.add(partner.peer_id)
        await self._initiate(partner, fragment)

    async def _initiate(self, partner: Entry, fragment: int) -> None:
        async with self._outbound:
            if fragment in self._active:
                return
            try:
                async with asyncio.timeout(CONNECT_S):
                    stream = await self._around.transport.connect(partner.peer_id, partner.addresses, Purpose.MEET)
            except (TransportError, TimeoutError):
                self._around.book.failed(partner.peer_id, self._around.now_s())
                return
            if fragment in self._active:  # somebody called us meanwhile
                await stream.close()
                return
            await self._hold(stream, fragment, None)

    # ------------------------------------------------------------------ answering

    async def answer(self, stream: Stream) -> None:
        """Serve an inbound `Meet` stream: a meeting or a Resolve. Closes the stream; raises nothing that the partner causes."""
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                first = await stream.receive()
            if isinstance(first, Resolve):
                await stream.send(await self._outcome(first, stream.partner))
            elif isinstance(first, Hello):
                await self._answer_hello(stream, first)
            else:
                raise BadMessage(f"a meeting begins with a Hello, not with {type(first).__name__}")
        except Refused as refusal:
            await _say(stream, Refusal(refusal.code, refusal.detail[:200]))
        except PeerMisbehaved as error:
            self._around.book.ban(stream.partner, self._around.now_s())
            await _say(stream, Refusal(RefusalCode.BAD_MESSAGE, str(error)[:200]))
        except (TransportError, TimeoutError):
            return
        finally:
            await stream.close()

    async def _answer_hello(self, stream: Stream, hello: Hello) -> None:
        membership, now_s = self._membership, self._around.now_s()
        if self._around.book.is_banned(stream.partner, now_s):
            raise Refused(RefusalCode.NOT_INVITED, "banned for breaking the rules")
        check_hello(hello, membership.terms, membership.identity.peer_id, stream.partner, now_s, clock_steps=self.clock_steps)
        if not self.open:
            raise Refused(RefusalCode.LEAVING)
        if hello.phase is Phase.FINISH and self.stage is ask.Stage.TRAIN:
            raise Refused(RefusalCode.WRONG_PHASE)
        await self._make_room(hello.fragment, stream.partner)
        if self._num_inbound >= MAX_INBOUND:
            raise Refused(RefusalCode.BUSY, "in as many meetings as I allow")
        self._num_inbound += 1
        try:
            await self._hold(stream, hello.fragment, hello)
        finally:
            self._num_inbound -= 1

    async def _make_room(self, fragment: int, partner: PeerId) -> None:
        """Two peers that called each other at once: the call of the smaller id stands. Anybody else finds us busy."""
        active = self._active.get(fragment)
        if active is None:
            return
        early = active.meeting.initiates and active.meeting.stage in (MeetingStage.OPENING, MeetingStage.GREETING)
        if not early or active.partner != partner or partner.raw > self._membership.identity.peer_id.raw:
            raise Refused(RefusalCode.BUSY, "in another meeting on this fragment")
        active.driver.stop("our partner called at the same moment; its call stands")
        await active.over.wait()

    async def _outcome(self, resolve: Resolve, partner: PeerId) -> Outcome:
        for active in list(self._active.values()):
            if (
                active.meeting.meeting_id == resolve.meeting_id and active.partner == partner
            ):  # not decided yet: the partner's question decides it
                active.driver.stop("the partner lost the stream")
                await active.over.wait()
        failed_blocks = self._tools.journal.failed_blocks(resolve.meeting_id)
        if failed_blocks is None:
            return Outcome(resolve.meeting_id, Decision.DROPPED, b"")
        return Outcome(resolve.meeting_id, Decision.COMMITTED, failed_blocks)

    # ------------------------------------------------------------------ both

    async def _hold(self, stream: Stream, fragment: int, hello: Hello | None) -> None:
        membership, around = self._membership, self._around
        greeting = Greeting(
            identity=membership.identity,
            partner=stream.partner,
            terms=membership.terms,
            fragment=fragment,
            nonce=secrets.token_bytes(16),
            partner_hello=hello,
            credential=membership.credential,
            acquaintances=around.book.acquaintances(stream.partner, around.now_s(), around.rng, 1),
            now_s=around.now_s,
        )
        meeting = Meeting(next(self._numbers), greeting)
        driver = Driver(meeting, stream, self._tools, membership.deadline_s)
        active = Active(meeting, driver, stream.partner, asyncio.Event())
        self._active[fragment] = active
        started_s = asyncio.get_running_loop().time()
        try:
            finish = await driver.hold()
        finally:
            del self._active[fragment]
            active.over.set()
        self._note(active, finish, stream, asyncio.get_running_loop().time() - started_s)

    def _note(self, active: Active, finish: Finish, stream: Stream, seconds: float) -> None:
        book, now_s, hello = self._around.book, self._around.now_s(), active.meeting.partner_hello
        for record in hello.acquaintances if hello else ():
            self._learn(record, now_s)
        if finish.over is MeetingOver.COMPLETED and hello is not None:
            book.met(active.partner, now_s, hello.clock_steps)
            self._completed[active.meeting.fragment] += 1
        elif finish.over is MeetingOver.MISBEHAVED:
            book.ban(active.partner, now_s)
        elif finish.refusal is RefusalCode.LEAVING:
            book.leaves(active.partner, now_s)
        elif finish.over in (MeetingOver.REFUSED, MeetingOver.GATED) or (finish.over is MeetingOver.FAILED and active.meeting.initiates):
            book.failed(active.partner, now_s)
        self._around.report(_event(active, finish, stream, seconds))

    def _learn(self, raw: bytes, now_s: float) -> None:
        try:
            record = MemberRecord.from_bytes(raw)
            record.verify(self._membership.terms.run_id, now_s)
        except GossamerError:
            return  # a hint that is not true costs the one who passed it on nothing: it may have been deceived itself
        self._around.book.learn(record, now_s)

    async def close(self, grace_s: float) -> None:
        """Finish or drop what is in progress within `grace_s`, and start nothing new."""
        self.open = False
        for search in list(self._searches.values()):
            if not any(active.meeting.initiates for active in self._active.values()):
                search.cancel()
        for active in list(self._active.values()):
            active.driver.stop("leaving")
        waits = [asyncio.create_task(active.over.wait()) for active in self._active.values()]
        if waits:
            await asyncio.wait(waits, timeout=grace_s)
        for task in (*waits, *self._searches.values()):
            task.cancel()
        await asyncio.gather(*waits, *self._searches.values(), return_exceptions=True)

    async def resolve(self, partner: PeerId, meeting_id: bytes) -> Outcome:
        """Ask a partner what it decided, again and again, until it answers. Bounded by the caller's cancellation."""
        while True:
            try:
                stream = await self._around.transport.connect(partner, self._around.book.addresses(partner), Purpose.MEET)
                try:
                    await stream.send(Resolve(self._membership.terms.run_id, meeting_id))
                    answer = await stream.receive()
                finally:
                    await stream.close()
                if isinstance(answer, Outcome):
                    return answer
            except (TransportError, PeerMisbehaved):
                pass
            await asyncio.sleep(RESOLVE_PAUSE_S)


def _event(active: Active, finish: Finish, stream: Stream, seconds: float) -> MeetingDone:
    return MeetingDone(
        partner=str(active.partner),
        fragment=active.meeting.fragment,
        outcome=finish.over.name.lower(),
        reason=finish.reason,
        lane=stream.lane,
        bytes_sent=stream.bytes_sent,
        bytes_received=stream.bytes_received,
        seconds=seconds,
    )


async def _say(stream: Stream, refusal: Refusal) -> None:
    try:
        await stream.send(refusal)
    except TransportError:
        return
