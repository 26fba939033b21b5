"""Evidence, not votes, at the end of a run: many keys of one invite's holder neither decide the result nor keep the others from theirs."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync.pieces import RunResult
from gossamer.peer.sync.state_source import OF_RESULT
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.messages import Contents, ContentsKind, FetchRequest
from gossamer.protocol.streams.transport import Stream
from gossamer.protocol.tasks import cancel
from tests.swarm.sybils import HOST, Sybils, credential_of, give
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

TOTAL_STEPS = 40
KEYS = 40
GUEST = Identity(b"g" * 32)
INVITES = tiny_manifest(run={"total_steps": TOTAL_STEPS, "access": "invite", "issuers": [str(HOST.peer_id)]})
WITHIN_S = 25.0  # of the last honest peer's end; with a hundred keys it was 49, 121 and never before there were heads here


class AtTheEnd(Sybils):
    """They say that they have come to the end, and of the result whatever keeps the others busy."""

    attack = ""
    num_given: Counter[PeerId]

    def _result_of(self, key: Identity) -> RunResult:
        """Return a result of sound numbers and no model; another one as soon as the last was fetched whole."""
        seed = int.from_bytes(key.peer_id.raw[-4:], "big") + self.num_given[key.peer_id]
        num_values = self._swarm.terms.state_bytes // 2
        draws = torch.randn(num_values, generator=torch.Generator().manual_seed(seed)) * 0.3
        return RunResult.of(memoryview(draws.bfloat16().view(torch.int16).numpy().tobytes()))

    async def _give(self, key: Identity, stream: Stream, request: FetchRequest) -> None:
        if request.kind not in OF_RESULT:
            return await super()._give(key, stream, request)
        if self.attack == "silence":
            await asyncio.sleep(1000.0)
        if self.attack == "nothing":
            await stream.send(Contents(request.kind, 0, hashlib.sha256().digest(), TOTAL_STEPS, b"").signed(key, *request.asked))
            return
        result = self._result_of(key)
        content = bytes(result.part(0, self._swarm.terms.state_bytes))
        await give(stream, key, request, result, content, TOTAL_STEPS)
        if request.kind is ContentsKind.RESULT and request.offset + request.num_bytes >= len(content):
            self.num_given[key.peer_id] += 1


@pytest.mark.parametrize(
    ("attack", "own_invite"), [("nothing", False), ("silence", True), ("one result after another", True)], ids=lambda value: str(value)
)
def test_sybils_at_the_end_do_not_delay_the_result(tmp_path: Path, attack: str, own_invite: bool) -> None:
    async def story(swarm: Swarm) -> None:
        peers = [swarm.add() for _ in range(4)]
        for peer in peers:
            peer.join_with(credential_of(swarm, peer.identity, 0)).start()
        await swarm.until(lambda: all(peer.trainer.replica.own_steps >= TOTAL_STEPS // 3 for peer in peers))
        keys = AtTheEnd(swarm, KEYS, lambda: TOTAL_STEPS, bytes, invite=int(own_invite))
        keys.finished, keys.attack, keys.num_given = True, attack, Counter()
        work = asyncio.create_task(keys.run())
        await swarm.until(lambda: all(peer.lifecycle.finished for peer in peers))
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=WITHIN_S)
        assert len({peer.node.source.result.name for peer in peers if peer.node.source.result}) == 1
        assert all(torch.equal(peer.fast, peers[0].fast) for peer in peers)
        await cancel(work)

    play(Swarm(tmp_path, manifest=INVITES), story)


def place(swarm: Swarm, who: Identity, invite: int) -> tuple[bool, bytes, bytes]:
    """Return a peer's place in the order of writers, as all see it."""
    credential = None if who.peer_id == HOST.peer_id else credential_of(swarm, who, invite)
    return SybilGroups(AddressBook(HOST.peer_id), swarm.terms).writing_place(who.peer_id, credential, 0)


def member(swarm: Swarm, invite: int, identity: Identity | None = None) -> Peer:
    """Make a peer that joins by an invite; the host needs none."""
    peer = swarm.add()
    peer.identity = identity or peer.identity
    return peer if identity == HOST else peer.join_with(credential_of(swarm, peer.identity, invite))


def test_no_guest_writes_the_result_while_the_host_is_there_however_many_ids_it_has_tried(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        invite = next(number for number in itertools.count(1) if place(swarm, GUEST, number)[1:] < place(swarm, HOST, 0)[1:])
        honest = [member(swarm, invite, HOST), member(swarm, invite), member(swarm, invite)]
        tried = (Identity(hashlib.sha256(f"tried {number}".encode()).digest()) for number in itertools.count())
        guests = [place(swarm, peer.identity, invite) for peer in honest[1:]]
        best = next(key for key in tried if place(swarm, key, invite) < min(guests))
        grinder = member(swarm, invite, best)
        for peer in swarm.peers:
            peer.start()
        await swarm.until(lambda: all(peer.is_done for peer in swarm.peers))
        assert all(torch.equal(peer.fast, honest[0].fast) for peer in swarm.peers)
        writers = [peer for peer in swarm.peers if any(isinstance(request, messages.WriteResult) for request in peer.link.reported)]
        assert writers == [honest[0]], "a guest has chosen itself" if grinder in writers else "two wrote"

    play(Swarm(tmp_path, manifest=INVITES), story)
