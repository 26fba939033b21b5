"""Getting in: through any bootstrap node, however many others are down or malicious."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gossamer.peer.node.arrival import TIMEOUT_S, find_run
from gossamer.peer.node.dispatcher import Dispatcher
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.peer.sync.client import FetchClient
from gossamer.peer.sync.server import FetchServer
from gossamer.protocol.errors import PeerGone, RefusalCode, RunRefusesUs, SwarmUnreachable, Unreachable, WrongVersion
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import PROTOCOL
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.messages import Refusal
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.revocations import Revocation, Revocations
from gossamer.protocol.messages.terms import RunTerms
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import loop_s
from gossamer.run import Run
from tests.swarm.mallory import nobody

HOST, SEED, MEMBER, NEWCOMER, STRANGER = (Identity(letter * 32) for letter in (b"h", b"s", b"m", b"n", b"x"))
MANIFEST = Manifest().with_host(HOST.peer_id)
SIGNED, OTHER = SignedManifest.sign(MANIFEST, HOST), SignedManifest.sign(Manifest().with_host(SEED.peer_id), SEED)
TERMS = RunTerms.from_manifest(MANIFEST)


def at(who: Identity) -> str:
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{who.peer_id}"


INVITE = Invite.issue(HOST, SIGNED.run_id, (at(HOST),), None, int(time.time()) + 86400)


def record_of(who: Identity) -> MemberRecord:
    unsigned = MemberRecord(SIGNED.run_id, who.peer_id, (at(who),), 0, False, 1, int(time.time()) + 200, INVITE.credential_for(who.peer_id))
    return unsigned.signed(who)


def serve(
    network: MemoryNetwork, who: Identity, knows: Sequence[Identity] = (), manifest: SignedManifest = SIGNED, terms: RunTerms = TERMS
) -> None:
    """Bring up a peer that gives its manifest, and knows these."""
    book = AddressBook(who.peer_id)
    peer_exchange = PeerExchange(terms, book, SwarmTime(), random.Random(0))
    peer_exchange.take_all(record_of(one).to_bytes() for one in knows)
    server = FetchServer(who, terms, manifest.to_bytes(), time.time, peer_exchange)
    network.start_peer(who.peer_id, Dispatcher(book, "later", {Purpose.FETCH: server.answer}.get).answer)


async def refuses(purpose: Purpose, stream: Stream) -> None:
    await stream.receive()
    await stream.send(Refusal(RefusalCode.NOT_INVITED, "go away"))


def asker(network: MemoryNetwork, who: Identity = NEWCOMER) -> FetchClient:
    credential = INVITE.credential_for(who.peer_id) if who is NEWCOMER else None
    return FetchClient(who, SIGNED.run_id, OwnCredential(credential), network.start_peer(who.peer_id, nobody))


async def test_the_first_answer_names_members_beside_the_manifest(network: MemoryNetwork) -> None:
    serve(network, HOST, knows=[MEMBER, SEED])
    reported: list[str] = []
    signed, named = await find_run(asker(network), [at(HOST)], SwarmTime(), reported.append)
    assert signed == SIGNED and reported == [f"asking {at(HOST)} for the run's manifest"]
    assert {MemberRecord.from_bytes(raw).peer_id for raw in named} == {MEMBER.peer_id, SEED.peer_id}


async def test_a_bootstrap_that_dies_before_the_manifest_has_named_another(network: MemoryNetwork) -> None:
    serve(network, HOST, knows=[MEMBER])
    host = network.peers[HOST.peer_id].handler

    async def dies_early(purpose: Purpose, stream: Stream) -> None:
        send, num_sent = stream.send, 0

        async def two_frames(message: object) -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent > 2:  # the header of the peer_list, and the peer_list
                network.kill(HOST.peer_id, is_delivered=True)
                raise PeerGone("it has died")
            await send(message)  # type: ignore[arg-type]

        stream.send = two_frames  # type: ignore[method-assign]
        await host(purpose, stream)

    network.peers[HOST.peer_id].handler = dies_early
    serve(network, MEMBER)
    signed, _ = await find_run(asker(network), [at(HOST)], SwarmTime(), lambda _: None)
    assert signed == SIGNED and not network.is_up(HOST.peer_id) and loop_s() < 5.0


@pytest.mark.parametrize("first", ["dead", "refuses", "lies", "silent"])
async def test_one_bootstrap_of_two_is_enough(first: str, network: MemoryNetwork) -> None:
    async def silent(purpose: Purpose, stream: Stream) -> None:
        await asyncio.sleep(1000.0)

    if first == "lies":
        serve(network, HOST, manifest=OTHER)
    elif first != "dead":
        network.start_peer(HOST.peer_id, refuses if first == "refuses" else silent)
    serve(network, SEED)
    signed, _ = await find_run(asker(network), [at(HOST), at(SEED)], SwarmTime(), lambda _: None)
    assert signed == SIGNED and loop_s() < 3.0


async def test_a_bootstrap_that_starts_later_ends_the_wait_though_the_other_refuses(network: MemoryNetwork) -> None:
    network.start_peer(HOST.peer_id, refuses)
    asking = asyncio.create_task(find_run(asker(network), [at(HOST), at(SEED)], SwarmTime(), lambda _: None))
    await asyncio.sleep(30.0)
    serve(network, SEED)
    assert (await asking)[0] == SIGNED and loop_s() < 45.0


async def test_a_peer_refused_by_all_reports_it_at_once(network: MemoryNetwork) -> None:
    for who in (HOST, SEED):
        serve(network, who)
    with pytest.raises(RunRefusesUs) as caught:
        await find_run(asker(network, STRANGER), [at(HOST), at(SEED)], SwarmTime(), lambda _: None)
    assert caught.value.hint and loop_s() < 1.0


async def test_one_refusal_and_silent_others_are_reported_after_a_minute(network: MemoryNetwork) -> None:
    network.start_peer(HOST.peer_id, refuses)
    with pytest.raises(RunRefusesUs):
        await find_run(asker(network), [at(HOST), at(SEED)], SwarmTime(), lambda _: None)
    assert loop_s() >= TIMEOUT_S


async def test_an_address_without_a_peer_is_the_networks_fault(network: MemoryNetwork) -> None:
    with pytest.raises(SwarmUnreachable, match="none of the invite's addresses") as caught:
        await find_run(asker(network), [at(SEED)], SwarmTime(), lambda _: None)
    assert caught.value.hint


async def test_the_error_names_why_an_address_did_not_answer_and_not_that_it_was_tried_before(
    monkeypatch: pytest.MonkeyPatch, network: MemoryNetwork
) -> None:
    words = itertools.chain(
        ["p2pd: failed to dial X: all dials failed * connect: connection refused"], itertools.repeat("p2pd: dial backoff")
    )

    def source(*_: object) -> object:
        raise Unreachable(next(words))

    client = asker(network)
    monkeypatch.setattr(FetchClient, "source", source)
    with pytest.raises(SwarmUnreachable, match=r"in 60 s \(last: .*: connection refused\)"):
        await find_run(client, [at(SEED)], SwarmTime(), lambda _: None)


async def test_addresses_from_a_malicious_peer_do_not_hide_others(network: MemoryNetwork) -> None:
    """A bootstrap node without the manifest lists sixteen absent ones; the invite's next one is asked before them."""
    serve(network, HOST, knows=[Identity(bytes([number]) * 32) for number in range(100, 116)], manifest=OTHER)
    serve(network, SEED)
    assert (await find_run(asker(network), [at(HOST), at(SEED)], SwarmTime(), lambda _: None))[0] == SIGNED
    assert loop_s() < 3.0


async def test_a_program_run_is_found(network: MemoryNetwork) -> None:
    program = Run("cifar", 300).manifest({"head": (3, 2)}).with_host(HOST.peer_id)
    signed, invite = SignedManifest.sign(program, HOST), Invite.issue(HOST, program.run_id, (at(HOST),), None, int(time.time()) + 3600)
    serve(network, HOST, manifest=signed, terms=RunTerms.from_manifest(program))
    transport = network.start_peer(NEWCOMER.peer_id, nobody)
    client = FetchClient(NEWCOMER, program.run_id, OwnCredential(invite.credential_for(NEWCOMER.peer_id)), transport)
    found, _ = await find_run(client, [at(HOST)], SwarmTime(), lambda _: None)
    assert found.manifest() == program
    assert loop_s() < 1.0


async def test_another_release_is_told_that_its_version_is_the_reason(monkeypatch: pytest.MonkeyPatch, network: MemoryNetwork) -> None:
    monkeypatch.setattr("gossamer.peer.sync.client.PROTOCOL", PROTOCOL + 1)
    serve(network, HOST)
    with pytest.raises(WrongVersion, match="theirs is 2, ours 1") as caught:
        await find_run(asker(network), [at(HOST)], SwarmTime(), lambda _: None)
    assert "release" in caught.value.hint and loop_s() < 1.0


async def test_a_revoked_peer_is_notified_at_once_and_other_members_are_admitted(network: MemoryNetwork) -> None:
    held = Revocations()
    held.add(Revocation(SIGNED.run_id, HOST.peer_id, NEWCOMER.peer_id, int(time.time())).signed(HOST))
    serve(network, HOST, terms=replace(TERMS, revocations=held))
    with pytest.raises(RunRefusesUs, match="a revoked invite") as caught:
        await find_run(asker(network), [at(HOST)], SwarmTime(), lambda _: None)
    assert caught.value.hint and loop_s() < 1.0
    other = FetchClient(
        MEMBER, SIGNED.run_id, OwnCredential(INVITE.credential_for(MEMBER.peer_id)), network.start_peer(MEMBER.peer_id, nobody)
    )
    assert (await find_run(other, [at(HOST)], SwarmTime(), lambda _: None))[0] == SIGNED
