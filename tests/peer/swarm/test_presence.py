"""A peer in the directory: found by others while it is there, gone soon after, and none the worse when the directory fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from gossamer.peer.machine.events import AddressesChanged, Event, PeersSeen
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.presence import ANNOUNCE_S, LOOK_S, RECORD_S, Presence
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.messages.messages import RunPhase
from tests.peer.two_sides import SEEDS, TERMS, membership
from tests.protocol.knowing import KnowingNetwork, KnowingPeer
from tests.protocol.peers import nobody

A, B = (Identity(seed) for seed in SEEDS)
ADDRESS = "/ip4/203.0.113.5/tcp/4001"


class Peer:
    """A presence with its two loops."""

    def __init__(self, network: KnowingNetwork, identity: Identity, *, has_trainer: bool = True) -> None:
        network.transport(identity.peer_id, nobody)
        self.book, self.lifecycle, self.told = AddressBook(identity.peer_id), Lifecycle(), list[Event]()
        peer_exchange = PeerExchange(TERMS, self.book, SwarmTime(network.now_s), random.Random(0))
        directory, emit = network.peers[identity.peer_id], self.told.append
        self.presence = Presence(membership(identity), directory, lambda: (ADDRESS,), peer_exchange, self.lifecycle, emit, wait_for_peers=1)
        if has_trainer:
            self.lifecycle.update(0, RunPhase.TRAIN, False)
        self.task = asyncio.create_task(self.presence.run())

    def clocks(self) -> list[int]:
        return [entry.clock_steps for entry in self.book.live(asyncio.get_running_loop().time())]

    def stop(self) -> None:
        self.task.cancel()


def play(story: Callable[[KnowingNetwork, Peer, Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        network = KnowingNetwork()
        await story(network, Peer(network, A), Peer(network, B))
        await network.close()

    run(main())


def test_two_newcomers_find_each_other_within_two_looks() -> None:
    async def story(network: KnowingNetwork, a: Peer, b: Peer) -> None:
        await asyncio.sleep(2 * LOOK_S[0])
        assert a.clocks() == b.clocks() == [0]
        assert a.told == [PeersSeen(0), AddressesChanged((ADDRESS,)), PeersSeen(1)], "only what is new"
        assert await a.presence.first_look(0.0)

    play(story)


def test_who_has_no_trainer_yet_is_not_found_and_found_soon_after() -> None:
    async def story(network: KnowingNetwork, a: Peer, b: Peer) -> None:
        identity = Identity(bytes(31) + b"c")
        late = Peer(network, identity, has_trainer=False)
        await asyncio.sleep(3 * LOOK_S[0])
        assert identity.peer_id not in {record.peer_id for record in await network.peers[A.peer_id].members()}
        assert len(late.clocks()) == 2, "it looks around meanwhile"
        late.lifecycle.update(0, RunPhase.TRAIN, False)
        await asyncio.sleep(1.0)
        assert identity.peer_id in {record.peer_id for record in await network.peers[A.peer_id].members()}
        late.stop()

    play(story)


def test_progress_is_heard_of_and_the_end_of_the_schedule_at_once() -> None:
    async def story(network: KnowingNetwork, a: Peer, b: Peer) -> None:
        await asyncio.sleep(5.0)
        b.lifecycle.update(70, RunPhase.TRAIN, True)
        await asyncio.sleep(ANNOUNCE_S + LOOK_S[1] + 1.0)
        assert a.clocks() == [70]
        b.lifecycle.update(80, RunPhase.FINISH, True)
        await asyncio.sleep(1.0)
        (record,) = [record for record in await network.peers[A.peer_id].members() if record.peer_id == B.peer_id]
        assert record.finished and record.clock_steps == 80

    play(story)


def test_who_says_goodbye_is_not_found_and_who_dies_is_forgotten() -> None:
    async def story(network: KnowingNetwork, a: Peer, b: Peer) -> None:
        await asyncio.sleep(5.0)
        b.stop()
        await b.presence.leave()
        await asyncio.sleep(2.0)
        assert [record.peer_id for record in await network.peers[A.peer_id].members()] == [A.peer_id]
        a.stop()
        network.kill(A.peer_id)
        await asyncio.sleep(RECORD_S)
        assert await network.peers[B.peer_id].members() == []

    play(story)


def test_a_directory_that_fails_for_an_hour_is_only_waited_for() -> None:
    async def story(network: KnowingNetwork, a: Peer, b: Peer) -> None:
        network.partition([A.peer_id], [B.peer_id])
        await asyncio.sleep(3600.0)
        assert a.clocks() == b.clocks() == [] and await a.presence.first_look(0.0)
        assert not any(peer.task.done() for peer in (a, b))
        network.partition()
        await asyncio.sleep(ANNOUNCE_S + LOOK_S[1])
        assert a.clocks() == b.clocks() == [0]

    play(story)


def test_one_look_or_announcement_that_fails_as_none_should_is_logged_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a case that nobody thought of")

    async def story(network: KnowingNetwork, a: Peer, b: Peer) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(KnowingPeer, "members", fail)
            broken.setattr(KnowingPeer, "announce", fail)
            await asyncio.sleep(5.0)
        assert await a.presence.first_look(0.0) and not any(peer.task.done() for peer in (a, b))
        assert {"a look into the directory failed", "an announcement failed"} == {record.message for record in caplog.records}
        await asyncio.sleep(ANNOUNCE_S + LOOK_S[1])
        assert a.clocks() == b.clocks() == [0]

    play(story)


def test_who_pauses_is_not_called_and_its_clock_does_not_count_until_it_goes_on() -> None:
    async def story(network: KnowingNetwork, a: Peer, b: Peer) -> None:
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

    play(story)
