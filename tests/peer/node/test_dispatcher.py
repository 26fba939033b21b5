"""The dispatcher: it refuses while nothing serves a purpose, and bans a peer that breaks the protocol."""

from __future__ import annotations

import asyncio
import random
import secrets
import time

import pytest

from gossamer.peer.node.dispatcher import Dispatcher
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.peer.sync.client import FetchClient
from gossamer.peer.sync.server import FetchServer
from gossamer.protocol.errors import RefusalCode, Unreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import PROTOCOL
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.messages import Chunk, ContentsKind, FetchRequest, Opening, Part, Refusal
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.streams.admission import handle
from gossamer.protocol.streams.transport import Purpose
from gossamer.protocol.tasks import loop_s
from tests.peer.asking import header_of
from tests.peer.deaf import Deaf
from tests.swarm.mallory import nobody

HOST, SEED, NEWCOMER, STRANGER = (Identity(letter * 32) for letter in (b"h", b"s", b"n", b"x"))
SIGNED = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST)
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{SEED.peer_id}"
HOUR_S = 3600


def invite(lifetime_s: int = HOUR_S) -> Invite:
    return Invite.issue(HOST, SIGNED.run_id, (ADDRESS,), None, int(time.time()) + lifetime_s)


def asker(network: MemoryNetwork, who: Identity, word: Invite | None) -> FetchClient:
    credential = word.credential_for(who.peer_id) if word else None
    return FetchClient(who, SIGNED.run_id, OwnCredential(credential), network.start_peer(who.peer_id, nobody))


def dispatcher(*, knows: bool = True) -> tuple[Dispatcher, AddressBook]:
    """Return one that gives the manifest if it knows the run, and nothing else."""
    book, terms = AddressBook(SEED.peer_id), RunTerms.from_manifest(SIGNED.manifest())
    gossip = PeerExchange(terms, AddressBook(SEED.peer_id), SwarmTime(), random.Random(0))
    server = FetchServer(SEED, terms, SIGNED.to_bytes(), time.time, gossip)
    return Dispatcher(book, "come back later", {Purpose.FETCH: server.answer}.get if knows else lambda purpose: None), book


def served(*, knows: bool = True) -> MemoryNetwork:
    network, (made, book) = MemoryNetwork(), dispatcher(knows=knows)
    network.start_peer(SEED.peer_id, made.answer, is_banned=lambda partner: book.is_banned(partner, loop_s()))
    return network


def wants(kind: ContentsKind = ContentsKind.STATE, num_bytes: int = 0) -> FetchRequest:
    credential, nonce = invite().credential_for(NEWCOMER.peer_id), secrets.token_bytes(16)
    opening = Opening(PROTOCOL, SIGNED.run_id, NEWCOMER.peer_id, SEED.peer_id, nonce, credential=credential)
    return FetchRequest(opening, kind, 0, num_bytes).signed(NEWCOMER)


@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize("purpose", list(Purpose))
async def test_what_is_not_there_yet_is_to_be_asked_for_later(purpose: Purpose, knows: bool) -> None:
    network = served(knows=knows)
    stream = await asker(network, NEWCOMER, invite()).transport.connect(SEED.peer_id, (), purpose)
    await stream.send(wants())
    answer = await stream.receive()
    assert isinstance(answer, Refusal) and answer.code is RefusalCode.NOT_READY
    stream.close()
    await network.close()


@pytest.mark.parametrize("knows", [False, True])
async def test_a_caller_of_a_meeting_that_does_not_read_is_disconnected(knows: bool) -> None:
    stream = Deaf(STRANGER.peer_id)
    async with asyncio.timeout(5.0):
        await handle(dispatcher(knows=knows)[0].answer, Purpose.MEET, stream)
    assert stream.is_closed


@pytest.mark.parametrize("kind", [ContentsKind.MANIFEST, ContentsKind.PEER_LIST])
async def test_a_caller_of_the_manifest_that_does_not_read_loses_its_place_in_seconds(kind: ContentsKind) -> None:
    stream, (made, book) = Deaf(NEWCOMER.peer_id, wants(kind, 1024)), dispatcher()
    async with asyncio.timeout(10.0):
        await handle(made.answer, Purpose.FETCH, stream)
    assert stream.is_closed and not book.is_banned(NEWCOMER.peer_id, loop_s()), "its line may be slow"


async def test_a_caller_of_nonsense_that_does_not_read_is_banned() -> None:
    stream, (made, book) = Deaf(STRANGER.peer_id, Chunk(Part.PAYLOAD, 0, b"x")), dispatcher()
    async with asyncio.timeout(5.0):
        await handle(made.answer, Purpose.FETCH, stream)
    assert stream.is_closed and book.is_banned(STRANGER.peer_id, loop_s())


async def test_a_caller_that_misbehaved_is_refused_from_then_on() -> None:
    network = served()
    client = asker(network, NEWCOMER, invite())
    stream = await client.transport.connect(SEED.peer_id, (), Purpose.FETCH)
    await stream.send(Chunk(Part.PAYLOAD, 0, b"x"))
    answer = await stream.receive()
    assert isinstance(answer, Refusal) and answer.code is RefusalCode.BAD_MESSAGE
    with pytest.raises(Unreachable):
        await header_of(client, SEED.peer_id, ContentsKind.MANIFEST)
    await network.close()
