"""A seed: a node of a run's directory that trains nothing, so that newcomers find somebody at an address that stays.

It holds records of the run's members and gives the manifest to newcomers; the weights they get from a member. Asked to meet, it refuses.
Unlike a peer it is one process, with hivemind in it: there is no training here to protect.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer.link import records as ask
from peer.link.payload_folder import PayloadFolder
from peer.link.socket import LinkLost
from peer.machine import control_socket as control
from peer.machine.atomic_file import write_whole
from peer.machine.config import PeerConfig
from peer.machine.events import AddressesChanged, Event, PeersSeen, PeerStarted, RunKnown, StateChanged
from peer.machine.home import Home
from peer.machine.runtime_folder import runtime_folder
from peer.machine.signals import ASKED, asked_to_leave
from peer.machine.status import Status, apply
from peer.node.donor import FetchServer
from peer.node.fetching import FetchClient, find_manifest, store_manifest
from peer.node.meetings import say
from peer.swarm.address_book import AddressBook, RecordIntake, held_invite, loop_s, ways_in
from protocol.errors import BadSettings, RefusalCode, Refused, Unreachable
from protocol.identity import Identity
from protocol.libp2p.node import Libp2pNode
from protocol.libp2p.p2pd import DaemonSettings
from protocol.libp2p.record_store import RecordShelf
from protocol.messages.messages import Refusal
from protocol.messages.records import MemberRecord
from protocol.messages.terms import RunTerms, check_member
from protocol.run.invite import Invite
from protocol.run.manifest import SignedManifest
from protocol.streams.transport import Purpose, Stream, Transport

LOOK_S = 1.0

Watch = Callable[[Status], None]


class NoTrainer:
    """The link to a trainer that does not exist."""

    async def request(self, request: ask.AnsweredRequest) -> ask.Reply:
        """Raise LinkLost."""
        raise LinkLost

    def tell(self, request: ask.ToldRequest) -> None:
        """Do nothing: nobody is there."""


class Seed:
    """What a seed answers. Before it knows the manifest it asks others to come back later."""

    def __init__(self, identity: Identity, payloads: PayloadFolder) -> None:
        self._identity = identity
        self._payloads = payloads
        self._donor: FetchServer | None = None

    def learn(self, signed: SignedManifest) -> RunTerms:
        """Serve this manifest, and only its members, from now on; return its terms."""
        terms = RunTerms.from_manifest(signed.manifest())  # of the sizes it needs none
        self._donor = FetchServer(self._identity, terms, signed.to_bytes(), NoTrainer(), self._payloads, time.time, lambda: None)
        return terms

    def is_member(self, record: MemberRecord) -> bool:
        """Say whether the directory should hold a record."""
        if self._donor is None:
            return True
        try:
            check_member(record.peer_id, record.credential, self._donor.terms, time.time())
        except Refused:
            return False
        return True

    async def answer(self, purpose: Purpose, stream: Stream) -> None:
        """Serve an inbound stream and close it."""
        if purpose is Purpose.FETCH and self._donor is not None:
            await self._donor.answer(stream)
            return
        await say(stream, Refusal(RefusalCode.NOT_READY, "I show newcomers the way; I do not train"))
        await stream.close()


async def run_seed(config: PeerConfig, invite: Invite | None, watch: Watch) -> Status:
    """Take part in the directory of a run until asked to leave, by `peer leave`, a signal or Ctrl-C.

    The run is the invite's; without one, it goes on with what the home folder holds. `watch` is called with the live status about once a
    second. Raises GossamerError; KeyboardInterrupt after Ctrl-C.
    """
    home = Home(config.home)
    home.create()
    with home.locked(), runtime_folder(0) as runtime:
        identity = Identity.load_or_create(home.identity)
        if invite is not None:
            write_whole(home.invite, invite.to_text().encode() + b"\n", private=True)  # it is a secret
        session = _Session(config, home, identity, watch)
        async with control.serving(home, runtime, session.answer):
            with asked_to_leave(session.on_signal):
                await session.run(runtime)
        if session.interrupted:
            raise KeyboardInterrupt
        return session.status


class _Session:
    """One run of a seed, from start to leave."""

    def __init__(self, config: PeerConfig, home: Home, identity: Identity, watch: Watch) -> None:
        self.status = apply(Status(), PeerStarted(str(identity.peer_id)))
        self.interrupted = False  # by Ctrl-C
        self._config = config
        self._home = home
        self._identity = identity
        self._invite = held_invite(home)
        self._book = AddressBook(identity.peer_id)
        self._watch = watch
        self._leaving = asyncio.Event()
        self._leave_reason = ""

    async def run(self, runtime: Path) -> None:
        """Serve until asked to leave."""
        seed = Seed(self._identity, PayloadFolder(runtime / "payloads"))
        shelf = RecordShelf(self._invite.run_id if self._invite else self._held().run_id, seed.is_member)
        settings = DaemonSettings(
            self._home.identity, runtime / "net", self._config.listen_host, self._config.listen_port, self._config.announce
        )
        async with Libp2pNode(settings, shelf, seed.answer, self._ways_in) as network:
            leaving = asyncio.create_task(self._leaving.wait())
            work = asyncio.create_task(self._serve(network, seed, shelf))
            try:
                await asyncio.wait([leaving, work], return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()  # raises why it could not go on
            finally:
                leaving.cancel()
                work.cancel()
                await asyncio.gather(leaving, work, return_exceptions=True)
        self._enter("left", self._leave_reason)

    async def _serve(self, network: Libp2pNode, seed: Seed, shelf: RecordShelf) -> None:
        signed = await self._manifest(network)
        intake = RecordIntake(seed.learn(signed), self._book, time.time)
        self._book.load(self._home.peers, loop_s())
        self._note(RunKnown(signed.run_id.hex(), signed.manifest().run.total_steps))
        while True:
            connected = await _num_connected(network)
            self._note(PeersSeen(connected))
            self._note(AddressesChanged(network.addresses))
            self._enter("seeding", f"{connected} connected")
            self._remember(shelf, intake)
            await asyncio.sleep(LOOK_S)

    def _remember(self, shelf: RecordShelf, intake: RecordIntake) -> None:
        """Keep who has announced itself, so that the next start finds a way in when those of the invite are gone."""
        news = [record for record in shelf.records() if self._book.is_news(record)]
        for record in news:
            intake.take(record)
        if news:
            with contextlib.suppress(OSError):  # a full disk; the book is written again soon
                self._book.save(self._home.peers, loop_s())

    def _ways_in(self) -> tuple[str, ...]:
        return ways_in(self._home, self._identity.peer_id, self._invite)

    async def _manifest(self, transport: Transport) -> SignedManifest:
        invite = self._invite
        if self._home.manifest.exists() or invite is None:
            return self._held()
        credential = invite.credential_for(self._identity.peer_id)
        asker = FetchClient(self._identity, invite.run_id, credential, transport)
        signed = await find_manifest(asker, invite.bootstraps, lambda reason: self._enter("joining", reason))
        store_manifest(self._home, signed)
        return signed

    def _held(self) -> SignedManifest:
        if not self._home.manifest.exists():
            raise BadSettings(f"{self._home.path} holds no run to be a seed of", hint="give an invite: peer bootstrap gossamer1...")
        return SignedManifest.from_bytes(self._home.manifest.read_bytes())

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the control socket."""
        match request.get("verb"):
            case "status":
                return self.status.to_json()
            case "leave":
                self._leave("asked to leave")
                return {"leaving": True}
            case verb:
                return {"error": f"a seed knows no verb {verb!r}"}

    def on_signal(self, number: signal.Signals) -> None:
        """Leave on the first one; Ctrl-C is remembered."""
        self.interrupted |= number == signal.SIGINT
        self._leave(ASKED[number])

    def _leave(self, reason: str) -> None:
        self._leave_reason = self._leave_reason or reason
        self._leaving.set()

    def _note(self, event: Event) -> None:
        self.status = apply(self.status, event)

    def _enter(self, state: str, reason: str) -> None:
        self._note(StateChanged(state, reason))
        try:
            self._watch(self.status)
        except OSError:  # the terminal or pipe that we draw on was closed: no reason to stop
            self._watch = lambda _: None


async def _num_connected(network: Libp2pNode) -> int:
    try:
        return len(await network.connected())
    except Unreachable:  # p2pd is restarting
        return 0
