"""State and manifest over `Fetch` streams, part by part: checked, or refused, or the source's fault."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gossamer.peer.link import messages
from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.sync import client, server, state_source
from gossamer.peer.sync.client import FRAME_S, FetchClient
from gossamer.peer.sync.state_source import COPY_S, IDLE_S, MOST_GIVEN, REST_S
from gossamer.protocol.errors import BadMessage, BadSignature, PeerGone, PeerMisbehaved, RefusalCode, Refused, TransportError
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, FetchRequest, Part
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel
from tests.peer.asking import header_of
from tests.protocol.samples import changed
from tests.swarm.mallory import MALLORY, nobody
from tests.swarm.sybils import HOST, credential_of
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, frozen_source, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
DATA = b"weights!" * 100


def asker(swarm: Swarm, number: int = 0) -> FetchClient:
    identity = Identity(bytes([200 + number]) * 32)
    return FetchClient(identity, swarm.terms.run_id, OwnCredential(), swarm.network.start_peer(identity.peer_id, nobody))


def anything(header: Contents) -> None:
    """Any header will do."""


async def whole(client: FetchClient, source_peer: Peer, num_bytes: int, part_bytes: int = CHUNK_BYTES) -> tuple[bytes, Contents]:
    """Fetch a state part by part, everything asked for at once."""
    async with client.source(source_peer.peer_id, ()) as source:
        offsets = range(0, num_bytes, part_bytes)
        for offset in offsets:
            await source.ask(ContentsKind.STATE, offset, part_bytes)
        answers = [await source.take(anything) for _ in offsets]
    return b"".join(data for _, data in answers), answers[-1][0]


async def still(swarm: Swarm) -> Peer:
    """A source that has trained a little and makes no more steps."""
    source_peer = await frozen_source(swarm)
    await asyncio.sleep(2.0)
    return source_peer


def num_copies(source_peer: Peer) -> int:
    return sum(isinstance(request, messages.CopyState) for request in source_peer.link.reported)


def test_a_state_arrives_in_parts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        data, header = await whole(asker(swarm), source_peer, swarm.terms.state_bytes, 7000)
        assert header.total_bytes == len(data) == swarm.terms.state_bytes and header.global_step == source_peer.global_step
        assert data.startswith(source_peer.slow.bfloat16().view(torch.int16).numpy().tobytes())
        assert not list(source_peer.payloads.path("x").parent.glob("copy-*"))

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_one_member_with_endless_small_requests_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        began_s = asyncio.get_running_loop().time()
        async with asker(swarm).source(source_peer.peer_id, ()) as source:

            async def flood() -> None:
                while True:
                    await source.ask(ContentsKind.STATE, 0, 0)
                    await source.ask(ContentsKind.RESULT_AGREED, 0, CHUNK_BYTES)

            flooding = asyncio.create_task(flood())
            with pytest.raises(Refused) as refused:
                while asyncio.get_running_loop().time() < began_s + 60.0:
                    await source.take(anything)
            await cancel(flooding)
        assert refused.value.code is RefusalCode.BUSY
        assert (await header_of(asker(swarm, 1), source_peer.peer_id, ContentsKind.STATE)).global_step > 0

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_request_for_the_global_step_costs_the_source_no_copy(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        header = await header_of(asker(swarm), source_peer.peer_id, ContentsKind.STATE)
        assert (header.global_step, header.total_bytes) == (source_peer.global_step, swarm.terms.state_bytes)
        assert not num_copies(source_peer)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_source_that_has_not_begun_serves_its_manifest_and_no_weights(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = swarm.add(waits_for_start=True, wait_for_peers=5).start()
        await asyncio.sleep(2.0)
        newcomer = asker(swarm)
        assert (await header_of(newcomer, source_peer.peer_id, ContentsKind.MANIFEST)).total_bytes == len(swarm.signed.to_bytes())
        with pytest.raises(Refused) as refusal:
            await header_of(newcomer, source_peer.peer_id, ContentsKind.STATE)
        assert refusal.value.code is RefusalCode.NOT_READY

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_many_are_served_at_once_from_one_copy(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        states = await asyncio.gather(*(whole(asker(swarm, number), source_peer, swarm.terms.state_bytes, 7000) for number in range(8)))
        assert len({data for data, _ in states}) == 1 and num_copies(source_peer) == 1

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_copy_is_renewed_while_it_is_asked_for_and_let_go_afterwards(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        for number in range(20):
            await whole(asker(swarm, number), source_peer, 100, 100)
            await asyncio.sleep(0.3)
        assert num_copies(source_peer) == 1
        await asyncio.sleep(COPY_S)
        await whole(asker(swarm), source_peer, 100, 100)
        await asyncio.sleep(1.0)
        _, kept = await whole(asker(swarm), source_peer, 100, 100)
        assert num_copies(source_peer) == 2
        await asyncio.sleep(IDLE_S + 1.0)
        source_peer.trainer.frozen = False
        await asyncio.sleep(2.0)  # 8 steps: too few for a copy in memory to be renewed before it is given
        _, header = await whole(asker(swarm), source_peer, 100, 100)
        assert num_copies(source_peer) == 3 and header.global_step > kept.global_step, "its memory is not free again"
        await asyncio.sleep(20.0)  # 80 steps: an old copy would be behind before it is there
        _, header = await whole(asker(swarm, 1), source_peer, 100, 100)
        assert header.global_step > source_peer.global_step - 10

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_copy_that_comes_when_nobody_waits_any_more_is_let_go(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        ask_trainer = source_peer.link.request

        async def busy(request: messages.AnsweredRequest) -> messages.Reply:
            if isinstance(request, messages.BringUp):
                await asyncio.sleep(IDLE_S + 10.0)  # the inner steps of a large model are long
            return await ask_trainer(request)

        source_peer.link.request = busy
        with pytest.raises(TransportError, match="takes nothing|fell silent"):
            await whole(asker(swarm), source_peer, 100, 100)
        await asyncio.sleep(IDLE_S)
        source_peer.link.request = ask_trainer
        assert num_copies(source_peer) == 1
        left_at = source_peer.global_step
        await asyncio.sleep(IDLE_S)
        source_peer.trainer.frozen = False
        await asyncio.sleep(2.0)
        _, header = await whole(asker(swarm), source_peer, 100, 100)
        assert header.global_step > left_at, "its memory is not free again"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_newer_stream_of_the_same_partner_ends_the_older_one(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer, client = await still(swarm), asker(swarm)
        async with client.source(source_peer.peer_id, ()) as older:
            await older.ask(ContentsKind.STATE, 0, 100)
            await older.take(anything)
            async with client.source(source_peer.peer_id, ()) as newer:
                await newer.ask(ContentsKind.STATE, 0, 100)
                await newer.take(anything)
                with pytest.raises(PeerGone):
                    await older.take(anything)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_peer_that_had_many_states_gets_another_later(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)

        async def fetch(number: int = 0) -> None:
            await whole(asker(swarm, number), source_peer, swarm.terms.state_bytes)

        for _ in range(MOST_GIVEN):
            await fetch()
        with pytest.raises(Refused, match="lately") as refusal:
            await fetch()
        assert refusal.value.code is RefusalCode.BUSY
        await fetch(1)
        await asyncio.sleep(REST_S)
        for _ in range(MOST_GIVEN):
            await fetch()
        source_peer.trainer.frozen = False
        await asyncio.sleep(20.0)  # 80 steps, 60 may be between two clocks
        await fetch()

    play(Swarm(tmp_path, manifest=QUIET), story)


@pytest.mark.parametrize("alike", ["network", "invite"])
def test_peers_of_one_invite_or_network_have_a_limit_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: str) -> None:
    monkeypatch.setattr(state_source, "MOST_GIVEN_ALIKE", 3)

    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)

        async def fetch(number: int, group: int) -> None:
            newcomer = asker(swarm, number)
            network, invite = (group, number) if alike == "network" else (number, group)
            swarm.network.places[newcomer.identity.peer_id] = f"/ip4/20.{network}.0.{number + 1}/tcp/4001"
            newcomer.credential.current = credential_of(swarm, newcomer.identity, invite)
            await whole(newcomer, source_peer, swarm.terms.state_bytes)

        for number in range(3):
            await fetch(number, group=7)
        with pytest.raises(Refused, match="of your invite or network have had my state 3 times lately"):
            await fetch(3, group=7)
        await fetch(4, group=8)
        await asyncio.sleep(REST_S)
        await fetch(3, group=7)

    run = {"total_steps": 100_000, "access": "invite", "issuers": [str(HOST.peer_id)]}
    play(Swarm(tmp_path, manifest=tiny_manifest(run=run)), story)


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
    await stream.send(replace(header, signature=b"").signed(MALLORY, *changed(request, nonce=b"o" * 16).asked))


async def another_kind(stream: Stream, request: FetchRequest, header: Contents) -> None:
    await stream.send(replace(header, kind=ContentsKind.MANIFEST, signature=b"").signed(MALLORY, *request.asked))


FORGERIES = [
    (another_hash, BadMessage),
    (more_than_announced, BadMessage),
    (with_a_hole, BadMessage),
    (of_an_earlier_request, BadSignature),
    (another_kind, BadMessage),
]


def forger(forge: Callable[[Stream, FetchRequest, Contents], Awaitable[None]]) -> Callable[[Purpose, Stream], Awaitable[None]]:
    async def answer(purpose: Purpose, stream: Stream) -> None:
        request = await stream.receive()
        assert isinstance(request, FetchRequest)
        header = Contents(ContentsKind.STATE, len(DATA), hashlib.sha256(DATA).digest(), 7).signed(MALLORY, *request.asked)
        await forge(stream, request, header)
        await asyncio.sleep(100.0)

    return answer


async def ask_mallory(swarm: Swarm) -> None:
    async with asyncio.timeout(60.0), asker(swarm).source(MALLORY.peer_id, ()) as source:
        await source.ask(ContentsKind.STATE, 0, CHUNK_BYTES)
        await source.take(anything)


@pytest.mark.parametrize(("forge", "fault"), FORGERIES, ids=lambda value: value.__name__)
def test_bytes_that_differ_from_the_header_are_the_sources_fault(
    tmp_path: Path, forge: Callable[[Stream, FetchRequest, Contents], Awaitable[None]], fault: type[PeerMisbehaved]
) -> None:
    async def story(swarm: Swarm) -> None:
        swarm.network.start_peer(MALLORY.peer_id, forger(forge))
        with pytest.raises(fault):
            await ask_mallory(swarm)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_source_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async def silent(stream: Stream, request: FetchRequest, header: Contents) -> None:
        await stream.send(header)

    async def story(swarm: Swarm) -> None:
        swarm.network.start_peer(MALLORY.peer_id, forger(silent))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TransportError, match="takes nothing|fell silent"):
            await ask_mallory(swarm)
        assert asyncio.get_running_loop().time() - began_s < FRAME_S + 1.0

    play(Swarm(tmp_path, manifest=QUIET), story)


@pytest.mark.parametrize(("kind", "num_bytes"), [(ContentsKind.STATE, CHUNK_BYTES + 1), (ContentsKind.MANIFEST, CHUNK_BYTES + 1)])
@pytest.mark.parametrize("has_bulk", [False, True])
def test_a_request_that_no_chunk_answers_is_for_weights_over_a_bulk_stream(
    tmp_path: Path, kind: ContentsKind, num_bytes: int, has_bulk: bool
) -> None:
    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        async with asker(swarm).source(source_peer.peer_id, ()) as source:
            if has_bulk:
                await source.stream.open_bulk()
            await source.ask(kind, 0, num_bytes)
            if has_bulk and kind is ContentsKind.STATE:
                header, data = await source.take_run(anything, FRAME_S)
                assert len(data) == header.total_bytes == swarm.terms.state_bytes
            else:
                with pytest.raises(Refused) as refusal:
                    await source.take_run(anything, FRAME_S)
                assert refusal.value.code is RefusalCode.BAD_MESSAGE

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_bytes_of_another_hash_on_a_bulk_stream_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (client, server):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    give = Stream.send_bytes

    async def spoil(stream: Stream, data: memoryview) -> None:
        await give(stream, memoryview(bytes(len(data))))

    async def story(swarm: Swarm) -> None:
        source_peer = await still(swarm)
        async with asker(swarm).source(source_peer.peer_id, ()) as source:
            await source.stream.open_bulk()
            await source.ask(ContentsKind.STATE, 0, 5000)
            monkeypatch.setattr(Stream, "send_bytes", spoil)
            with pytest.raises(BadMessage):
                await source.take_run(anything, FRAME_S)

    play(Swarm(tmp_path, manifest=QUIET), story)
