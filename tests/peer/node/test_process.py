"""Around the node: who is let in before there is a node. The process itself: tests/e2e."""

from __future__ import annotations

import asyncio

import pytest

from peer.node.process import Doorman
from protocol.errors import RefusalCode
from protocol.identity import Identity
from protocol.memory import virtual_time
from protocol.memory.network import EPOCH_S, MemoryNetwork
from protocol.messages.messages import Refusal
from protocol.messages.records import MemberRecord
from protocol.messages.terms import RunTerms
from protocol.streams.transport import Purpose
from tests.peer.deaf import Deaf
from tests.peer.small import small_manifest
from tests.swarm.mallory import nobody

HOST, GUEST = Identity(b"h" * 32), Identity(b"g" * 32)


def record(who: Identity, run_id: bytes) -> MemberRecord:
    return MemberRecord(run_id, who.peer_id, ("/ip4/192.0.2.1/tcp/1",), 0, False, 1, int(EPOCH_S) + 90).signed(who)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_who_calls_before_there_is_a_node_is_told_to_come_back(purpose: Purpose) -> None:
    async def story() -> None:
        network = MemoryNetwork()
        network.transport(HOST.peer_id, Doorman().answer)
        stream = await network.transport(GUEST.peer_id, nobody).connect(HOST.peer_id, (), purpose)
        await stream.send(Refusal(RefusalCode.BUSY))
        answer = await stream.receive()
        assert isinstance(answer, Refusal) and answer.code is RefusalCode.NOT_READY
        await stream.close()
        await network.close()

    virtual_time.run(story())


@pytest.mark.parametrize("purpose", list(Purpose))
def test_who_calls_before_there_is_a_node_and_does_not_listen_is_hung_up_on(purpose: Purpose) -> None:
    async def story() -> None:
        stream = Deaf(GUEST.peer_id)
        async with asyncio.timeout(5.0):
            await Doorman().answer(purpose, stream)
        assert stream.is_closed

    virtual_time.run(story())


def test_the_directory_holds_members_only_once_it_is_known_who_is_one() -> None:
    doorman = Doorman()
    manifest = small_manifest(run={"access": "allowlist", "members": [str(GUEST.peer_id)]})
    terms = RunTerms.from_manifest(manifest)
    assert doorman.is_member(record(HOST, terms.run_id)), "before that, everybody may be one"
    doorman.terms = terms
    assert doorman.is_member(record(GUEST, terms.run_id)) and not doorman.is_member(record(HOST, terms.run_id))
