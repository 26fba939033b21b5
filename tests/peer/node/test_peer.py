"""The composition root without a process: a node without a trainer, over the network in memory."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from gossamer.peer.machine.events import Event, ProcessReported, RunKnown
from gossamer.peer.machine.home import Home
from gossamer.peer.node.peer import HeldRun, NodePeer, PeerNetwork
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.tasks import loop_s
from tests.swarm.world import EmptyDirectory

HOST, SEED, NEWCOMER, STRANGER = (Identity(letter * 32) for letter in (b"h", b"s", b"n", b"x"))
SIGNED = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST)
AT_HOST, AT_SEED = (f"/ip4/127.0.0.1/tcp/4001/p2p/{who.peer_id}" for who in (HOST, SEED))
INVITE = Invite.issue(HOST, SIGNED.run_id, (AT_HOST,), None, int(time.time()) + 86400)


class Bootstrap:
    """A node without a trainer. One that does not hold the manifest gets it from the host."""

    def __init__(self, network: MemoryNetwork, folder: Path, who: Identity, *, holds: bool) -> None:
        folder.mkdir()
        self.events: list[Event] = []
        self.home = Home(folder)
        run = HeldRun(SIGNED.run_id, SIGNED if holds else None, INVITE.credential_for(who.peer_id), INVITE.bootstraps, is_founder=False)
        self.peer = NodePeer(self.home, run, who, None, time.time, random.Random(0), self.events.append)
        transport = network.start_peer(who.peer_id, self.peer.answer, is_banned=self.peer.is_banned, has_met=self.peer.has_met)
        seams = PeerNetwork(transport, EmptyDirectory(), lambda: (), self._connected)
        self.task = asyncio.create_task(self.peer.run(seams))

    async def _connected(self) -> list[object]:
        return []

    async def stop(self) -> None:
        self.peer.stop()
        await self.task


def record(who: Identity, invite: Invite | None) -> MemberRecord:
    credential = invite.credential_for(who.peer_id) if invite else None
    return MemberRecord(SIGNED.run_id, who.peer_id, (), 0, False, 1, int(time.time()) + 60, credential).signed(who)


async def test_the_directory_holds_members_only_once_the_manifest_is_known(tmp_path: Path, network: MemoryNetwork) -> None:
    seed = Bootstrap(network, tmp_path / "seed", SEED, holds=False)
    await asyncio.sleep(5.0)
    assert not seed.peer.is_member(record(NEWCOMER, INVITE)), "the manifest says who is one"
    assert seed.peer.bare_record(()) is None and not seed.home.manifest.exists()
    host = Bootstrap(network, tmp_path / "host", HOST, holds=True)
    await asyncio.sleep(10.0)
    assert seed.home.manifest.read_bytes() == SIGNED.to_bytes()
    assert seed.peer.is_member(record(NEWCOMER, INVITE)) and not seed.peer.is_member(record(STRANGER, None))
    bare = seed.peer.bare_record((AT_SEED,))
    assert bare is not None and host.peer.is_member(bare)
    assert [type(event) for event in seed.events if isinstance(event, RunKnown)] == [RunKnown]
    assert ProcessReported("serving", "0 connected") in seed.events
    for one in (seed, host):
        await one.stop()


async def test_one_that_is_stopped_before_it_has_the_manifest_ends(tmp_path: Path, network: MemoryNetwork) -> None:
    seed = Bootstrap(network, tmp_path / "seed", SEED, holds=False)
    await asyncio.sleep(3.0)
    began_s = loop_s()
    await seed.stop()
    assert loop_s() - began_s < 1.0 and seed.peer.member is None
