"""A seed: newcomers get the manifest from it, and nothing that it does not have."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

import pytest

from peer.link.payload_folder import PayloadFolder
from peer.node.fetching import FetchClient, find_manifest
from peer.node.seed import Seed
from protocol.errors import BadMessage, RefusalCode, RunRefusesUs, SwarmUnreachable
from protocol.identity import Identity
from protocol.limits import PROTOCOL_VERSION
from protocol.memory import virtual_time
from protocol.memory.network import MemoryNetwork
from protocol.messages.messages import Chunk, ContentsKind, FetchRequest, Part, Refusal
from protocol.messages.records import MemberRecord
from protocol.run.invite import Invite
from protocol.run.manifest import Manifest, SignedManifest
from protocol.streams.transport import Purpose
from tests.peer.deaf import Deaf

HOST, SEED, NEWCOMER, STRANGER = (Identity(letter * 32) for letter in (b"h", b"s", b"n", b"x"))
SIGNED = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST)
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{SEED.peer_id}"
HOUR_S = 3600


def invite(lifetime_s: int = HOUR_S) -> Invite:
    return Invite.issue(HOST, SIGNED.run_id, (ADDRESS,), None, int(time.time()) + lifetime_s)


def asker(network: MemoryNetwork, who: Identity, word: Invite | None) -> FetchClient:
    async def nobody(purpose: Purpose, stream: object) -> None:
        raise AssertionError("nobody calls a newcomer here")

    credential = word.credential_for(who.peer_id) if word else None
    return FetchClient(who, SIGNED.run_id, credential, network.transport(who.peer_id, nobody))


def seed(folder: Path, *, knows: bool = True) -> Seed:
    made = Seed(SEED, PayloadFolder(folder))
    if knows:
        made.learn(SIGNED)
    return made


def test_a_newcomer_gets_the_manifest(tmp_path: Path) -> None:
    async def scene() -> None:
        network = MemoryNetwork()
        network.transport(SEED.peer_id, seed(tmp_path).answer)
        said: list[str] = []
        assert await find_manifest(asker(network, NEWCOMER, invite()), [ADDRESS], said.append) == SIGNED
        assert said == [f"asking {ADDRESS} for the run's manifest"]
        await network.close()

    virtual_time.run(scene())


def test_a_stranger_is_refused_for_good(tmp_path: Path) -> None:
    async def scene() -> None:
        network = MemoryNetwork()
        network.transport(SEED.peer_id, seed(tmp_path).answer)
        with pytest.raises(RunRefusesUs) as caught:
            await find_manifest(asker(network, STRANGER, None), [ADDRESS], lambda _: None)
        assert caught.value.hint
        await network.close()

    virtual_time.run(scene())


def test_nobody_at_the_address_is_the_networks_fault() -> None:
    async def scene() -> None:
        network = MemoryNetwork()
        with pytest.raises(SwarmUnreachable, match="none of the invite's addresses") as caught:
            await find_manifest(asker(network, NEWCOMER, invite()), [ADDRESS], lambda _: None)
        assert caught.value.hint
        await network.close()

    virtual_time.run(scene())


@pytest.mark.parametrize("purpose", list(Purpose))
def test_weights_and_meetings_are_to_be_had_elsewhere(purpose: Purpose, tmp_path: Path) -> None:
    async def scene() -> None:
        network = MemoryNetwork()
        network.transport(SEED.peer_id, seed(tmp_path).answer)
        stream = await asker(network, NEWCOMER, invite()).transport.connect(SEED.peer_id, (), purpose)
        request = FetchRequest(
            PROTOCOL_VERSION,
            SIGNED.run_id,
            NEWCOMER.peer_id,
            SEED.peer_id,
            secrets.token_bytes(16),
            ContentsKind.STATE,
            invite().credential_for(NEWCOMER.peer_id),
        )
        await stream.send(request.signed(NEWCOMER))
        answer = await stream.receive()
        assert isinstance(answer, Refusal)
        assert answer.code is RefusalCode.NOT_READY
        await stream.close()
        await network.close()

    virtual_time.run(scene())


@pytest.mark.parametrize("knows", [False, True])
def test_who_asks_for_a_meeting_and_does_not_listen_is_hung_up_on(knows: bool, tmp_path: Path) -> None:
    async def scene() -> None:
        stream = Deaf(STRANGER.peer_id)
        async with asyncio.timeout(5.0):
            await seed(tmp_path, knows=knows).answer(Purpose.MEET, stream)
        assert stream.is_closed

    virtual_time.run(scene())


def test_who_asks_for_nonsense_and_does_not_listen_is_hung_up_on(tmp_path: Path) -> None:
    async def scene() -> None:
        stream = Deaf(STRANGER.peer_id, Chunk(Part.PAYLOAD, 0, b"x"))
        with pytest.raises(BadMessage):
            async with asyncio.timeout(5.0):
                await seed(tmp_path).answer(Purpose.FETCH, stream)
        assert stream.is_closed

    virtual_time.run(scene())


def test_records_of_strangers_are_not_held(tmp_path: Path) -> None:
    def record(who: Identity, word: Invite | None) -> MemberRecord:
        credential = word.credential_for(who.peer_id) if word else None
        expires_s = int(time.time()) + 60
        return MemberRecord(SIGNED.run_id, who.peer_id, (), 0, False, 1, expires_s, credential).signed(who)

    knowing = seed(tmp_path / "knowing")
    assert knowing.is_member(record(NEWCOMER, invite()))
    assert not knowing.is_member(record(STRANGER, None))
    assert seed(tmp_path / "new", knows=False).is_member(record(STRANGER, None))
