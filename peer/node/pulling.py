"""Pulling: what came slowly is too old to be met about, and is moved to where others are, fragments of one round together.

A state over a slow line is older when it is whole than two partners' clocks may be apart. A pull takes a quarter of its bytes. Two are on
their way at a time, so that the line is busy while fragments are coded. The trainer decodes what has come beside its steps, and moves when
all have come, which costs it two looks at its held-out text however many fragments these are; or earlier, by what is there, when the first
is getting old: so each fragment is young when it is moved, however large the model. From then on it is met about. The other side:
peer/node/donor.py; what is computed: peer/trainer/pulling.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.machine.events import Event, FragmentPulled
from gossamer.peer.node.fetching import FetchClient, Source, pull_seed
from gossamer.peer.swarm.address_book import AddressBook, KnownPeer, loop_s
from gossamer.peer.swarm.standing import Standing
from gossamer.protocol.errors import GossamerError, PeerMisbehaved
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import NONCE_BYTES
from gossamer.protocol.messages.messages import Contents
from gossamer.protocol.messages.terms import RunTerms

AT_ONCE = 2  # one is coded while the other is on the line; of one donor too, if it is the only one
OLD_SHARE = 8  # of the gap that may be between two clocks: what was asked for an eighth of it ago waits for no other fragment
TRIES = 2  # for blocks that could not be decoded; and of two whose weights are no better than ours none is asked for more
FEW_FAILED = 0.05  # of a fragment's blocks: of thousands some always fail, and a meeting, which takes such alone too, beats a second pull


@dataclass(frozen=True, slots=True)
class Arrived:
    """A pull whose bytes are the trainer's."""

    name: str
    donor: PeerId
    fragment: int
    header: Contents
    asked_steps: int  # our clock then
    took_s: float


@dataclass(slots=True)
class Round:
    """What is pulled, by whoever gives."""

    left: deque[int]  # fragments that nobody is asked for
    donors: deque[KnownPeer]  # that nobody uses
    check: Callable[[Contents], None]
    arrived: list[Arrived] = field(default_factory=list)


class Pulling:
    """Pull stale fragments. `files` is the folder shared with the trainer."""

    def __init__(
        self,
        client: FetchClient,
        terms: RunTerms,
        book: AddressBook,
        standing: Standing,
        link: NodeEnd,
        files: PayloadFolder,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._client = client
        self._terms = terms
        self._book = book
        self._standing = standing
        self._link = link
        self._files = files
        self._rng = rng
        self._emit = emit
        self._num_tries = dict.fromkeys(range(len(terms.fragments)), 0)
        self._refused: set[PeerId] = set()  # whose weights were no better than ours: not asked as long as there are others
        self._names = itertools.count()

    async def pull_stale(self, check: Callable[[Contents], None]) -> None:
        """Pull each stale fragment once, from anybody who gives it; `check` raises for a donor's header whose bytes are not wanted."""
        reachable = self._book.reachable(loop_s())
        donors = [donor for donor in reachable if donor.peer_id not in self._refused] or reachable
        self._rng.shuffle(donors)
        if len(donors) < AT_ONCE:
            donors *= AT_ONCE
        work = Round(deque(sorted(self._standing.stale)), deque(donors), check)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._use_donors(work))
        await self._move(work)

    async def _use_donors(self, work: Round) -> None:
        """Pull from one donor after another, each as long as it gives."""
        while work.left and work.donors:
            donor = work.donors.popleft()
            try:
                async with self._client.source(donor.peer_id, donor.addresses) as source:
                    while work.left:
                        await self._pull(source, donor.peer_id, work)
                        if self._is_old(work):
                            await self._move(work)
            except PeerMisbehaved:
                self._book.ban(donor.peer_id, loop_s())
            except (GossamerError, LinkLost, OSError):
                continue

    def _is_old(self, work: Round) -> bool:
        old_steps = self._standing.clock_steps - self._terms.max_clock_gap_steps // OLD_SHARE
        return any(pull.asked_steps < old_steps for pull in work.arrived)

    async def _pull(self, source: Source, donor: PeerId, work: Round) -> None:
        """Pull the next fragment; it is left where that comes to nothing. Raises GossamerError, LinkLost, OSError."""
        began_s, asked_steps, nonce = loop_s(), self._standing.clock_steps, secrets.token_bytes(NONCE_BYTES)
        fragment, name = work.left.popleft(), f"pull-{next(self._names)}"
        answer = payload_name(name, File.PARTNER_PAYLOAD)
        try:
            await self._written(messages.SketchSlow(name, fragment, pull_seed(self._terms.run_id, nonce)))
            self._files.write(answer, b"")
            await source.ask_slow(fragment, nonce, self._files.read(payload_name(name, File.OWN_SKETCH)))
            size = self._terms.fragments[fragment].slow_bytes
            header = await source.take_slow(size, work.check, lambda data: self._files.append(answer, data))
            await self._written(messages.DecodeSlow(name))
            work.arrived.append(Arrived(name, donor, fragment, header, asked_steps, loop_s() - began_s))
        except BaseException:
            work.left.append(fragment)
            raise
        finally:
            for file in (File.OWN_SKETCH, File.PARTNER_PAYLOAD):
                self._files.remove(payload_name(name, file))

    async def _written(self, request: messages.SketchSlow | messages.DecodeSlow) -> None:
        """Have the trainer do its part. Raises LinkLost, and OSError when it cannot."""
        written = await self._link.request(request)
        if not isinstance(written, messages.Written) or written.reason:
            raise OSError(0, "the trainer cannot")

    async def _move(self, work: Round) -> None:
        """Have the trainer move by what has come; what is where others' is, or was tried often enough, is stale no more."""
        arrived, work.arrived = work.arrived, []
        if not arrived:
            return
        by_donor = [[pull.name for pull in arrived if pull.donor == donor] for donor in {pull.donor: None for pull in arrived}]
        request = messages.Pull(arrived[0].name, tuple(map(tuple, by_donor)), min(pull.header.clock_steps for pull in arrived))
        try:
            pulled = await self._link.request(request)
        except LinkLost:
            return
        assert isinstance(pulled, messages.Pulled)
        for pull in arrived:
            failed_share, header = pulled.moved.get(pull.name), pull.header
            self._num_tries[pull.fragment] += 1
            if is_enough(failed_share, self._num_tries[pull.fragment]):
                self._num_tries[pull.fragment] = 0
                self._standing.stale.discard(pull.fragment)
            if failed_share is None:
                self._refused.add(pull.donor)
            reason = pulled.reason if failed_share is None else ""
            self._emit(FragmentPulled(str(pull.donor), pull.fragment, header.clock_steps, header.total_bytes, pull.took_s, reason))


def is_enough(failed_share: float | None, num_tries: int) -> bool:
    """Tell whether a fragment may be met about after so many pulls; the last left such a share of its blocks, or moved nothing (None)."""
    return (failed_share is not None and failed_share <= FEW_FAILED) or num_tries >= TRIES
