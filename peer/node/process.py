"""The node process. The supervisor starts it as `python -m gossamer.peer.node`; it holds no tensor.

It finds the run (from the home folder, or the manifest from a peer that the invite names), is there for others, and, once the trainer has
said what the model is, meets them until the supervisor says stop. A peer without a trainer stays a part of the directory that gives the
manifest to newcomers. If p2pd dies, `Libp2pNode` rebuilds the network below us; if this process dies, the trainer trains on and the
supervisor starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import replace

from gossamer.peer.link import records as ask
from gossamer.peer.link.payload_folder import PayloadFolder
from gossamer.peer.link.records import Writer
from gossamer.peer.link.socket import NodeEnd
from gossamer.peer.machine.child import Child, ChildSettings
from gossamer.peer.machine.energy import cpu_s
from gossamer.peer.machine.events import RESTING, ConnectionsChanged, NodeSpent, ProcessSays, RunKnown, TrafficCounted
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.units import UNLIMITED, rate_bytes_per_s
from gossamer.peer.meeting.driver import OwnSide
from gossamer.peer.meeting.journal import Journal
from gossamer.peer.meeting.line import Line, Way
from gossamer.peer.node.arrival import find_run
from gossamer.peer.node.donor import FetchServer
from gossamer.peer.node.door import Door
from gossamer.peer.node.fetching import FetchClient
from gossamer.peer.node.mirror import Mirror
from gossamer.peer.node.node import Node
from gossamer.peer.node.traffic import NodeTraffic
from gossamer.peer.node.upkeep import Upkeep
from gossamer.peer.node.vouching import Vouching, latest_credential
from gossamer.peer.swarm.address_book import AddressBook, loop_s
from gossamer.peer.swarm.hearsay import Hearsay
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.sight import Sight
from gossamer.peer.swarm.standing import Standing
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.addresses import by_peer, read_address
from gossamer.protocol.errors import BadSettings, Unreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.libp2p.node import Libp2pNode
from gossamer.protocol.libp2p.p2pd import DaemonSettings
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.run.invite import Credential, Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.streams.throttle import Throttle
from gossamer.protocol.tasks import cancel, work_until

SAVE_WAYS_S = 2.0  # a peer that is killed early must still find its way back
LOOK_S = 1.0  # between two looks at who has announced itself, where nobody trains
LEAVE_S = 3.0
TELL_LINE_S = 2.0


class NodeProcess:
    """Everything between the supervisor's pipes and the network. `stopped` is the supervisor's word that it is over."""

    def __init__(self, child: Child, stopped: asyncio.Event) -> None:
        self._child = child
        self._stopped = stopped
        self._config = child.settings.config
        self._home = Home(self._config.home)
        self._identity = Identity.load_or_create(self._home.identity)
        self._invite = Invite.from_text(self._home.invite.read_text()) if self._home.invite.exists() else None
        self._held = SignedManifest.from_bytes(self._home.manifest.read_bytes()) if self._home.manifest.exists() else None
        self._credential = self._latest_credential()
        self._book = AddressBook(self._identity.peer_id)
        self._time = SwarmTime()
        self._named: list[bytes] = []  # records of members, from who let us in
        self._standing = Standing()
        self._told_to_rest = asyncio.Event()
        self._throttle = Throttle()
        self._line = Line()
        self._node: Node | None = None
        self._door = Door(self._book, "still joining" if self._config.trains else "I show newcomers the way; I do not train")

    def _latest_credential(self) -> Credential | None:
        me, run = self._identity.peer_id, self._invite or self._held
        from_invite = self._invite.credential_for(me) if self._invite else None
        return latest_credential(self._home, from_invite, run.run_id, me) if run else None

    def take_settings(self, settings: ChildSettings) -> None:
        """Take over settings that have changed."""
        rates = {Way.UP: settings.config.max_upload, Way.DOWN: settings.config.max_download}
        self._line.limits = {way: rate_bytes_per_s(text) for way, text in rates.items()}
        self._throttle.up.bytes_per_s, self._throttle.down.bytes_per_s = (self._line.limits[way] for way in (Way.UP, Way.DOWN))
        if settings.resting:
            self._standing.rest()
            self._told_to_rest.set()
        else:
            self._standing.wake()

    async def run(self) -> None:
        """Run until the supervisor says stop. Raises GossamerError when the run cannot be found or does not want us."""
        self.take_settings(self._child.settings)
        resting = asyncio.create_task(self._tell_rest())
        try:
            await self._find_run()
        finally:
            await cancel(resting)

    async def _tell_rest(self) -> None:
        """Whenever we are told to rest, say when the last meeting has ended: the trainer may go then."""
        while True:
            await self._told_to_rest.wait()
            self._told_to_rest.clear()
            if self._node is not None:
                await self._node.meetings.until_quiet()
            self._child.emit(ProcessSays(RESTING, ""))

    async def _find_run(self) -> None:
        self._fill_book()
        run = self._invite or self._held
        if run is None:
            raise BadSettings(f"{self._home.path} holds no run", hint="give an invite")
        shelf = RecordStore(run.run_id, self._door.is_member, self._time.now_s)
        answer = self._throttle.handler(self._door.answer)
        async with Libp2pNode(self._daemon_settings(), shelf, answer, self._ways_in, self._door.is_banned) as network:
            counting = asyncio.create_task(self._tell_traffic(network))
            try:
                signed = self._held or await work_until(self._arrive(network), self._stopped.wait())
                if signed is not None:
                    await self._take_part(network, shelf, signed)
            finally:
                await cancel(counting)

    async def _tell_traffic(self, network: Libp2pNode) -> None:
        """Tell the supervisor what passes, and have the streams pay for what passes beside them."""
        traffic, told = NodeTraffic(network), (0, 0)
        while True:
            traffic.look()
            for bucket, passed in ((self._throttle.up, traffic.sent), (self._throttle.down, traffic.received)):
                bucket.count(max(0, passed - bucket.num_bytes))
            if (traffic.sent, traffic.received) != told:
                told = traffic.sent, traffic.received
                self._child.emit(TrafficCounted(*told))
            await asyncio.sleep(TELL_LINE_S)

    def _daemon_settings(self) -> DaemonSettings:
        settings = DaemonSettings(
            identity_file=self._home.identity,
            folder=self._child.settings.runtime / "net",
            host=self._config.listen,
            port=self._config.port,
            announce=self._config.announce,
        )
        if settings.is_local:  # nobody needs a relay, nor us as one
            return settings
        shows_the_way = self._invite is None or not self._config.trains
        is_limited = (self._config.max_upload, self._config.max_download) != (UNLIMITED, UNLIMITED)  # what is relayed passes no throttle
        relays = shows_the_way and not is_limited if self._config.relay is None else self._config.relay
        return replace(settings, relays=relays, through=self._relays_of_last_time())

    async def _take_part(self, network: Libp2pNode, shelf: RecordStore, signed: SignedManifest) -> None:
        manifest = signed.manifest()
        self._child.emit(RunKnown(signed.run_id.hex(), manifest.run.total_steps))
        membership = Membership.of(self._identity, manifest, self._credential)
        terms = membership.terms
        hearsay = Hearsay(terms, self._book, self._time, random.SystemRandom())
        hearsay.take_all(self._named)
        server = FetchServer(self._identity, terms, signed.to_bytes(), self._time.now_s, Mirror(time.time), hearsay)
        self._door.open(server)
        network.bare_record = lambda: membership.bare_record(network.addresses, self._time.now_s())
        doors = self._invite.bootstraps if self._invite else ()
        client = self._client(network, signed.run_id)
        client.versions = (terms.protocol_version,)
        upkeep = Upkeep(client, hearsay, doors, network.connected, random.SystemRandom())
        vouching = Vouching(self._home, terms, [membership], client, self._book, random.Random(), self._child.emit, self._time.now_s)
        vouching.read_file()
        async with asyncio.TaskGroup() as tasks:
            aside = [tasks.create_task(work) for work in (self._save_ways(network), upkeep.run(), vouching.run())]
            if self._config.trains:
                await self._meet(network, manifest, membership, hearsay, server, vouching)
            else:
                await work_until(self._show_the_way(network, shelf, hearsay), self._stopped.wait())
            for task in aside:
                task.cancel()

    # ------------------------------------------------------------------ with a trainer

    async def _meet(
        self, network: Libp2pNode, manifest: Manifest, membership: Membership, hearsay: Hearsay, server: FetchServer, vouching: Vouching
    ) -> None:
        """Be there for others; meet them as soon as the trainer has said what the model is."""
        standing, emit, enough = self._standing, self._child.emit, self._config.wait_for_peers
        presence = Presence(membership, network, lambda: network.addresses, hearsay, standing, emit, enough)
        payloads = PayloadFolder(self._child.settings.runtime / "payloads")
        payloads.clear(Writer.NODE)
        link = NodeEnd(self._child.settings.runtime)
        async with asyncio.TaskGroup() as tasks:
            present = tasks.create_task(presence.run())
            try:
                plan = await work_until(link.connect(), self._stopped.wait())
                if plan is not None:
                    own = OwnSide(link, payloads, Journal(self._home.journal), self._line)
                    membership.terms = membership.terms.with_plan(plan)
                    limited = self._throttle.over(network)
                    node = self._node = Node(
                        membership, standing, presence, hearsay, limited, own, self._home.downloads, random.SystemRandom(), emit,
                        is_founder=self._invite is None,
                        has_start=manifest.model.weights is None or self._child.settings.config.model is not None,
                        wait_for_peers=enough,
                    )  # fmt: skip
                    vouching.shown_by.append(node.client)
                    self._door.open(replace(server, terms=membership.terms, donor=node.donor), node.meetings)
                    await self._run_node(node, network, own)
            finally:
                present.cancel()
                await presence.leave()

    async def _run_node(self, node: Node, network: Libp2pNode, own: OwnSide) -> None:
        """Run the node to the end of the run, or until the supervisor says stop; then end its meetings."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in (node.run(), self._stopped.wait())]
            aside = [tasks.create_task(work) for work in (own.link.run(node.on_notice), self._tell_line(network, own))]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await node.meetings.leave(LEAVE_S)
                for task in (*running, *aside):
                    task.cancel()

    async def _tell_line(self, network: Libp2pNode, own: OwnSide) -> None:
        """Tell the trainer, again and again, what the line carries and what we cost: it finds out how often to meet."""
        start_s = time.process_time() + cpu_s(network.daemon_pid)
        told: dict[str, str] = {}
        while True:
            told = await self._tell_connections(network, told)
            used_s = time.process_time() + cpu_s(network.daemon_pid)
            own.link.tell(ask.NodeReport(own.line.slower_bytes_per_s, used_s))
            self._child.emit(NodeSpent(max(0.0, used_s - start_s)))
            await asyncio.sleep(TELL_LINE_S)

    async def _tell_connections(self, network: Libp2pNode, told: dict[str, str]) -> dict[str, str]:
        """Tell the supervisor to whom connections are open and how they run, if that has changed; return what it knows now."""
        try:
            routes: dict[str, str] = {str(partner): route for partner, route in (await network.routes()).items()}
        except Unreachable:  # p2pd is restarting
            routes = {}
        if routes != told:
            self._child.emit(ConnectionsChanged(routes))
        return routes

    # ------------------------------------------------------------------ without one

    async def _show_the_way(self, network: Libp2pNode, shelf: RecordStore, hearsay: Hearsay) -> None:
        """Be part of the directory, and remember who has announced itself: the next start shall find a way in."""
        sight = Sight(self._child.emit, hearsay)
        told: dict[str, str] = {}
        while True:
            told = await self._tell_connections(network, told)
            sight.tell(len(told), network.addresses)
            self._child.emit(ProcessSays("seeding", f"{len(told)} connected"))
            for record in shelf.records():
                hearsay.take(record)
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------------ finding the run, and the way back

    async def _arrive(self, network: Libp2pNode) -> SignedManifest:
        """Get the manifest, and know some members."""
        assert self._invite is not None
        client = self._client(network, self._invite.run_id)
        signed, self._named = await find_run(client, self._ways_in(), self._time, self._say_joining)
        write_whole(self._home.manifest, signed.to_bytes(), private=True)
        return signed

    def _say_joining(self, reason: str) -> None:
        self._child.emit(ProcessSays("joining", reason))

    def _client(self, network: Libp2pNode, run_id: bytes) -> FetchClient:
        return FetchClient(self._identity, run_id, self._credential, self._throttle.over(network))

    def _fill_book(self) -> None:
        for peer, addresses in by_peer(self._invite.bootstraps if self._invite else ()).items():
            for address in addresses:
                self._book.hint(peer, address, loop_s())
        self._book.load(self._home.peers, loop_s())

    def _ways_in(self) -> tuple[str, ...]:
        """Return the ways into the swarm: the invite's, and the good peers of the last session."""
        return tuple(dict.fromkeys((*(self._invite.bootstraps if self._invite else ()), *self._book.ways_in(loop_s()))))

    def _relays_of_last_time(self) -> tuple[str, ...]:
        with contextlib.suppress(OSError, ValueError):
            lines = self._home.relays.read_text().split()
            return tuple(line for line in lines if read_address(line) is not None)
        return ()

    async def _save_ways(self, network: Libp2pNode) -> None:
        through: tuple[str, ...] | None = None
        while True:
            await asyncio.sleep(SAVE_WAYS_S)
            with contextlib.suppress(OSError):  # a full disk; all is written again soon
                await asyncio.to_thread(write_whole, self._home.peers, self._book.to_bytes(loop_s()))
                if network.through != through:
                    through = network.through
                    write_whole(self._home.relays, "".join(f"{relay}\n" for relay in through).encode())


async def run_node(child: Child) -> None:
    """Run the node, with the settings that the supervisor says, until its pipe ends."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    process = NodeProcess(child, stopped)

    def hear() -> None:
        child.hear()
        process.take_settings(child.settings)
        if child.stop_requested():
            loop.remove_reader(0)  # an ended pipe stays readable: it would be told for ever
            stopped.set()

    loop.add_reader(0, hear)
    try:
        await process.run()
    finally:
        loop.remove_reader(0)
