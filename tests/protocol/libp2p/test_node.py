"""A peer on libp2p survives its p2pd: dead or hung, it is rebuilt with the same name, port, handler and record."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.protocol.errors import BadSettings, PeerGone, Unreachable
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p import node as libp2p
from gossamer.protocol.libp2p.node import NEWCOMERS, Libp2pNode, closing_order, without_sightings
from gossamer.protocol.libp2p.p2pd import Control, DaemonSettings
from gossamer.protocol.libp2p.record_store import RecordStore
from gossamer.protocol.messages.records import MemberRecord, announceable
from gossamer.protocol.streams import admission
from gossamer.protocol.streams.transport import Purpose
from tests.peer.waiting import eventually
from tests.protocol.peers import chunk, echo, number_of, seeded
from tests.protocol.samples import RECORD, RUN_ID
from tests.unused_port import unused_port

pytestmark = pytest.mark.real_time


@pytest.fixture(autouse=True)
def quick_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p, "PULSE_S", 0.2)


def new_node(folder: Path, bootstraps: Callable[[], tuple[str, ...]] = tuple, port: int = 0, at: str = "127.0.0.1") -> Libp2pNode:
    Identity.load_or_create(folder / "key")
    settings = DaemonSettings(folder / "key", folder / "run", at, port)
    return Libp2pNode(settings, RecordStore(RUN_ID), echo, bootstraps, bare_record=lambda addresses: record_at(addresses, folder, 0))


def record_of(node: Libp2pNode, folder: Path, sequence: int) -> MemberRecord:
    return record_at(node.addresses, folder, sequence)


def record_at(addresses: tuple[str, ...], folder: Path, sequence: int) -> MemberRecord:
    who = Identity.load_or_create(folder / "key")
    own, expires_s = announceable(addresses, who.peer_id), int(time.time()) + 90
    made = replace(RECORD, peer_id=who.peer_id, addresses=own, credential=None, sequence=sequence, expires_s=expires_s)
    return replace(made, signature=b"").signed(who)


@asynccontextmanager
async def host_and_peer(folder: Path) -> AsyncIterator[tuple[Libp2pNode, Libp2pNode]]:
    """Yield a host and a peer that was told the host's address; both have announced themselves."""
    async with new_node(folder / "host") as host, new_node(folder / "peer", lambda: host.addresses) as peer:
        await eventually(lambda: host.num_neighbours == peer.num_neighbours == 1, "neighbours")
        await host.announce(record_of(host, folder / "host", 1))
        await peer.announce(record_of(peer, folder / "peer", 1))
        yield host, peer


async def talks_to(node: Libp2pNode, partner: Libp2pNode) -> None:
    stream = await node.connect(partner.peer_id, partner.addresses, Purpose.MEET)
    await stream.send(chunk(3))
    assert await number_of(stream) == 3
    stream.close()


async def test_a_killed_p2pd_is_replaced_as_if_nothing_had_been(folder: Path) -> None:
    async with host_and_peer(folder) as (host, peer):
        addresses, name, pid = host.addresses, host.peer_id, host.daemon_pid
        stream = await peer.connect(name, addresses, Purpose.MEET)
        await stream.send(chunk(1))
        assert await number_of(stream) == 1
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerGone):
            await stream.receive()
        stream.close()
        await eventually(lambda: host.daemon_pid == 0, "end of p2pd")
        for attempt in (host.members(), host.connect(peer.peer_id, (), Purpose.MEET), host.connected()):
            with pytest.raises(Unreachable, match="restarting"):
                await attempt
        await eventually(lambda: host.daemon_pid not in (0, pid), "other p2pd")
        assert (host.addresses, host.peer_id) == (addresses, name)
        await eventually(lambda: host.num_neighbours == 1, "neighbour")
        assert {record.peer_id for record in await host.members()} == {host.peer_id, peer.peer_id}
        await talks_to(peer, host)
        await talks_to(host, peer)


async def test_a_replaced_p2pd_presents_the_announced_record_again(folder: Path) -> None:
    async with host_and_peer(folder) as (host, peer):
        folder, pid = host.settings.identity_file.parent, host.daemon_pid
        host.bare_record = lambda addresses: record_at(addresses, folder, 9)  # as of now, so newer than the announced one
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: host.daemon_pid not in (0, pid) and host.num_neighbours == 1, "other p2pd")
        await talks_to(host, peer)
        known = peer.record_store.latest(host.peer_id)
        assert known is not None and known.sequence == 1


async def test_idle_connections_above_the_limit_are_closed_and_used_ones_stay(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(admission, "LEAST_RATE_S", 600.0)  # a call that carries little is used for so long, however slow this machine is
    async with AsyncExitStack() as stack:
        host = new_node(folder / "host")
        host.settings = replace(host.settings, max_connections=1)
        await stack.enter_async_context(host)
        nodes = [await stack.enter_async_context(new_node(folder / f"peer{number}", lambda: host.addresses)) for number in range(3)]
        stream = await nodes[0].connect(host.peer_id, host.addresses, Purpose.MEET)
        await stream.send(chunk(1))
        assert await number_of(stream) == 1
        for other in nodes[1:]:
            await talks_to(other, host)
        async with asyncio.timeout(20):
            while set(await host.connected()) != {nodes[0].peer_id}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await stream.send(chunk(2))
        assert await number_of(stream) == 2
        stream.close()
        await talks_to(nodes[1], host)  # a closed one is opened again when it is wanted


def test_new_strangers_are_closed_before_partners_that_were_met() -> None:
    ids = [seeded(number).peer_id for number in range(70)]
    met, old, new = set(ids[:30]), set(ids[30:32]), ids[32:]
    order = closing_order(ids, met | old, met.__contains__)
    assert set(order[:2]) == old and set(order[2:-30]) < set(new) and set(order[-30:]) == met
    assert len(order) == len(ids) - NEWCOMERS, "some new strangers neither count nor are closed"


async def test_calls_that_strangers_hold_open_count_as_idle_and_cost_no_partner_its_connection(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(admission, "LEAST_RATE_S", 600.0)  # until all have called, however slow this machine is
    async with AsyncExitStack() as stack:
        host = new_node(folder / "host")
        host.settings = replace(host.settings, max_connections=2)
        host.has_met = lambda partner: partner == met.peer_id
        await stack.enter_async_context(host)
        met = await stack.enter_async_context(new_node(folder / "met", lambda: host.addresses))
        await talks_to(met, host)
        strangers = [await stack.enter_async_context(new_node(folder / f"stranger{number}")) for number in range(3)]
        streams = [await stranger.connect(host.peer_id, host.addresses, Purpose.MEET) for stranger in strangers]
        for stream in streams:
            await stream.send(chunk(1))
            assert await number_of(stream) == 1
        monkeypatch.setattr(admission, "LEAST_RATE_S", 1.0)
        async with asyncio.timeout(20):
            while len(connected := set(await host.connected())) > 2:
                assert met.peer_id in connected
                await asyncio.sleep(0.05)
        assert met.peer_id in connected


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists() or not Path("/proc/net/if_inet6").read_text(), reason="no IPv6 here")
async def test_ipv6_is_as_good(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(new_node(folder / "host", at="::1"))
        peer = await stack.enter_async_context(new_node(folder / "peer", lambda: host.addresses, at="::1"))
        await eventually(lambda: host.num_neighbours == peer.num_neighbours == 1, "neighbours")
        await talks_to(peer, host)
        assert all(address.startswith("/ip6/::1/tcp/") for address in host.addresses)
        assert set((await peer.routes()).values()) == {"local"}


async def test_a_hung_p2pd_is_replaced_too(folder: Path) -> None:
    async with host_and_peer(folder) as (host, peer):
        pid = host.daemon_pid
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: host.daemon_pid not in (0, pid), "other p2pd")
        await eventually(lambda: host.num_neighbours == 1, "neighbour")
        await talks_to(peer, host)


async def test_a_bug_in_a_check_does_not_end_all_checks(folder: Path) -> None:
    asked = 0

    def bootstraps() -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ValueError("a bug")
        return ()

    async with new_node(folder, bootstraps) as node:
        pid = node.daemon_pid
        await eventually(lambda: node.daemon_pid not in (0, pid) and asked > 1, "other p2pd, and further checks")


async def test_a_bootstrap_that_comes_later_is_found(folder: Path) -> None:
    port = unused_port()
    identity = Identity.load_or_create(folder / "host" / "key")
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    async with new_node(folder / "peer", lambda: ("nonsense", "/ip4/127.0.0.1/tcp/9", address)) as peer:
        assert await peer.connected() == {}
        async with new_node(folder / "host", port=port) as host:
            await eventually(lambda: peer.num_neighbours == 1, "neighbour")
            assert await peer.connected() == {host.peer_id: f"/ip4/127.0.0.1/tcp/{port}"}


async def test_addresses_that_other_peers_have_named_are_dialled_if_they_are_plausible(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    dialled: list[str] = []

    async def connect(control: Control, partner: PeerId, addresses: Sequence[str]) -> None:
        dialled.extend(addresses)
        raise Unreachable("nobody")

    monkeypatch.setattr(Control, "connect", connect)
    named, claimed = (f"/ip4/10.0.0.{number}/tcp/22/p2p/{seeded(number).peer_id}" for number in (1, 2))
    node = new_node(folder / "peer", lambda: (named,))
    node.acquaintances = lambda: (claimed, named)
    assert node.record_store.keep_latest(record_at(("/ip4/10.0.0.3/tcp/22",), folder / "other", 1).to_bytes())
    async with node:
        await eventually(lambda: dialled.count(named) > 1, "two pulses")
    assert set(dialled) == {named}, "this peer is on no such network"


async def test_a_busy_port_is_reported_on_entering(folder: Path) -> None:
    async with new_node(folder / "one") as one:
        port = int(one.addresses[0].split("/")[4])
        with pytest.raises(BadSettings, match=f"port {port} is in use"):
            async with new_node(folder / "two", port=port):
                pass


async def test_a_port_lost_while_p2pd_was_down_is_replaced_when_it_was_not_asked_for(folder: Path) -> None:
    async with host_and_peer(folder) as (host, peer):
        port = int(host.addresses[0].split("/")[4])
        pid = host.daemon_pid
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: host.daemon_pid == 0, "end of p2pd")
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind(("127.0.0.1", port))
            thief.listen()
            await eventually(lambda: host.daemon_pid != 0, "p2pd")
        assert f"/tcp/{port}/" not in host.addresses[0]
        await eventually(lambda: host.num_neighbours == 1, "neighbour")  # through the peer's record


async def test_addresses_of_the_widest_reach_come_first(folder: Path) -> None:
    near, lan, far, name = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.0.7/tcp/1", "/ip4/8.8.8.8/tcp/1", "/dns4/peer.example.org/tcp/1"

    Identity.load_or_create(folder / "key")
    settings = DaemonSettings(folder / "key", folder / "run", "127.0.0.1", announce=(near, lan, far, name))
    async with Libp2pNode(settings, RecordStore(RUN_ID), echo) as node:
        shown = [address.removesuffix(f"/p2p/{node.peer_id}") for address in node.addresses]
    assert set(shown[:2]) == {far, name} and shown[2:] == [lan, near]


def test_an_address_at_which_others_have_only_seen_a_peer_is_not_its_own() -> None:
    own, seen, relayed = "/ip4/8.8.8.8/tcp/1", "/ip4/9.9.9.9/tcp/1", "/ip4/9.9.9.1/tcp/1/p2p/12D3KooW/p2p-circuit"
    assert without_sightings((own, "/ip4/10.0.0.1/tcp/1", seen, relayed), (own,)) == (own, "/ip4/10.0.0.1/tcp/1", relayed)
