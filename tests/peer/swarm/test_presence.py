"""A peer in the directory: found while it is announced, removed when it leaves, and unharmed when the directory fails."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from gossamer.peer.machine.events import AddressesChanged, Event, PeersSeen, Warned
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.presence import ANNOUNCE_S, FAREWELL_S, LOOK_S, RECORD_S, TWIN, Presence, SwarmReporter
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.errors import RunRefusesUs
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.figures import MemberFigures
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.records import GENERATION
from gossamer.protocol.tasks import cancel
from tests.peer.two_sides import SEEDS, TERMS, membership
from tests.protocol.knowing import KnowingNetwork, KnowingPeer
from tests.protocol.peers import nobody

A, B = (Identity(seed) for seed in SEEDS)
ADDRESS = "/ip4/203.0.113.5/tcp/4001"


class Peer:
    """A presence with its loops, and the events that it emits."""

    def __init__(self, network: KnowingNetwork, identity: Identity, *, has_trainer: bool = True) -> None:
        network.start_peer(identity.peer_id, nobody)
        self.book, self.lifecycle, self.events = AddressBook(identity.peer_id), Lifecycle(), list[Event]()
        peer_exchange = PeerExchange(TERMS, self.book, SwarmTime(network.now_s), random.Random(0))
        directory, emit = network.peers[identity.peer_id], self.events.append
        reporter = SwarmReporter(emit, peer_exchange)
        self.presence = Presence(membership(identity), directory, lambda: (ADDRESS,), peer_exchange, self.lifecycle, reporter, 1)
        if has_trainer:
            self.lifecycle.update(0, RunPhase.TRAIN, False)

    async def __aenter__(self) -> Peer:
        self.task = asyncio.create_task(self.presence.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self.task)

    def clocks(self) -> list[int]:
        return [entry.global_step for entry in self.book.live(asyncio.get_running_loop().time())]


@pytest.fixture
def network() -> KnowingNetwork:
    return KnowingNetwork()


@pytest.fixture
def a(network: KnowingNetwork) -> Peer:
    return Peer(network, A)


@pytest.fixture
def b(network: KnowingNetwork) -> Peer:
    return Peer(network, B)


async def test_two_newcomers_find_each_other_within_two_lookups(a: Peer, b: Peer) -> None:
    await asyncio.sleep(2 * LOOK_S[0])
    assert a.clocks() == b.clocks() == [0]
    assert a.events == [PeersSeen(0), AddressesChanged((ADDRESS,)), PeersSeen(1)], "only changes"
    assert await a.presence.first_look(0.0)


async def test_a_peer_is_announced_only_once_it_has_a_trainer(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    identity = Identity(bytes(31) + b"c")
    async with Peer(network, identity, has_trainer=False) as late:
        await asyncio.sleep(3 * LOOK_S[0])
        assert identity.peer_id not in {record.peer_id for record in await network.peers[A.peer_id].members()}
        assert len(late.clocks()) == 2, "it looks up other peers meanwhile"
        late.lifecycle.update(0, RunPhase.TRAIN, False)
        await asyncio.sleep(1.0)
        assert identity.peer_id in {record.peer_id for record in await network.peers[A.peer_id].members()}


async def test_progress_is_announced_regularly_and_the_end_of_the_schedule_at_once(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    await asyncio.sleep(5.0)
    b.lifecycle.update(70, RunPhase.TRAIN, True)
    await asyncio.sleep(ANNOUNCE_S + LOOK_S[1] + 1.0)
    assert a.clocks() == [70]
    b.lifecycle.update(80, RunPhase.FINISH, True)
    await asyncio.sleep(1.0)
    (record,) = [record for record in await network.peers[A.peer_id].members() if record.peer_id == B.peer_id]
    assert record.finished and record.global_step == 80


async def test_the_figures_of_a_peer_are_announced_in_its_record(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    b.lifecycle.figures = MemberFigures(own_steps=9, loss_milli=2501, joined_s=400, carried_mb=3)
    await asyncio.sleep(ANNOUNCE_S + LOOK_S[1] + 1.0)
    (record,) = [record for record in await network.peers[A.peer_id].members() if record.peer_id == B.peer_id]
    assert record.figures is not None and (record.figures.own_steps, record.figures.loss) == (9, 2.5)
    assert record in a.book.records(asyncio.get_running_loop().time()), "the other peer has checked it"
    (own,) = [record for record in await network.peers[B.peer_id].members() if record.peer_id == A.peer_id]
    assert own.figures is None, "a peer that has none to show announces none"


async def test_the_pause_of_a_peer_and_its_start_after_it_are_announced_at_once(network: KnowingNetwork, b: Peer, a: Peer) -> None:
    async def announced() -> tuple[bool, bool]:
        await asyncio.sleep(1.0)
        (record,) = [record for record in await network.peers[A.peer_id].members() if record.peer_id == B.peer_id]
        return record.paused, record.is_starting

    b.lifecycle.figures = MemberFigures(own_steps=9, loss_milli=2501, joined_s=400, carried_mb=3)
    b.lifecycle.update(70, RunPhase.TRAIN, True)
    await asyncio.sleep(ANNOUNCE_S + 1.0)
    seen = [await announced()]
    b.lifecycle.pause()
    seen.append(await announced())
    b.lifecycle.resume()
    seen.append(await announced())
    b.lifecycle.update(70, RunPhase.TRAIN, True)
    seen.append(await announced())
    assert seen == [(False, False), (True, False), (True, True), (False, False)]


async def test_a_peer_of_the_last_session_is_in_sight_once_its_record_is_here(a: Peer, b: Peer) -> None:
    a.book.add_address(Identity(bytes(31) + b"d").peer_id, "/ip4/203.0.113.9/tcp/4001", 0.0)  # as the book is loaded
    await asyncio.sleep(3 * LOOK_S[0])
    assert [event for event in a.events if isinstance(event, PeersSeen)] == [PeersSeen(0), PeersSeen(1)]


async def test_a_peer_that_leaves_is_removed_at_once_and_one_that_dies_expires(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    await asyncio.sleep(5.0)
    b.task.cancel()
    await b.presence.leave(1.0)
    await asyncio.sleep(FAREWELL_S)
    assert [record.peer_id for record in await network.peers[A.peer_id].members()] == [A.peer_id]
    a.task.cancel()
    network.kill(A.peer_id)
    await asyncio.sleep(RECORD_S)
    assert await network.peers[B.peer_id].members() == []


async def test_a_home_that_was_restored_elsewhere_ends_the_older_one(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    await asyncio.sleep(2 * LOOK_S[0])
    old = network.records[A.peer_id]
    restored = replace(old, sequence=old.sequence + GENERATION, signature=b"")
    network.records[A.peer_id] = restored.signed(B)  # anybody can write a record with our name
    await asyncio.sleep(3 * LOOK_S[1])
    assert not a.task.done()
    network.records[A.peer_id] = replace(restored, expires_s=restored.expires_s + 100, signature=b"").signed(A)
    with pytest.raises(ExceptionGroup) as caught:
        await a.task
    (error,) = caught.value.exceptions
    assert isinstance(error, RunRefusesUs) and "generation 1; here 0" in str(error)
    assert not b.task.done()


async def test_the_records_of_a_restored_home_replace_those_of_the_old_one(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    await asyncio.sleep(2 * LOOK_S[0])
    old = network.records[A.peer_id]
    a.presence.membership = replace(a.presence.membership, generation=2)
    await asyncio.sleep(2 * ANNOUNCE_S)
    new = network.records[A.peer_id]
    assert new.generation == 2 and new.supersedes(old) and not a.task.done()
    assert replace(a.presence.membership, generation=3).bare_record((), network.now_s()).supersedes(new)


async def test_a_second_home_of_the_same_generation_is_warned_of(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    warned, ended = Warned("identity", TWIN), Warned("identity", "")
    await asyncio.sleep(2 * LOOK_S[0])
    last_start = replace(network.records[A.peer_id], sequence=network.records[A.peer_id].sequence + RECORD_S - 60, signature=b"")
    network.records[A.peer_id] = last_start.signed(A)  # its clock was ahead
    await asyncio.sleep(RECORD_S)
    bare = replace(a.presence.membership.bare_record((), network.now_s() + 60), signature=b"")
    network.records[A.peer_id] = bare.signed(A)
    await asyncio.sleep(LOOK_S[1])
    assert warned not in a.events and not any(isinstance(event, Warned) for event in b.events)
    other = replace(bare, sequence=bare.sequence + 60, global_step=9, signature=b"")
    network.records[A.peer_id] = other.signed(B)  # anybody can write a record with our name
    await asyncio.sleep(LOOK_S[1])
    assert warned not in a.events
    network.records[A.peer_id] = other.signed(A)
    await asyncio.sleep(LOOK_S[1] + 1)
    assert a.events[-1] == warned and not a.task.done()
    await asyncio.sleep(2 * RECORD_S)
    assert a.events[-1] == ended, "the other has stopped"
    assert not any(isinstance(event, Warned) for event in b.events)


async def test_presence_recovers_when_the_directory_fails_for_an_hour(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    network.partition([A.peer_id], [B.peer_id])
    await asyncio.sleep(3600.0)
    assert a.clocks() == b.clocks() == [] and await a.presence.first_look(0.0)
    assert not any(peer.task.done() for peer in (a, b))
    network.partition()
    await asyncio.sleep(ANNOUNCE_S + LOOK_S[1])
    assert a.clocks() == b.clocks() == [0]


async def test_an_unexpected_error_of_a_lookup_or_announcement_is_logged_and_the_loop_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, a: Peer, b: Peer
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an unexpected error")

    with monkeypatch.context() as broken:
        broken.setattr(KnowingPeer, "members", fail)
        broken.setattr(KnowingPeer, "announce", fail)
        await asyncio.sleep(5.0)
    assert await a.presence.first_look(0.0) and not any(peer.task.done() for peer in (a, b))
    assert {"a directory lookup failed", "an announcement failed"} == {record.message for record in caplog.records}
    await asyncio.sleep(ANNOUNCE_S + LOOK_S[1])
    assert a.clocks() == b.clocks() == [0]


async def test_a_paused_peer_is_not_live_until_its_trainer_is_back(network: KnowingNetwork, a: Peer, b: Peer) -> None:
    await asyncio.sleep(2 * LOOK_S[0])
    a.lifecycle.update(7, RunPhase.TRAIN, True)
    a.lifecycle.pause()
    await asyncio.sleep(LOOK_S[1] + 1)
    assert b.clocks() == []
    assert len(await network.peers[B.peer_id].members()) == 2, "it keeps its place"
    a.lifecycle.resume()
    await asyncio.sleep(LOOK_S[1] + 1)
    assert b.clocks() == [], "its trainer is not back yet"
    a.lifecycle.update(7, RunPhase.TRAIN, True)
    await asyncio.sleep(LOOK_S[1] + 1)
    assert b.clocks() == [7]
