"""The node process: a real network around `Node`. Started by the supervisor as `python -m peer.node`; holds no tensor.

It finds the run (from the home folder, or the manifest from a peer that the invite names), then runs the node until the supervisor says
stop. If p2pd dies, `Libp2pNode` rebuilds the network below us; if this process dies, the trainer trains on and the supervisor starts
another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from peer.link.payload_folder import PayloadFolder
from peer.link.records import Writer
from peer.link.socket import NodeEnd
from peer.machine.child import Child
from peer.machine.events import ProcessSays, RunKnown
from peer.machine.home import Home
from peer.meeting.driver import Tools
from peer.meeting.journal import Journal
from peer.node.catch_up import NodeSettings
from peer.node.fetching import FetchClient, find_manifest, store_manifest
from peer.node.meetings import say
from peer.node.node import Node
from peer.swarm.address_book import held_invite, loop_s, ways_in
from peer.swarm.membership import Membership
from peer.swarm.presence import World
from protocol.errors import RefusalCode, Refused
from protocol.identity import Identity, PeerId
from protocol.libp2p.node import Libp2pNode
from protocol.libp2p.p2pd import DaemonSettings
from protocol.libp2p.record_store import RecordShelf
from protocol.messages.messages import Refusal
from protocol.messages.records import MemberRecord
from protocol.messages.terms import RunTerms, check_member
from protocol.run.manifest import Manifest, SignedManifest
from protocol.streams.transport import Purpose, Stream

SAVE_BOOK_S = 2.0  # a peer that is killed early must still find its way back
LEAVE_S = 3.0


class Doorman:
    """Takes inbound streams before there is a node to take them."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.manifest = b""
        self.terms: RunTerms | None = None

    def is_member(self, record: MemberRecord) -> bool:
        """Say whether the directory should hold a record: a member's, as soon as we know who is one."""
        if self.terms is None:
            return True
        try:
            check_member(record.peer_id, record.credential, self.terms, time.time())
        except Refused:
            return False
        return True

    async def answer(self, purpose: Purpose, stream: Stream) -> None:
        """Pass a stream on, or refuse it while this peer is still finding its run."""
        if self.node is not None:
            await self.node.answer(purpose, stream, self.node.donor(self.manifest))
            return
        await say(stream, Refusal(RefusalCode.NOT_READY, "still joining"))
        await stream.close()


class NodeProcess:
    """Everything between the supervisor's pipes and the network."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._config = child.settings.config
        self._home = Home(self._config.home)
        self._identity = Identity.load_or_create(self._home.identity)
        self._invite = held_invite(self._home)
        self._doorman = Doorman()

    async def run(self) -> None:
        """Run until the supervisor says stop. Raises GossamerError when the run cannot be found or does not want us."""
        run_id = self._invite.run_id if self._invite else self._read_manifest().run_id
        settings = DaemonSettings(
            identity_file=self._home.identity,
            folder=self._child.settings.runtime / "net",
            host=self._config.listen_host,
            port=self._config.listen_port,
            announce=self._config.announce,
        )
        shelf = RecordShelf(run_id, self._doorman.is_member)
        stopped = asyncio.create_task(self._until_stopped())
        async with Libp2pNode(settings, shelf, self._doorman.answer, self._bootstraps) as network:
            work = asyncio.create_task(self._work(network))
            await asyncio.wait([stopped, work], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if self._doorman.node is not None:
                await self._doorman.node.leave(LEAVE_S)
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self, network: Libp2pNode) -> None:
        signed = self._read_manifest() if self._home.manifest.exists() else await self._fetch_manifest(network)
        manifest = signed.manifest()
        self._child.emit(RunKnown(signed.run_id.hex(), manifest.run.total_steps))
        await self._serve(network, signed, manifest)

    async def _serve(self, network: Libp2pNode, signed: SignedManifest, manifest: Manifest) -> None:
        link = NodeEnd(self._child.settings.runtime)
        terms = RunTerms.from_manifest(manifest, await link.connect())
        credential = self._invite.credential_for(self._identity.peer_id) if self._invite else None
        membership = Membership(self._identity, terms, credential, manifest.outer.deadline_s, manifest.outer.no_partner == "defer")
        world = World(network, network, lambda: network.addresses, time.time, random.SystemRandom())
        payloads = PayloadFolder(self._child.settings.runtime / "payloads")
        payloads.clear(Writer.NODE)
        tools = Tools(link, payloads, Journal(self._home.journal))
        settings = NodeSettings(
            state_bytes=terms.state_bytes,
            max_clock_gap_steps=manifest.outer.max_clock_gap_steps,
            total_steps=manifest.run.total_steps,
            wait_for_peers=self._config.wait_for_peers,
            is_founder=self._invite is None,
        )
        node = Node(membership, world, tools, settings, self._child.emit)
        self._fill_book(node)
        self._doorman.terms = terms
        self._doorman.manifest, self._doorman.node = signed.to_bytes(), node
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(link.run(node.on_notice)), tasks.create_task(self._save_book(node))]
            await node.run()
            for task in background:
                task.cancel()

    # ------------------------------------------------------------------ finding the run

    def _read_manifest(self) -> SignedManifest:
        return SignedManifest.from_bytes(self._home.manifest.read_bytes())

    def _bootstraps(self) -> tuple[str, ...]:
        """Return the ways into the swarm: the invite's, and the good peers of the last session."""
        return ways_in(self._home, self._identity.peer_id, self._invite)

    async def _fetch_manifest(self, network: Libp2pNode) -> SignedManifest:
        assert self._invite is not None
        credential = self._invite.credential_for(self._identity.peer_id)
        asker = FetchClient(self._identity, self._invite.run_id, credential, network)
        signed = await find_manifest(asker, self._invite.bootstraps, lambda reason: self._child.emit(ProcessSays("joining", reason)))
        store_manifest(self._home, signed)
        return signed

    # ------------------------------------------------------------------ the rest

    def _fill_book(self, node: Node) -> None:
        now_s = loop_s()
        for address in self._invite.bootstraps if self._invite else ():
            node.book.hint(_peer_of(address), address, now_s)
        node.book.load(self._home.peers, now_s)

    async def _save_book(self, node: Node) -> None:
        while True:
            await asyncio.sleep(SAVE_BOOK_S)
            with contextlib.suppress(OSError):  # a full disk; the book is written again soon
                node.book.save(self._home.peers, loop_s())

    async def _until_stopped(self) -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, stopped.set)  # a line or the end of stdin: either asks us to stop
        await stopped.wait()
        asyncio.get_running_loop().remove_reader(0)


def _peer_of(address: str) -> PeerId:
    return PeerId.from_text(address.rsplit("/p2p/", 1)[1])
