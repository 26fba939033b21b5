"""Dialling the addresses in untrusted records: implausible addresses and hosts with many failures are skipped."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import cast

import psutil
import pytest

from gossamer.protocol.errors import Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p import dialer as module
from gossamer.protocol.libp2p import host_names
from gossamer.protocol.libp2p.dialer import BACK_OFF_S, IPV6_FAILURES, IPV6_S, MAX_FAILURES, Dialer, has_global_ipv6
from gossamer.protocol.libp2p.kademlia import CALL_S
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.nearby import seal
from tests.protocol.peers import seeded

VICTIM, OTHER = "/ip4/8.8.8.8/tcp/{}", "/ip4/9.9.9.9/tcp/1"
RELAY = f"{OTHER}/p2p/{seeded(99).peer_id}/p2p-circuit"


class Network:
    """A p2pd that reaches only the addresses in `there`. A new connection ends once it has been seen."""

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.there: set[str] = set()
        self.silent: set[str] = set()  # a dial of these alone ends only after a while
        self.ends: dict[PeerId, str] = {}
        self._new: dict[PeerId, str] = {}

    async def connected(self) -> dict[PeerId, str]:
        new, self._new = self._new, {}
        return self.ends | new

    async def connect(self, partner: PeerId, addresses: Sequence[str]) -> None:
        self.dialled += addresses
        if self.silent >= set(addresses):
            await asyncio.sleep(60.0)
        if not self.there & set(addresses):
            raise Unreachable("nobody")
        self._new[partner] = next(address for address in addresses if address in self.there)


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def dialer(network: Network) -> Dialer:
    return Dialer(cast(Control, network), lambda: ("/ip4/192.168.1.9/tcp/1", "/ip4/127.0.0.1/tcp/1"))


async def look_for(dialer: Dialer, number: int, *addresses: str) -> bool:
    try:
        await dialer.connect(seeded(number).peer_id, addresses)
    except Unreachable:
        return False
    return True


async def test_a_host_backs_off_after_failures_of_many_peers(network: Network, dialer: Dialer) -> None:
    for number in range(100):
        assert not await look_for(dialer, number, VICTIM.format(1 + number))
    assert len(network.dialled) == MAX_FAILURES
    await look_for(dialer, 200, VICTIM.format(7), RELAY)
    assert network.dialled[MAX_FAILURES:] == [RELAY], "other addresses of a peer are still dialled"
    await asyncio.sleep(BACK_OFF_S + 1)
    await look_for(dialer, 300, VICTIM.format(1))
    assert network.dialled[-1] == VICTIM.format(1)


async def test_a_host_that_is_written_in_other_ways_backs_off_as_one(network: Network, dialer: Dialer) -> None:
    forms = ["2001:db9::1", "2001:0db9::1", "2001:DB9::1", "2001:db9:0::1", "2001:db9::0:1", "2001:db9:0:0::1", "2001:db9::0001"]
    for number in range(100):
        assert not await look_for(dialer, number, f"/ip6/{forms[number % len(forms)]}/tcp/80")
    assert len(network.dialled) == MAX_FAILURES


async def test_repeated_failures_of_one_peer_do_not_block_its_host(network: Network, dialer: Dialer) -> None:
    for _ in range(3 * MAX_FAILURES):
        await look_for(dialer, 1, VICTIM.format(1))
    network.there = {VICTIM.format(2)}
    assert await look_for(dialer, 2, VICTIM.format(2))


async def test_a_success_resets_the_failures_of_a_host(network: Network, dialer: Dialer) -> None:
    for number in range(MAX_FAILURES - 1):
        await look_for(dialer, number, VICTIM.format(1))
    network.there = {VICTIM.format(2)}
    assert await look_for(dialer, 50, VICTIM.format(2))
    for number in range(60, 60 + MAX_FAILURES - 1):
        await look_for(dialer, number, VICTIM.format(1))
    assert await look_for(dialer, 51, VICTIM.format(2))


@pytest.mark.parametrize("own", [OTHER, RELAY])
async def test_hosts_that_reachable_peers_name_beside_their_own_address_are_dialled_last(
    own: str, network: Network, dialer: Dialer
) -> None:
    """Else peers that can be reached have any host dialled, as often as they wish."""
    other = VICTIM.format(1) + own.removeprefix(OTHER)

    network.there = {own}
    for number in range(100):
        assert await look_for(dialer, number, other, own)
    assert network.dialled.count(other) == MAX_FAILURES
    network.there = {other}
    assert await look_for(dialer, 200, own, other), "a second address is there for when the first one is not"
    assert network.dialled[-2:] == [own, other]
    network.there = {own, other}
    assert await look_for(dialer, 201, own, other)
    assert network.dialled[-2:] == [own, other] and network.dialled.count(other) == MAX_FAILURES + 2


async def test_a_silent_host_backs_off_although_nobody_waits_for_the_end_of_a_dial(network: Network, dialer: Dialer) -> None:
    network.silent = {VICTIM.format(1)}
    for number in range(3 * MAX_FAILURES):
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_S):
                assert not await look_for(dialer, number, VICTIM.format(1))
    assert len(network.dialled) == MAX_FAILURES


async def test_names_are_dialled_as_the_hosts_that_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, network: Network, dialer: Dialer
) -> None:
    """Names are free, and anyone may have one for any host."""

    def begin(host: str, family: int) -> Future[list[str]]:
        known: dict[str, list[str]] = {"here.example": ["127.0.0.1"], "nowhere.example": [], "six.example": ["2a00:1450::5"]}
        found: Future[list[str]] = Future()
        found.set_result(known.get(host, ["8.8.8.8"]))
        return found

    monkeypatch.setattr(host_names, "begin", begin)
    for number in range(100):
        assert not await look_for(dialer, number, f"/dns4/a{number}.example/tcp/80")
    assert network.dialled == MAX_FAILURES * ["/ip4/8.8.8.8/tcp/80"]
    names = [f"/dns/{name}.example/tcp/22" for name in ("here", "nowhere", "six")]
    circuits = [name + RELAY.removeprefix(OTHER) for name in names]
    assert await dialer.dialable_addresses(seeded(1).peer_id, names + circuits) == [
        "/ip6/2a00:1450::5/tcp/22" + rest for rest in ("", RELAY.removeprefix(OTHER))
    ]


async def test_failures_through_a_relay_do_not_count_for_its_host(network: Network, dialer: Dialer) -> None:
    network.ends = {seeded(99).peer_id: OTHER}
    for number in range(3 * MAX_FAILURES):
        await look_for(dialer, number, RELAY)
    assert len(network.dialled) == 3 * MAX_FAILURES


async def test_a_host_that_is_no_relay_backs_off_as_a_relay(network: Network, dialer: Dialer) -> None:
    for number in range(3 * MAX_FAILURES):
        await look_for(dialer, number, f"{VICTIM.format(1 + number)}/p2p/{seeded(99).peer_id}/p2p-circuit")
    assert len(network.dialled) == MAX_FAILURES
    assert await dialer.dialable_addresses(seeded(1).peer_id, [VICTIM.format(1)]), "records with circuits keep nobody from a host"


async def test_a_relay_is_dialled_where_its_address_alone_would_be(dialer: Dialer) -> None:
    hosts = ("127.0.0.1", "10.0.0.1", "192.168.7.7")
    circuits = [f"/ip4/{host}/tcp/22/p2p/{seeded(99).peer_id}/p2p-circuit" for host in hosts]
    assert await dialer.dialable_addresses(seeded(1).peer_id, circuits) == circuits[2:]


async def test_a_local_address_is_dialled_only_from_the_same_address_block(network: Network, dialer: Dialer) -> None:
    network.there = {"/ip4/192.168.7.7/tcp/1", "/ip4/10.0.0.1/tcp/1", "/ip6/fd00::1/tcp/1"}
    assert await look_for(dialer, 1, "/ip4/192.168.7.7/tcp/1")
    assert not await look_for(dialer, 2, "/ip4/10.0.0.1/tcp/1")
    assert not await look_for(dialer, 3, "/ip6/fd00::1/tcp/1")
    assert network.dialled == ["/ip4/192.168.7.7/tcp/1"]


async def test_loopback_is_dialled_only_by_a_peer_that_listens_on_loopback_alone(network: Network, dialer: Dialer) -> None:
    network.there = {"/ip4/127.0.0.1/tcp/22"}
    assert not await look_for(dialer, 1, "/ip4/127.0.0.1/tcp/22"), "a record must not make us dial our own services"
    announcing = Dialer(cast(Control, network), lambda: ("/ip4/8.8.8.8/tcp/4001",))
    for host in ("ip4/0.0.0.0", "ip6/::", "ip6/::ffff:127.0.0.1", "ip6/::ffff:0.0.0.0"):
        assert not await announcing.dialable_addresses(seeded(1).peer_id, [f"/{host}/tcp/22"])
    here = Dialer(cast(Control, network), lambda: ("/ip4/127.0.0.1/tcp/1",))
    assert await look_for(here, 1, "/ip4/127.0.0.1/tcp/22")


async def test_a_host_on_the_local_network_backs_off_too(network: Network, dialer: Dialer) -> None:
    for number in range(3 * MAX_FAILURES):
        assert not await look_for(dialer, number, f"/ip4/192.168.1.1/tcp/{1 + number}")
    assert len(network.dialled) == MAX_FAILURES


async def test_sealed_addresses_are_dialled_behind_the_same_router(network: Network) -> None:
    local = "/ip4/192.168.7.7/tcp/1"
    for host, number in (("5.5.6.1", 1), ("5.5.6.2", 2)):
        sealed = seal([local], seeded(number).peer_id, host)
        with_host = Dialer(cast(Control, network), lambda: ("/ip4/192.168.1.9/tcp/1",), lambda: "5.5.6.1")
        await look_for(with_host, number, sealed, RELAY)
    assert network.dialled == [local, RELAY, RELAY]


async def test_only_the_latest_hosts_are_remembered(monkeypatch: pytest.MonkeyPatch, network: Network, dialer: Dialer) -> None:
    monkeypatch.setattr(module, "HOSTS", 5)
    for number in range(2 * MAX_FAILURES):
        await look_for(dialer, number, "/ip4/8.8.8.8/tcp/1")
    assert len(network.dialled) == MAX_FAILURES
    for number in range(5):
        await look_for(dialer, number, f"/ip4/8.8.4.{number}/tcp/1")
    await look_for(dialer, 0, "/ip4/8.8.8.8/tcp/1")
    assert network.dialled[-1] == "/ip4/8.8.8.8/tcp/1", "the failures at this host should be forgotten"


SIX, FOUR = "/ip6/2a00:1450::5/tcp/1", "/ip4/8.8.8.8/tcp/1"


@pytest.fixture
def has_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_global_ipv6", lambda: True)


@pytest.mark.usefixtures("has_ipv6")
async def test_a_public_ipv6_address_is_dialled_alone_first_and_all_after_a_failure(network: Network, dialer: Dialer) -> None:
    network.there = {SIX}
    assert await look_for(dialer, 1, FOUR, SIX)
    assert network.dialled == [SIX]
    network.there, network.dialled = {FOUR}, []
    assert await look_for(dialer, 1, FOUR, SIX)
    assert network.dialled == [SIX, FOUR, SIX]


async def test_without_ipv6_here_or_there_all_addresses_are_dialled_at_once(
    monkeypatch: pytest.MonkeyPatch, network: Network, dialer: Dialer
) -> None:
    network.there = {FOUR}
    monkeypatch.setattr(module, "has_global_ipv6", lambda: False)
    assert await look_for(dialer, 1, FOUR, SIX)
    monkeypatch.setattr(module, "has_global_ipv6", lambda: True)
    assert await look_for(dialer, 1, FOUR, RELAY)
    assert not await look_for(dialer, 1, SIX), "one that is all that there is, is dialled once"
    assert network.dialled == [FOUR, SIX, FOUR, RELAY, SIX]


@pytest.mark.usefixtures("has_ipv6")
async def test_a_line_on_which_ipv6_is_silent_loses_little_time(network: Network, dialer: Dialer) -> None:
    loop = asyncio.get_running_loop()
    network.there, network.silent = {FOUR}, {SIX}
    began_s = loop.time()
    for number in range(20):
        assert await look_for(dialer, number, FOUR, SIX)
    assert loop.time() - began_s == pytest.approx(IPV6_FAILURES * IPV6_S)
    await asyncio.sleep(BACK_OFF_S + 1)
    network.there, network.silent, network.dialled = {SIX}, set(), []
    assert await look_for(dialer, 1, FOUR, SIX)
    assert network.dialled == [SIX], "it is tried again"


def test_this_machine_tells_whether_it_has_a_global_ipv6_address() -> None:
    addresses = [address for found in psutil.net_if_addrs().values() for address in found if address.family is socket.AF_INET6]
    is_possible = any(ipaddress.ip_address(address.address.partition("%")[0]).is_global for address in addresses)
    assert is_possible or not has_global_ipv6()
