"""Pulling: what came slowly is too old to be met about, and is moved, fragment by fragment, to where another's is.

A state over a slow line is older when it is whole than two partners' clocks may be apart. A pull takes a quarter of its bytes and one
fragment at a time, so each fragment is young when it has come, however large the model: from then on it is met about, while the others are
still pulled. The other side: peer/node/donor.py; what is computed: peer/trainer/pulling.py.
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable

from peer.link import records as ask
from peer.link.payload_folder import PayloadFolder
from peer.link.records import File, payload_name
from peer.link.socket import LinkLost, NodeEnd
from peer.machine.events import Event, FragmentPulled
from peer.node.fetching import FetchClient, pull_seed
from peer.swarm.address_book import AddressBook, KnownPeer, loop_s
from peer.swarm.standing import Standing
from protocol.errors import GossamerError, PeerMisbehaved
from protocol.limits import NONCE_BYTES
from protocol.messages.messages import Contents
from protocol.messages.terms import RunTerms

TRIES = 2  # for blocks that could not be decoded; and of two whose weights are no better than ours none is asked for more
FEW_FAILED = 0.05  # of a fragment's blocks: of thousands some always fail, and a meeting, which takes such alone too, beats a second pull


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
        self._names = itertools.count()

    async def pull_stale(self, check: Callable[[Contents], None]) -> None:
        """Pull each stale fragment once, from anybody who gives it; `check` raises for a donor's header whose bytes are not wanted."""
        for fragment in sorted(self._standing.stale):
            donors = self._book.reachable(loop_s())
            self._rng.shuffle(donors)
            for donor in donors:
                if await self._try(donor, fragment, check):
                    break

    async def _try(self, donor: KnownPeer, fragment: int, check: Callable[[Contents], None]) -> bool:
        """Pull a fragment from one donor; return whether that is all that he can do."""
        try:
            pulled = await self._pull(donor, fragment, check)
        except PeerMisbehaved:
            self._book.ban(donor.peer_id, loop_s())
            return False
        except (GossamerError, LinkLost, OSError):
            return False
        self._num_tries[fragment] += 1
        if is_enough(pulled, self._num_tries[fragment]):
            self._num_tries[fragment] = 0
            self._standing.stale.discard(fragment)
        return True

    async def _pull(self, donor: KnownPeer, fragment: int, check: Callable[[Contents], None]) -> ask.Pulled:
        name, nonce, began_s = f"pull-{next(self._names)}", secrets.token_bytes(NONCE_BYTES), loop_s()
        answer = payload_name(name, File.PARTNER_PAYLOAD)
        try:
            written = await self._link.request(ask.SketchSlow(name, fragment, pull_seed(self._terms.run_id, nonce)))
            if not isinstance(written, ask.Written) or written.reason:
                raise OSError(0, "no sketch")
            sketch = self._files.read(payload_name(name, File.OWN_SKETCH))
            self._files.write(answer, b"")
            async with self._client.source(donor.peer_id, donor.addresses) as source:
                await source.ask_slow(fragment, nonce, sketch)
                header = await source.take_slow(
                    self._terms.fragments[fragment].slow_bytes, check, lambda data: self._files.append(answer, data)
                )
            pulled = await self._link.request(ask.Pull(name, header.clock_steps))
            assert isinstance(pulled, ask.Pulled)
            self._emit(
                FragmentPulled(str(donor.peer_id), fragment, header.clock_steps, header.total_bytes, loop_s() - began_s, pulled.reason)
            )
            return pulled
        finally:
            for file in (File.OWN_SKETCH, File.PARTNER_PAYLOAD):
                self._files.remove(payload_name(name, file))


def is_enough(pulled: ask.Pulled, num_tries: int) -> bool:
    """Tell whether a fragment may be met about after so many pulls, of which this was the last."""
    return (pulled.accepted and pulled.failed_share <= FEW_FAILED) or num_tries >= TRIES
