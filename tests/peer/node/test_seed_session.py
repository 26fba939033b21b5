"""A seed from start to leave, over a network that is not there: what it keeps in its home, and who may end it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from peer.machine.config import PeerConfig
from peer.machine.home import Home
from peer.machine.status import Status
from peer.node import seed as module
from peer.node.seed import run_seed
from peer.swarm.address_book import held_invite
from protocol.errors import BadSettings, Unreachable
from protocol.identity import Identity
from protocol.libp2p.record_store import RecordShelf
from protocol.messages.records import MemberRecord
from protocol.run.invite import Invite
from protocol.run.manifest import Manifest, SignedManifest
from tests.peer.waiting import eventually

HOST, MEMBER = Identity(b"h" * 32), Identity(b"m" * 32)
SIGNED = SignedManifest.sign(Manifest().with_host(HOST.peer_id), HOST)
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{HOST.peer_id}"
INVITE = Invite.issue(HOST, SIGNED.run_id, (ADDRESS,), None, int(time.time()) + 3600)


class Quiet:
    """A network on which nobody answers."""

    addresses: tuple[str, ...] = ()

    def __init__(self, settings: object, shelf: RecordShelf, answer: object, bootstraps: Callable[[], Sequence[str]]) -> None:
        self.shelf, self.bootstraps = shelf, bootstraps

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def connected(self) -> frozenset[object]:
        return frozenset()

    async def connect(self, *_: object) -> object:
        raise Unreachable("nobody is here")


class Running:
    """A seed that runs in a task."""

    def __init__(self, home: Home, invite: Invite | None, monkeypatch: pytest.MonkeyPatch, watch: Callable[[Status], None]) -> None:
        self.networks: list[Quiet] = []
        self.states: list[tuple[str, str]] = []
        self._watch = watch
        monkeypatch.setattr(module, "Libp2pNode", self._network)
        self.task = asyncio.create_task(run_seed(PeerConfig(home=home.path), invite, self._on_status))

    def _network(self, *arguments: Any) -> Quiet:
        self.networks.append(Quiet(*arguments))
        return self.networks[-1]

    def _on_status(self, status: Status) -> None:
        self.states.append((status.state, status.reason))
        self._watch(status)

    async def until(self, state: str) -> Quiet:
        await eventually(lambda: self.task.done() or state in dict(self.states), state)
        if self.task.done():
            self.task.result()
        return self.networks[0]


Start = Callable[..., Running]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.create()
    return made


@pytest.fixture
def start(home: Home, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    return lambda invite, watch=lambda _: None: Running(home, invite, monkeypatch, watch)


def raised(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def member() -> MemberRecord:
    expires_s, credential = int(time.time()) + 60, INVITE.credential_for(MEMBER.peer_id)
    return MemberRecord(SIGNED.run_id, MEMBER.peer_id, ("/ip4/192.0.2.7/tcp/4001",), 0, False, 1, expires_s, credential).signed(MEMBER)


def test_it_goes_on_without_an_invite_with_what_the_first_time_left(home: Home, start: Start) -> None:
    home.manifest.write_bytes(SIGNED.to_bytes())

    async def first() -> None:
        running = start(INVITE)
        network = await running.until("seeding")
        assert network.shelf.notice(member().to_bytes())
        await eventually(home.peers.exists, "the address book")
        raised(signal.SIGTERM)
        assert (await running.task).state == "left"
        assert running.states[-1] == ("left", "SIGTERM")

    async def again() -> None:
        running = start(None)
        network = await running.until("seeding")
        assert network.shelf.run_id == SIGNED.run_id
        assert network.bootstraps() == (ADDRESS, f"/ip4/192.0.2.7/tcp/4001/p2p/{MEMBER.peer_id}")
        raised(signal.SIGTERM)
        await running.task

    asyncio.run(first())
    assert held_invite(home) == INVITE
    assert home.invite.stat().st_mode & 0o077 == 0, "an invite is a secret"
    asyncio.run(again())


def test_one_that_was_ended_before_it_had_the_manifest_goes_on_looking_for_it(start: Start) -> None:
    async def once(invite: Invite | None) -> None:
        running = start(invite)
        network = await running.until("joining")
        assert network.bootstraps() == (ADDRESS,)
        raised(signal.SIGTERM)
        await running.task

    asyncio.run(once(INVITE))
    asyncio.run(once(None))


def test_without_a_run_it_does_not_start(start: Start) -> None:
    async def test() -> None:
        with pytest.raises(BadSettings, match="holds no run"):
            await start(None).task

    asyncio.run(test())


@pytest.mark.usefixtures("signals_of_a_terminal")
def test_ctrl_c_stays_one_whatever_follows(start: Start) -> None:
    async def test() -> None:
        running = start(INVITE)
        await running.until("joining")
        raised(signal.SIGINT, signal.SIGTERM)
        await running.task

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(test())


@pytest.mark.usefixtures("signals_of_a_terminal")
def test_it_leaves_when_its_terminal_is_closed_though_it_cannot_say_so(start: Start) -> None:
    def draw(status: Status) -> None:
        if status.state == "left":
            raise OSError("the terminal has gone")

    async def test() -> None:
        running = start(INVITE, draw)
        await running.until("joining")
        raised(signal.SIGHUP)
        await running.task
        assert running.states[-1] == ("left", "its terminal was closed")

    asyncio.run(test())
