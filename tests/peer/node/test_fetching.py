"""Clones and manifests over `Fetch` streams: whole and checked, or refused, or the donor's fault."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from peer.link import records as ask
from peer.node.donor import CLONE_S, MAX_CLONES, MAX_GIVEN, REST_S
from peer.node.fetching import FRAME_S, FetchClient
from protocol.errors import BadContents, BadMessage, BadSignature, DeadlineExceeded, PeerMisbehaved, RefusalCode, Refused
from protocol.identity import Identity
from protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part
from protocol.streams.transport import Purpose, Stream
from tests.swarm.mallory import MALLORY, nobody
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
DATA = b"weights!" * 100


def asker(swarm: Swarm, number: int = 0) -> FetchClient:
    identity = Identity(bytes([200 + number]) * 32)
    return FetchClient(identity, swarm.terms.run_id, None, swarm.network.transport(identity.peer_id, nobody))


def anything(header: Contents) -> None:
    """Any header will do."""


def test_a_clone_arrives_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (donor,) = swarm.start(1)
        await swarm.until(lambda: donor.clock >= 5)
        donor.trainer.frozen = True
        pieces: list[bytes] = []
        header = await asker(swarm).state(donor.peer_id, (), anything, pieces.append)
        data = b"".join(pieces)
        assert header.total_bytes == len(data) == swarm.terms.state_bytes
        assert header.sha256 == hashlib.sha256(data).digest() and header.clock_steps == donor.clock
        assert donor.slow.numpy().tobytes()[:64] in data
        await asyncio.sleep(1.0)
        assert not list(donor.payloads.path("x").parent.glob("clone-*"))

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_donor_that_has_not_begun_gives_its_manifest_and_no_weights(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        donor = swarm.add(told_to_start=True, wait_for_peers=5).start()
        await asyncio.sleep(2.0)
        newcomer = asker(swarm)
        assert await newcomer.manifest(donor.peer_id, ()) == swarm.signed
        with pytest.raises(Refused) as refusal:
            await newcomer.state(donor.peer_id, (), anything, lambda _: None)
        assert refusal.value.code is RefusalCode.NOT_READY

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_only_so_many_clones_are_served_at_once(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (donor,) = swarm.start(1)
        await asyncio.sleep(1.0)
        askers = [asker(swarm, number) for number in range(MAX_CLONES + 1)]
        ends = await asyncio.gather(*(a.state(donor.peer_id, (), anything, lambda _: None) for a in askers), return_exceptions=True)
        refusals = [end for end in ends if isinstance(end, Refused)]
        assert [refusal.code for refusal in refusals] == [RefusalCode.BUSY]
        assert sum(isinstance(end, Contents) for end in ends) == MAX_CLONES
        await asker(swarm, 9).state(donor.peer_id, (), anything, lambda _: None)  # a place is free again

    play(Swarm(tmp_path, manifest=QUIET), story)


def num_clones(donor: Peer) -> int:
    return sum(isinstance(request, ask.TakeSnapshot) for request in donor.link.said)


def test_requests_in_a_row_cost_the_trainer_one_clone_until_it_is_old(tmp_path: Path) -> None:
    class Enough(Exception):
        """The header is all that is wanted."""

    def stop(header: Contents) -> None:
        raise Enough

    async def story(swarm: Swarm) -> None:
        (donor,) = swarm.start(1)
        await swarm.until(lambda: donor.clock >= 5)
        donor.trainer.frozen = True
        await asyncio.sleep(2.0)
        for number in range(20):
            with pytest.raises(Enough):
                await asker(swarm, number).state(donor.peer_id, (), stop, lambda _: None)
            await asyncio.sleep(1.0)
        assert num_clones(donor) == 1
        await asyncio.sleep(CLONE_S)
        await asker(swarm).state(donor.peer_id, (), anything, lambda _: None)
        assert num_clones(donor) == 2
        donor.trainer.frozen = False
        await asyncio.sleep(10.0)  # 40 steps: an old clone would be behind before it is there
        header = await asker(swarm, 1).state(donor.peer_id, (), anything, lambda _: None)
        assert num_clones(donor) == 3 and header.clock_steps > donor.clock - 15

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_who_had_many_states_gets_another_after_a_while_or_when_it_may_be_behind_again(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (donor,) = swarm.start(1)
        await swarm.until(lambda: donor.clock >= 5)
        donor.trainer.frozen = True

        async def fetch() -> None:
            await asyncio.sleep(2.0)
            await asker(swarm).state(donor.peer_id, (), anything, lambda _: None)

        for _ in range(MAX_GIVEN):
            await fetch()
        with pytest.raises(Refused, match="lately") as refusal:
            await fetch()
        assert refusal.value.code is RefusalCode.BUSY
        await asker(swarm, 1).state(donor.peer_id, (), anything, lambda _: None)
        await asyncio.sleep(REST_S)
        for _ in range(MAX_GIVEN):
            await fetch()
        donor.trainer.frozen = False
        await asyncio.sleep(20.0)  # 80 steps, 60 may be between two clocks
        await fetch()

    play(Swarm(tmp_path, manifest=QUIET), story)


async def another_hash(stream: Stream, request: FetchRequest, header: Contents) -> None:
    await stream.send(replace(header, sha256=b"h" * 32, signature=b"").signed(MALLORY, *request.asked))
    await stream.send(Chunk(Part.CONTENTS, 0, DATA))


async def more_than_announced(stream: Stream, request: FetchRequest, header: Contents) -> None:
    await stream.send(header)
    await stream.send(Chunk(Part.CONTENTS, 0, DATA + b"!"))


async def with_a_hole(stream: Stream, request: FetchRequest, header: Contents) -> None:
    await stream.send(header)
    await stream.send(Chunk(Part.CONTENTS, 8, DATA[8:]))


async def of_an_earlier_request(stream: Stream, request: FetchRequest, header: Contents) -> None:
    await stream.send(replace(header, signature=b"").signed(MALLORY, *replace(request, nonce=b"o" * 16).asked))


async def another_kind(stream: Stream, request: FetchRequest, header: Contents) -> None:
    await stream.send(replace(header, kind=ContentsKind.MANIFEST, signature=b"").signed(MALLORY, *request.asked))


LIES = [
    (another_hash, BadContents),
    (more_than_announced, BadMessage),
    (with_a_hole, BadMessage),
    (of_an_earlier_request, BadSignature),
    (another_kind, BadMessage),
]


def liar(lie: Callable[[Stream, FetchRequest, Contents], Awaitable[None]]) -> Callable[[Purpose, Stream], Awaitable[None]]:
    async def answer(purpose: Purpose, stream: Stream) -> None:
        request = await stream.receive()
        assert isinstance(request, FetchRequest)
        header = Contents(ContentsKind.STATE, len(DATA), hashlib.sha256(DATA).digest(), 7).signed(MALLORY, *request.asked)
        await lie(stream, request, header)
        await asyncio.sleep(100.0)

    return answer


@pytest.mark.parametrize(("lie", "fault"), LIES, ids=lambda value: value.__name__)
def test_bytes_that_are_not_what_was_promised_are_the_donors_fault(
    tmp_path: Path, lie: Callable[[Stream, FetchRequest, Contents], Awaitable[None]], fault: type[PeerMisbehaved]
) -> None:
    async def story(swarm: Swarm) -> None:
        swarm.network.transport(MALLORY.peer_id, liar(lie))
        with pytest.raises(fault):
            await asyncio.wait_for(asker(swarm).state(MALLORY.peer_id, (), anything, lambda _: None), 10.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_donor_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async def silent(stream: Stream, request: FetchRequest, header: Contents) -> None:
        await stream.send(header)

    async def story(swarm: Swarm) -> None:
        swarm.network.transport(MALLORY.peer_id, liar(silent))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await asker(swarm).state(MALLORY.peer_id, (), anything, lambda _: None)
        assert asyncio.get_running_loop().time() - began_s < FRAME_S + 1.0

    play(Swarm(tmp_path, manifest=QUIET), story)
