"""The composition root of a node: the only place where the objects of one peer's node are made and connected, in three stages.

1. `NodePeer(...)`: the home and the settings are there. It answers inbound streams from now on, at first with "not ready".
2. `Member`: the run's manifest is there, from the home or from a peer. It gives the manifest to newcomers and gossips.
3. `Node`: the trainer has sent the model's plan. It meets other peers. A peer without a trainer (`peer bootstrap`) never gets there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from gossamer.peer.machine.events import Event, ProcessReported, RunKnown
from gossamer.peer.machine.held_manifest import held_manifest
from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.states import BUILDING
from gossamer.peer.meeting.driver import Caller, OwnSide
from gossamer.peer.node.anti_entropy import AntiEntropy
from gossamer.peer.node.arrival import find_run
from gossamer.peer.node.dispatcher import Answer, Dispatcher
from gossamer.peer.node.final_averaging import FinalAveraging
from gossamer.peer.node.meetings import Meetings
from gossamer.peer.node.membership_watch import MembershipWatch, latest_credential
from gossamer.peer.node.node import Node
from gossamer.peer.node.partner_file import PartnerFile
from gossamer.peer.node.partner_search import Searches
from gossamer.peer.node.run_curve import CurveReader, OwnCurve
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.issued_invites import IssuedInvites
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.membership import Membership, OwnCredential
from gossamer.peer.swarm.partner_records import PartnerRecords
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.presence import Presence, SwarmReporter
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync.client import FetchClient
from gossamer.peer.sync.fragment_sync import FragmentSync
from gossamer.peer.sync.result_agreement import ResultAgreement
from gossamer.peer.sync.server import FetchServer
from gossamer.peer.sync.sources import Sources
from gossamer.peer.sync.state_source import StateSource
from gossamer.peer.sync.state_sync import StateSync
from gossamer.peer.sync.state_transfer import StateTransfer
from gossamer.protocol.addresses import by_peer
from gossamer.protocol.errors import BadSettings, Refused, TransportError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import ModelPlan, check_member
from gossamer.protocol.run.invite import Credential, Invite
from gossamer.protocol.run.manifest import AnyManifest, SignedManifest
from gossamer.protocol.streams.throttle import Throttle
from gossamer.protocol.streams.transport import Directory, Purpose, Transport
from gossamer.protocol.tasks import loop_s, work_until

LOOK_S = 1.0  # between two reports, without a trainer
LEAVE_S = 3.0  # for meetings in progress to end when the peer stops
FAREWELL_S = 1.0  # for the last announcement


@dataclass(frozen=True, slots=True)
class HeldRun:
    """What a peer holds of its run when it starts. `bootstraps` are multiaddrs that end in a peer's id; a founder needs none."""

    run_id: bytes
    manifest: SignedManifest | None
    credential: Credential | None = None
    bootstraps: tuple[str, ...] = ()
    is_founder: bool = True

    @classmethod
    def in_home(cls, home: Home, me: PeerId) -> HeldRun:
        """Read it from a home folder. Raises BadSettings where that holds neither an invite nor a manifest."""
        invite = Invite.from_text(home.invite.read_text()) if home.invite.exists() else None
        manifest = held_manifest(home)
        run = invite or manifest
        if run is None:
            raise BadSettings(f"{home.path} holds no run", hint="give an invite")
        credential = latest_credential(home, invite.credential_for(me) if invite else None, run.run_id, me)
        return cls(run.run_id, manifest, credential, invite.bootstraps if invite else (), is_founder=invite is None)


@dataclass(frozen=True, slots=True)
class PeerNetwork:
    """The network as one peer uses it. `addresses` are its own, as others may dial them; `connected`: peers with an open connection."""

    transport: Transport
    directory: Directory
    addresses: Callable[[], tuple[str, ...]]
    connected: Callable[[], Awaitable[Collection[PeerId]]]


@dataclass(frozen=True, slots=True)
class Member:
    """What exists once the manifest is known. `presence` announces this peer; without a trainer there is none."""

    manifest: AnyManifest
    membership: Membership
    gossip: PeerExchange
    server: FetchServer
    sources: Sources  # its peers as sources of the run's documents and weights; asks as a holder of our stage, once it is known
    reporter: SwarmReporter
    presence: Presence | None
    anti_entropy: AntiEntropy
    watch: MembershipWatch
    curve: CurveReader


class NodePeer:
    """One peer's node, from its start to its end. Everything belongs to one event loop.

    Make it, then the network, then `run` it. The network hands every inbound stream to `answer`, and calls `is_banned`, `has_met`,
    `is_member`, `bare_record`, `bootstraps` and `acquaintances`. `trainer` is this peer's side of its meetings, None for a bootstrap
    node. `local_s` is the machine's clock, in Unix time. `has_weights`: the run's initial weights are here even if they do not follow from
    the manifest's seed.
    """

    def __init__(
        self,
        home: Home,
        run: HeldRun,
        identity: Identity,
        trainer: OwnSide | None,
        local_s: Callable[[], float],
        rng: random.Random,
        emit: Callable[[Event], None],
        *,
        wait_for_peers: int = 0,
        has_weights: bool = False,
    ) -> None:
        self._home, self._run, self._identity, self._trainer = home, run, identity, trainer
        self._rng, self._emit, self._wait_for_peers, self._has_weights = rng, emit, wait_for_peers, has_weights
        self.book = AddressBook(identity.peer_id, lambda peer: self.records.is_shunned(peer, self.time.local_s()))
        self.time = SwarmTime(local_s)
        self.lifecycle = Lifecycle()
        self.throttle = Throttle()
        self.record_store = RecordStore(run.run_id, self.is_member, self.time.now_s, rng)
        self._credential = OwnCredential(run.credential)
        dispatcher = Dispatcher(self.book, "still joining" if trainer else "bootstrap node: it does not train", self._handler_of)
        self.answer = self.throttle.limited_handler(dispatcher.answer)
        self._stopping = asyncio.Event()
        self._gone_by_s = 0.0  # once it is to stop; loop time
        self.member: Member | None = None
        self.node: Node | None = None
        for peer, addresses in by_peer(run.bootstraps).items():
            for address in addresses:
                self.book.add_address(peer, address, loop_s())
        self.book.load(home.peers, loop_s())
        self._away_s = 0.0 if self.book.saved_s is None else max(0.0, self.time.local_s() - self.book.saved_s)
        self.records = PartnerRecords(lambda peer: self.book.get(peer).seen_origins)
        self.partner_file = PartnerFile(home, self.records, emit)
        self.partner_file.load()

    def _handler_of(self, purpose: Purpose) -> Answer | None:
        if purpose is Purpose.MEET:
            return self.node.meetings.answer if self.node else None
        if purpose is Purpose.PASS:
            return self.node.carrying.answer if self.node and self.node.carrying else None
        return self.member.server.answer if self.member else None

    def _source(self) -> StateSource | None:
        return self.node.source if self.node else None

    def is_banned(self, partner: PeerId) -> bool:
        """Return whether a peer's streams are to be turned away."""
        return self.book.is_banned(partner, loop_s())

    def has_met(self, partner: PeerId) -> bool:
        """Return whether a meeting, or enough hops, with a peer have been completed: it is no stranger to admission."""
        return self.book.get(partner).is_partner

    def is_member(self, record: MemberRecord) -> bool:
        """Return whether a record is a member's; False before the manifest is known."""
        if self.member is None:
            return False
        with suppress(Refused):
            check_member(record.peer_id, record.credential, self.member.membership.terms, self.time.now_s())
            return True
        return False

    def bare_record(self, addresses: tuple[str, ...]) -> MemberRecord | None:
        """Sign a record that only shows that this peer is a member; None before the manifest is known."""
        return self.member.membership.bare_record(addresses, self.time.now_s()) if self.member else None

    def bootstraps(self) -> tuple[str, ...]:
        """Return the invite's bootstrap addresses."""
        return self._run.bootstraps

    def acquaintances(self) -> list[str]:
        """Return the addresses of good peers, also of the last session."""
        return self.book.entry_addresses(loop_s())

    def members_in_force(self) -> set[PeerId]:
        """Return the peers with a record in force."""
        if self.member is None:
            return set()
        return {entry.peer_id for entry in self.book.everybody(loop_s()) if self.member.gossip.is_in_force(entry.record)}

    def stop(self) -> None:
        """Have `run` end in order: no new meeting, LEAVE_S for those in progress, and farewells to the directory."""
        self._stopping.set()

    async def run(self, network: PeerNetwork) -> None:
        """Run until `stop`, or until the run is over and the trainer has saved its result. Cancelled, it ends at once, like a kill.

        Raises, in exception groups, what cannot be repaired here: SwarmUnreachable, RunRefusesUs, WrongVersion, or a bug.
        """
        limited = replace(network, transport=self.throttle.limited_transport(network.transport))
        (failure,) = await asyncio.gather(work_until(self._live(limited), self._until_stopped()), return_exceptions=True)
        if self.member is not None and self.member.presence is not None:
            await self.member.presence.leave(self._gone_by_s - loop_s() if self._gone_by_s else LEAVE_S + FAREWELL_S)
        if failure is not None:
            raise failure

    async def _until_stopped(self) -> None:
        await self._stopping.wait()
        self._gone_by_s = loop_s() + LEAVE_S + FAREWELL_S
        if self.node is None or self.member is None or self.member.presence is None:
            return
        async with asyncio.TaskGroup() as tasks:
            if not self.node.is_quiet:  # its end may take LEAVE_S, and show this peer to its partners once more
                tasks.create_task(self.member.presence.leave(LEAVE_S))
            tasks.create_task(self.node.leave(LEAVE_S))

    async def _live(self, network: PeerNetwork) -> None:
        signed, named = (self._run.manifest, []) if self._run.manifest else await self._arrive(network)
        manifest = signed.manifest()
        member = self.member = self._make_member(signed, manifest, network)
        member.gossip.take_all(named)
        member.watch.load_revocations()
        self._emit(RunKnown.of(manifest))
        self._emit(ProcessReported("joining", BUILDING))
        async with asyncio.TaskGroup() as tasks:
            work = [member.anti_entropy.run(), member.watch.run(), member.curve.run(), self._take_stored(member.gossip)]
            work += [member.presence.run()] if member.presence else []
            loops = [tasks.create_task(loop) for loop in work]
            if self._trainer is not None and member.presence is not None:
                await self._train(self._trainer, member, member.presence, network)
            else:
                await self._show_the_way(member, network)
            for loop in loops:
                loop.cancel()

    async def _arrive(self, network: PeerNetwork) -> tuple[SignedManifest, list[bytes]]:
        """Get the manifest and records of some members from a peer of the run; the manifest is kept in the home."""
        client = FetchClient(self._identity, self._run.run_id, self._credential, network.transport)
        entries = tuple(dict.fromkeys((*self.bootstraps(), *self.acquaintances())))
        signed, named = await find_run(client, entries, self.time, lambda reason: self._emit(ProcessReported("joining", reason)))
        write_whole(self._home.manifest, signed.to_bytes())
        return signed, named

    async def _train(self, own: OwnSide, member: Member, presence: Presence, network: PeerNetwork) -> None:
        """Wait for the trainer, then meet others until the run is over."""
        if member.manifest.num_stages > 1:
            from gossamer.peer.node.staging import StageChoice  # only staged runs load it

            groups, num_stages, is_founder = member.sources.groups, member.manifest.num_stages, self._run.is_founder
            choice = StageChoice(self._home, groups, presence, self.lifecycle, self._rng, num_stages, self._emit, is_founder)
            choice.show_held()
            own.link.choose_stage = choice.choose
        plan = await own.link.connect()
        node = self.node = self._make_node(own, plan, member, presence, network)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(own.link.run(node.on_report))]
            if node.carrying is not None:
                from gossamer.peer.node.staging import probe_line

                beside.append(tasks.create_task(probe_line(member.sources, own.line, node.carrying.pipeline)))
            await node.run()
            for task in beside:
                task.cancel()

    async def _take_stored(self, gossip: PeerExchange) -> None:
        """Note farewells that are stored here: they are over before the next look-up.

        A peer without a trainer looks nobody up, and remembers all members that store their records here, for its next start.
        """
        while True:
            for record in self.record_store.records():
                if self._trainer is None or not gossip.is_in_force(record):
                    gossip.take(record)
            await self.record_store.changes.wait()

    async def _show_the_way(self, member: Member, network: PeerNetwork) -> None:
        """Be part of the directory."""
        num_connected = 0
        while True:
            with suppress(TransportError):  # the network below is restarting
                num_connected = len(await network.connected())
            member.reporter.report(num_connected, network.addresses())
            self._emit(ProcessReported("serving", f"{num_connected} connected"))
            await asyncio.sleep(LOOK_S)

    def _make_member(self, signed: SignedManifest, manifest: AnyManifest, network: PeerNetwork) -> Member:
        membership = Membership.of(self._identity, manifest, self._credential, self._home.read_generation())
        terms = membership.terms
        gossip = PeerExchange(terms, self.book, self.time, self._rng)
        client = FetchClient(self._identity, terms.run_id, self._credential, network.transport)
        bootstraps = {peer: addresses for peer, addresses in by_peer(self._run.bootstraps).items() if peer != self._identity.peer_id}
        issued = IssuedInvites(self._home)
        curve = OwnCurve(self._home).to_bytes
        server = FetchServer(self._identity, terms, signed.to_bytes(), self.time.now_s, gossip, self._source, issued.admit, curve)
        sources = Sources(client, SybilGroups(self.book, terms), self._rng)
        reporter = SwarmReporter(self._emit, gossip)
        presence = Presence(membership, network.directory, network.addresses, gossip, self.lifecycle, reporter, self._wait_for_peers)
        return Member(
            manifest,
            membership,
            gossip,
            server,
            sources,
            reporter,
            presence if self._trainer else None,
            AntiEntropy(client, gossip, bootstraps, network.connected, self._rng),
            MembershipWatch(self._home, membership, client, gossip, issued, self._rng, self._emit),
            CurveReader.of(sources, self._identity.peer_id, self._emit, self.lifecycle),
        )

    def _make_node(self, own: OwnSide, plan: ModelPlan, member: Member, presence: Presence, network: PeerNetwork) -> Node:
        membership, gossip, sources = member.membership.with_plan(plan), member.gossip, member.sources
        terms, lifecycle, link, downloads = membership.terms, self.lifecycle, own.link, self._home.downloads
        rng, emit = self._rng, self._emit
        carrying = ward = None
        if plan.stage is not None:
            from gossamer.peer.node.staging import make_staged_parts  # only staged runs load it

            self.book.stage = sources.client.stage = terms.own_stage
            lifecycle.hold(terms.own_stage)
            carrying, ward = make_staged_parts(
                self._home, own, membership, lifecycle, gossip, network.transport, sources, rng, emit,
                lambda *since: source.gave_weights(*since),
            )  # fmt: skip
        caller = Caller(network.transport, self.book, terms.run_id)
        meetings = Meetings(
            membership, lifecycle, caller, gossip, own, rng, lambda *ended: node.on_meeting_done(*ended), self.records, emit
        )
        searches = Searches(membership, meetings, link, rng)
        source = StateSource(link, own.payloads, lifecycle, terms, meetings.until_quiet)
        transfer = StateTransfer(sources, terms, lifecycle, meetings, link, downloads / "state", emit)
        fragments = FragmentSync(sources, terms, lifecycle, link, own.payloads, emit)
        agreement = ResultAgreement(sources, terms, lifecycle, meetings, source, link, own.payloads, downloads / "result", emit)
        state_sync = StateSync(
            membership, lifecycle, presence, sources.groups, transfer, fragments, agreement, link, emit,
            is_founder=self._run.is_founder,
            has_start=self._has_weights or member.manifest.has_start(is_founder=self._run.is_founder),
            wait_for_peers=self._wait_for_peers,
            away_s=self._away_s,
            apart_s=carrying.apart_s if carrying else lambda: 0.0,
            copy=ward.own_file if ward else None,
            move_back=ward.move_back if ward else lambda reason: None,
            may_move_back=lambda: ward is not None and ward.may_move_back,
        )  # fmt: skip
        averaging = FinalAveraging(searches, meetings, self.book, agreement, len(terms.fragments), membership.total_steps)
        node = Node(meetings, searches, source, state_sync, averaging, lifecycle, link, emit, carrying, ward)
        return node
