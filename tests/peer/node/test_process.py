"""The node process from start to stop, over a network that is not there: what it says, what it keeps in its home, and what it opens when.

With a real network and a real trainer: tests/e2e.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from gossamer.peer.link import messages
from gossamer.peer.link.socket import TrainerEnd
from gossamer.peer.machine.child import ChildSettings
from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import AddressesChanged, Event, PeersSeen, ProcessReported, RunKnown
from gossamer.peer.machine.home import Home
from gossamer.peer.node import peer as root
from gossamer.peer.node import process as module
from gossamer.peer.node import reports
from gossamer.peer.node.process import NodeProcess
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.errors import BadSettings, Unreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.libp2p.p2pd import DaemonSettings
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.libp2p.splice import CarriedBytes
from gossamer.protocol.messages.messages import Refusal, RunPhase
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from gossamer.protocol.streams.transport import Purpose
from tests.peer.deaf import Deaf
from tests.peer.waiting import eventually

pytestmark = pytest.mark.real_time

HOST, MEMBER = Identity(b"h" * 32), Identity(b"m" * 32)
SIGNED = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST)
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{HOST.peer_id}"
INVITE = Invite.issue(HOST, SIGNED.run_id, (ADDRESS,), None, int(time.time()) + 86400)
PLAN = ModelPlan(16, (FragmentTerms(0, 1000, 0),), 800)


class Quiet:
    """A network on which nobody answers."""

    addresses: tuple[str, ...] = ("/ip4/192.0.2.9/tcp/1",)
    daemon_pid = 0
    through: tuple[str, ...] = ()

    def __init__(
        self,
        settings: DaemonSettings,
        record_store: RecordStore,
        answer: Callable[..., Awaitable[None]],
        bootstraps: Callable[[], Sequence[str]],
        is_banned: object,
        has_met: object,
        bare_record: object,
        acquaintances: Callable[[], Sequence[str]],
        last_port: int,
    ) -> None:
        self.carried = CarriedBytes()
        self.settings, self.record_store, self.answer = settings, record_store, answer
        self.entry_addresses = lambda: tuple(dict.fromkeys((*bootstraps(), *acquaintances())))
        self.announced: list[MemberRecord] = []
        self.num_looks = self.num_routes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def connected(self) -> dict[object, str]:
        return {}

    async def routes(self) -> dict[object, str]:
        self.num_routes += 1
        return {}

    async def connect(self, *_: object) -> object:
        raise Unreachable("nobody is here")

    async def announce(self, record: MemberRecord) -> None:
        self.announced.append(record)

    async def members(self) -> list[MemberRecord]:
        self.num_looks += 1
        return []


@dataclass
class Supervision:
    """The supervisor's side."""

    settings: ChildSettings
    events: list[Event] = field(default_factory=list)
    to_come: ChildSettings | None = None  # the next thing that the pipe holds, with its end

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def stop_requested(self) -> bool:
        self.settings = self.to_come or self.settings
        return self.to_come is not None


class Running:
    """A node process that runs in a task."""

    def __init__(self, home: Home, runtime: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.networks: list[Quiet] = []
        monkeypatch.setattr(module, "Libp2pNode", self._network)
        settings = ChildSettings(config=PeerConfig(home=home.path, **config), peer_id="", runtime=runtime, waits_for_start=False)
        self.child = Supervision(settings)
        self.process = NodeProcess(self.child)
        self.task = asyncio.create_task(self.process.run())

    def _network(self, *arguments: Any) -> Quiet:
        self.networks.append(Quiet(*arguments))
        return self.networks[-1]

    def emitted(self, kind: type) -> list[Any]:
        return [event for event in self.child.events if isinstance(event, kind)]

    def states(self) -> set[str]:
        return {event.state for event in self.emitted(ProcessReported)}

    async def until(self, state: str) -> Quiet:
        await self.true(lambda: state in self.states(), state)
        return self.networks[0]

    async def true(self, condition: Callable[[], object], what: str) -> None:
        await eventually(lambda: self.task.done() or condition(), what)
        if self.task.done():
            self.task.result()

    async def looked(self) -> Quiet:
        await self.true(lambda: self.networks and self.networks[0].num_looks, "a look around")
        return self.networks[0]

    async def stop(self) -> None:
        self.process.stop()
        async with asyncio.timeout(20):
            await self.task


Start = Callable[..., Running]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.create()
    return made


@pytest.fixture
def start(home: Home, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(root, "LOOK_S", 0.01)
    monkeypatch.setattr(reports, "SAVE_S", 0.01)
    return lambda **config: Running(home, folder, monkeypatch, **config)


def member() -> MemberRecord:
    expires_s, credential = int(time.time()) + 60, INVITE.credential_for(MEMBER.peer_id)
    return MemberRecord(SIGNED.run_id, MEMBER.peer_id, ("/ip4/192.0.2.7/tcp/4001",), 0, False, 1, expires_s, credential).signed(MEMBER)


async def answer_to_a_caller(network: Quiet) -> Refusal:
    """What is said to who asks for a meeting without a word."""
    refusals: list[Refusal] = []

    class Caller(Deaf):
        async def send(self, message: Any) -> None:
            refusals.append(message)

    async with asyncio.timeout(5.0):
        await network.answer(Purpose.MEET, Caller(MEMBER.peer_id))
    return refusals[0]


async def test_a_bootstrap_node_serves_the_manifest_and_keeps_announced_members(home: Home, start: Start) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())
    home.invite.write_text(INVITE.to_text())
    running = start(trains=False)
    network = await running.until("serving")
    assert running.emitted(ProcessReported)[-1].reason == "0 connected"
    assert running.emitted(RunKnown) == [RunKnown.of(SIGNED.manifest())]
    assert running.emitted(PeersSeen) == [PeersSeen(0)] and running.emitted(AddressesChanged) == [AddressesChanged(Quiet.addresses)]
    assert "does not train" in (await answer_to_a_caller(network)).detail
    assert network.record_store.keep_latest(member().to_bytes())
    await eventually(lambda: home.peers.exists() and str(MEMBER.peer_id) in home.peers.read_text(), "the address book")
    await running.stop()
    assert not network.announced, "it is nobody's partner"
    home.invite.unlink()
    running = start(trains=False)
    network = await running.until("serving")
    assert network.record_store.keep_latest(member().to_bytes()), "its record store is of the run that it holds"
    assert set(network.entry_addresses()) == {ADDRESS, f"/ip4/192.0.2.7/tcp/4001/p2p/{MEMBER.peer_id}"}
    await running.stop()


async def test_failures_are_forgotten_once_p2pd_was_replaced(home: Home, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())
    forgotten: list[AddressBook] = []
    monkeypatch.setattr(AddressBook, "forget_failures", lambda book: forgotten.append(book))
    monkeypatch.setattr(reports, "REPORT_S", 0.01)
    running = start(trains=False)
    network = await running.until("serving")
    for daemon_pid, times in ((7, 0), (0, 0), (8, 1), (8, 1), (0, 1), (9, 2)):
        network.daemon_pid, num_looks = daemon_pid, network.num_routes
        await running.true(lambda: network.num_routes >= num_looks + 3, "two whole looks")  # noqa: B023 (awaited here)
        assert len(forgotten) == times, daemon_pid
    await running.stop()


@pytest.mark.parametrize("trains", [True, False])
async def test_one_that_was_ended_before_it_had_the_manifest_goes_on_looking_for_it(home: Home, start: Start, trains: bool) -> None:
    home.invite.write_text(INVITE.to_text())

    for _ in range(2):
        running = start(trains=trains)
        network = await running.until("joining")
        assert network.entry_addresses() == (ADDRESS,)
        await running.stop()


async def test_without_a_run_it_does_not_start(start: Start) -> None:
    with pytest.raises(BadSettings, match="holds no run"):
        start()


async def test_the_node_starts_before_the_trainer_and_meets_once_it_has_the_plan(home: Home, folder: Path, start: Start) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())
    running = start()
    network = await running.looked()
    assert (await answer_to_a_caller(network)).detail == "still joining"
    assert not network.announced, "nobody could meet it yet"
    trainer, asked = TrainerEnd(folder), list[messages.Request]()
    await running.true(lambda: trainer.poll() or trainer.session, "the node at the link")
    trainer.send(messages.Built(PLAN), trainer.session)
    trainer.send(messages.Progress(0, RunPhase.TRAIN, False), trainer.session)
    await running.true(lambda: asked.extend(trainer.poll()) or messages.Start() in asked, "the word to begin")
    await running.true(lambda: network.announced, "announcement")
    num_announced = len(network.announced)
    await running.stop()
    assert len(network.announced) == num_announced + 1 and network.announced[-1].expires_s < time.time() + 5, "it says goodbye"
    trainer.close()


async def test_it_stops_while_it_waits_for_the_trainer(home: Home, start: Start) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())
    running = start()
    await running.looked()
    await running.stop()


async def test_no_settings_are_read_without_being_applied(home: Home, start: Start) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())
    running = start()
    assert not running.process.read_settings()
    running.child.to_come = running.child.settings.model_copy(update={"paused": True})
    assert running.process.read_settings()
    await running.until("quiet")
    await running.stop()


async def test_relays_that_could_not_be_kept_are_kept_as_soon_as_they_can(home: Home, start: Start) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())
    beside = home.relays.with_name(".relays.new")
    beside.mkdir()
    running = start()
    await eventually(home.peers.exists, "a save")
    saved_ns = home.peers.stat().st_mtime_ns
    await eventually(lambda: home.peers.stat().st_mtime_ns > saved_ns, "another save")
    assert not home.relays.exists()
    beside.rmdir()
    await eventually(home.relays.exists, "the relays in the home")
    await running.stop()


async def test_which_peers_relay_by_default_and_which_relays_are_kept(home: Home, start: Start) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())
    relay = f"/ip4/5.5.0.1/tcp/4001/p2p/{MEMBER.peer_id}"

    async def roles(**config: Any) -> DaemonSettings:
        running = start(**config)
        network = await running.looked()
        network.through = (relay,)
        await eventually(lambda: home.relays.exists() and relay in home.relays.read_text(), "the relays in the home")
        await running.stop()
        return network.settings

    host = await roles()
    assert (host.relays, host.through) == (True, ())
    home.invite.write_text(INVITE.to_text())
    joiner = await roles()
    assert (joiner.relays, joiner.through) == (False, (relay,)), "last time others did not reach it directly"
    assert (await roles(relay=True)).relays
    home.invite.unlink()
    assert not (await roles(max_upload="5 Mbit/s")).relays, "what is relayed passes no throttle"
    home.relays.write_text(f"{relay} nonsense")
    alone = await roles(listen="127.0.0.1", relay=True)
    assert (alone.relays, alone.through) == (False, ())
    home.relays.write_text(f"{relay} nonsense")
    assert (await roles()).through == (), "a damaged file is like none"
