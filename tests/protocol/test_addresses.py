from __future__ import annotations

import random

import pytest

from gossamer.protocol.addresses import address_bytes, read_address, route, route_between, with_peer
from tests.protocol.samples import ADDRESS, ALICE, BOB

RELAY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize(
    "text",
    [
        ADDRESS,
        f"/ip6/2001:db8::1/tcp/65535/p2p/{ALICE.peer_id}",
        f"/dns4/peer.example.org/tcp/1/p2p/{ALICE.peer_id}",
        f"/dns/localhost/tcp/4001/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.5/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{ALICE.peer_id}",
        f"/ip6/2001:db8:1111:1111:1111:1111:1111:1111/tcp/65535/p2p/{BOB.peer_id}/p2p-circuit/p2p/{ALICE.peer_id}",
    ],
)
def test_an_address_names_its_peer(text: str) -> None:
    assert read_address(text) == ALICE.peer_id


@pytest.mark.parametrize(
    "text", ["/ip4/203.0.113.5/tcp/4001", "/dns6/a.b/tcp/80", f"/ip4/203.0.113.5/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit"]
)
def test_an_address_may_omit_its_peer(text: str) -> None:
    assert read_address(text) is None


@pytest.mark.parametrize("address", ["/ip4/203.0.113.5/tcp/4001", f"/ip4/203.0.113.5/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit"])
def test_with_peer_adds_the_peer_id_once(address: str) -> None:
    whole = with_peer(address, ALICE.peer_id)
    assert whole == f"{address}/p2p/{ALICE.peer_id}"
    assert read_address(whole) == ALICE.peer_id
    assert with_peer(whole, ALICE.peer_id) == whole


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.5:4001",
        "/ip4/203.0.113.5",
        "/ip4/203.0.113.5/tcp/0",
        "/ip4/203.0.113.5/tcp/65536",
        "/ip4/203.0.113.5/tcp/99999",
        "/ip4/203.0.113.5/tcp/-1",
        "/ip4/203.0.113.5/udp/4001/quic-v1",
        "/ip4/203.0.113.256/tcp/4001",
        "/ip4/203.0.113.05/tcp/4001",
        "/ip4/localhost/tcp/4001",
        "/ip6/203.0.113.5/tcp/4001",
        "/ip6/fe80::1%eth0/tcp/4001",
        "/dns4/-bad.example/tcp/4001",
        "/dns4/bad..example/tcp/4001",
        "/dns4/bad example/tcp/4001",
        "/unix/socket/tcp/4001",
        "/dns4/\u017f.x/tcp/1",  # matches [a-z] only with case folding
        "/dns/\u212a/tcp/1",
        "/ip4/203.0.113.\u0665/tcp/4001",
        "/dns4/a.b/tcp/\u0661",
        ADDRESS + "\n",
        ADDRESS + "/",
        ADDRESS + "/p2p/" + str(BOB.peer_id),
        " " + ADDRESS,
        f"/ip4/203.0.113.5/tcp/4001/p2p/{RELAY}",
        "/ip4/203.0.113.5/tcp/4001/p2p/12D3Koo",
        "/dns4/" + "a" * 64 + "/tcp/4001",
        "/dns4/" + "a." * 90 + "a/tcp/4001",
    ],
)
def test_other_text_raises_value_error_with_a_message(text: str) -> None:
    with pytest.raises(ValueError, match="address|peer") as caught:
        read_address(text)
    assert len(str(caught.value)) < 300


def test_random_text_raises_value_error_only() -> None:
    generator = random.Random(3)
    for _ in range(5000):
        characters = list(ADDRESS)
        for _ in range(generator.randint(1, 4)):
            characters[generator.randrange(len(characters))] = chr(
                generator.choice([generator.randrange(128), generator.randrange(0x10FFFF)])
            )
        try:
            read_address("".join(characters))
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("text", "raw"),
    [
        ("/ip4/127.0.0.1/tcp/4660", "047f000001061234"),
        ("/ip6/::1/tcp/80", "29" + "00" * 15 + "01" + "060050"),
        ("/dns/a.example/tcp/80", "3509" + b"a.example".hex() + "060050"),
        (f"/dns4/a.b/tcp/80/p2p/{BOB.peer_id}", "3603" + b"a.b".hex() + "060050" + "a50326" + BOB.peer_id.raw.hex()),
        (f"/dns6/a.b/tcp/80/p2p/{BOB.peer_id}/p2p-circuit", "3703" + b"a.b".hex() + "060050a50326" + BOB.peer_id.raw.hex() + "a202"),
    ],
)
def test_the_bytes_are_those_of_multiaddr(text: str, raw: str) -> None:
    """Check against the multicodec table. test_relays.py checks that p2pd accepts them."""
    assert address_bytes(text).hex() == raw


@pytest.mark.parametrize("text", ["nonsense", "/ip4/1.2.3.4/tcp/1/p2p/111/p2p-circuit", "/ip4/1.2.3.4/tcp/1/p2p/QmYyQ/p2p-circuit"])
def test_an_address_that_p2pd_rejects_has_no_binary_form(text: str) -> None:
    with pytest.raises(ValueError, match="address|id"):
        address_bytes(text)


def test_random_text_encodes_or_raises_value_error() -> None:
    generator = random.Random(4)
    whole = f"{ADDRESS}/p2p-circuit/p2p/{BOB.peer_id}"
    for _ in range(2000):
        characters = list(whole)
        for _ in range(generator.randint(1, 3)):
            characters[generator.randrange(len(characters))] = chr(generator.randrange(128))
        try:
            address_bytes("".join(characters))
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("address", "way"),
    [
        ("/ip4/5.5.0.1/tcp/4001", "direct"),
        ("/dns4/a.example/tcp/4001", "direct"),
        ("/ip4/192.168.1.2/tcp/4001", "local"),
        ("/ip4/127.0.0.1/tcp/4001", "local"),
        (f"/ip4/5.5.0.1/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit", "relayed"),
        ("", "direct"),
    ],
)
def test_the_route_follows_from_the_remote_address(address: str, way: str) -> None:
    assert route(address) == way


def test_a_direct_connection_of_two_unreachable_peers_is_punched() -> None:
    end, circuit, local = "/ip4/5.5.0.9/tcp/4001", f"/ip4/5.5.0.1/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit", "/ip4/192.168.1.2/tcp/1"
    assert route_between(end, (circuit,), (circuit, local)) == "punched"
    assert route_between(end, (circuit,), (end, local)) == "direct", "it can be called"
    assert route_between(end, (), (circuit,)) == "direct", "we can be called"
    assert route_between(end, (circuit,), ()) == "direct", "nothing is known of it"
    assert route_between(circuit, (circuit,), (circuit,)) == "relayed" and route_between(local, (circuit,), (circuit,)) == "local"
