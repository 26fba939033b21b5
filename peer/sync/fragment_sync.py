"""Fragment sync: bring fragments that are too old to meet about up to date, several in one round, for a quarter of a state's bytes.

We send a sketch of our slow weights, and a source codes its own against it (peer/sync/state_source.py). The trainer decodes beside its
steps (peer/trainer/fragment_syncs.py). It moves the weights when all fragments have come, or earlier, when the first fragment gets old.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.peer.link import messages
from gossamer.peer.link.messages import File, payload_name
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.machine.events import Event, FragmentSynced
from gossamer.peer.swarm.known_peer import KnownPeer
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.sync.client import Source, sync_seed
from gossamer.peer.sync.sources import Sources
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import NONCE_BYTES
from gossamer.protocol.messages.messages import Contents
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.tasks import loop_s

AT_ONCE = 2  # one is coded while the other is on the line; from one source too, if it is the only one
OLD_SHARE = 8  # of the allowed gap: a fragment that was asked for an eighth of it ago waits for no other
TRIES = 2  # for a fragment, whether blocks failed to decode or the weights were no better than ours
FEW_FAILED = 0.05  # of a fragment's blocks: of thousands some always fail, and a meeting copes with them better than a second try


@dataclass(frozen=True, slots=True)
class Arrived:
    """A fragment that the trainer has decoded."""

    name: str
    source: PeerId
    fragment: int
    header: Contents
    asked_steps: int  # our global step then
    took_s: float


@dataclass(slots=True)
class Round:
    """The stale fragments of one round, and their sources."""

    left: deque[int]  # fragments that no source is asked for
    peers: deque[KnownPeer]  # sources that are not in use
    check: Callable[[Contents], None]
    arrived: list[Arrived] = field(default_factory=list)


@dataclass(slots=True)
class FragmentSync:
    """Bring stale fragments up to date. `files` is the folder shared with the trainer."""

    sources: Sources
    terms: RunTerms
    lifecycle: Lifecycle
    link: NodeEnd
    files: PayloadFolder
    emit: Callable[[Event], None]
    _num_tries: Counter[int] = field(default_factory=Counter)
    _refused: set[PeerId] = field(default_factory=set)  # sources whose weights were no better than ours: asked only if there are no others
    _names: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, check: Callable[[Contents], None]) -> None:
        """Sync each stale fragment once; `check` raises for a header whose bytes are not wanted.

        Any peer is a source. Of a stage, which no loss judges, one that we have met is, if there is any.
        """
        reachable = self.sources.book.reachable(loop_s())
        if self.sources.book.stage:
            reachable = [peer for peer in reachable if peer.has_met] or reachable
        peers = [peer for peer in reachable if peer.peer_id not in self._refused] or reachable
        self.sources.rng.shuffle(peers)
        if len(peers) < AT_ONCE:
            peers *= AT_ONCE
        work = Round(deque(sorted(self.lifecycle.stale)), deque(peers), check)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._use_sources(work))
        await self._move(work)

    async def _use_sources(self, work: Round) -> None:
        while work.left and work.peers:
            peer = work.peers.popleft()
            try:
                async with self.sources.open(peer) as source:
                    while work.left:
                        await self._sync_next(source, work)
                        if self._is_old(work):
                            await self._move(work)
            except (GossamerError, LinkLost, OSError):
                continue

    def _is_old(self, work: Round) -> bool:
        old_steps = self.lifecycle.global_step - self.terms.max_clock_gap_steps // OLD_SHARE
        return any(one.asked_steps < old_steps for one in work.arrived)

    async def _sync_next(self, source: Source, work: Round) -> None:
        """Fetch and decode the next fragment, or leave it for another source. Raises GossamerError, LinkLost, OSError."""
        began_s, asked_steps, nonce = loop_s(), self.lifecycle.global_step, secrets.token_bytes(NONCE_BYTES)
        fragment, name = work.left.popleft(), f"sync-{next(self._names)}"
        answer = payload_name(name, File.PARTNER_PAYLOAD)
        try:
            await self._written(messages.SketchSlow(name, fragment, sync_seed(self.terms.run_id, nonce)))
            self.files.write(answer, b"")
            await source.ask_slow(fragment, nonce, self.files.read(payload_name(name, File.OWN_SKETCH)))
            size = self.terms.fragments[fragment].slow_bytes
            header = await source.take_slow(size, work.check, lambda data: self.files.append(answer, data))
            await self._written(messages.DecodeSlow(name))
            work.arrived.append(Arrived(name, source.peer_id, fragment, header, asked_steps, loop_s() - began_s))
        except BaseException:
            work.left.append(fragment)
            raise
        finally:
            for file in (File.OWN_SKETCH, File.PARTNER_PAYLOAD):
                self.files.remove(payload_name(name, file))

    async def _written(self, request: messages.SketchSlow | messages.DecodeSlow) -> None:
        """Have the trainer write its part. Raises LinkLost, and OSError when it fails."""
        written = await self.link.request(request)
        if not isinstance(written, messages.Written) or written.reason:
            raise OSError(0, "the trainer failed")

    async def _move(self, work: Round) -> None:
        """Have the trainer move by what has come. A fragment that is up to date, or was tried often enough, is no longer stale."""
        arrived, work.arrived = work.arrived, []
        if not arrived:
            return
        by_source = [[one.name for one in arrived if one.source == source] for source in {one.source: None for one in arrived}]
        request = messages.MoveFragments(arrived[0].name, tuple(map(tuple, by_source)), min(one.header.global_step for one in arrived))
        try:
            reply = await self.link.request(request)
        except LinkLost:
            return
        assert isinstance(reply, messages.FragmentsMoved)
        for one in arrived:
            failed_share, header = reply.moved.get(one.name), one.header
            self._num_tries[one.fragment] += 1
            if is_enough(failed_share, self._num_tries[one.fragment]):
                self._num_tries[one.fragment] = 0
                self.lifecycle.stale.discard(one.fragment)
            if failed_share is None:
                self._refused.add(one.source)
            reason = reply.reason if failed_share is None else ""
            self.emit(FragmentSynced(str(one.source), one.fragment, header.global_step, header.total_bytes, one.took_s, reason))


def is_enough(failed_share: float | None, num_tries: int) -> bool:
    """Return whether a fragment may be met about after so many tries; the last failed for a share of its blocks, or moved none (None)."""
    return (failed_share is not None and failed_share <= FEW_FAILED) or num_tries >= TRIES
