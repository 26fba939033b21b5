"""Sealed local addresses: readable only by peers at the same public address."""

from __future__ import annotations

import pytest

from gossamer.protocol.addresses import NEAR, address_bytes, read_address, route, with_peer
from gossamer.protocol.messages.records import announceable
from gossamer.protocol.nearby import MAX_SEALED, seal, unseal
from tests.protocol.samples import ALICE, BOB

LAN = ["/ip4/192.168.1.7/tcp/4001", "/ip6/fd00::7/tcp/4002", "/ip4/10.0.0.7/tcp/65535"]
PUBLIC, LOOPBACK = "/ip4/5.5.0.9/tcp/4001", "/ip4/127.0.0.1/tcp/4001"
CIRCUIT = f"/ip4/5.5.0.1/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit"


def test_a_peer_at_the_same_public_address_unseals_it() -> None:
    sealed = seal(LAN, ALICE.peer_id, "5.5.6.1")
    assert unseal(sealed, ALICE.peer_id, "5.5.6.1") == LAN
    assert unseal(with_peer(sealed, ALICE.peer_id), ALICE.peer_id, "5.5.6.1") == LAN
    assert seal(LAN, ALICE.peer_id, "5.5.6.1") == sealed, "the same each time, or each look would be news"
    assert (
        len(seal(LAN * 3, ALICE.peer_id, "5.5.6.1")) < 128
        and len(unseal(seal(LAN * 3, ALICE.peer_id, "h"), ALICE.peer_id, "h")) == MAX_SEALED
    )


def test_other_peers_and_malformed_addresses_yield_nothing() -> None:
    sealed = seal(LAN[:1], ALICE.peer_id, "5.5.6.1")
    assert unseal(sealed, ALICE.peer_id, "5.5.6.2") == unseal(sealed, BOB.peer_id, "5.5.6.1") == []
    for text in (sealed[:-1], NEAR, f"{NEAR}0", f"{NEAR}1111", "/ip4/1.2.3.4/tcp/1"):
        assert unseal(text, ALICE.peer_id, "5.5.6.1") == []


def test_a_sealed_address_is_a_valid_address() -> None:
    sealed = seal(LAN, ALICE.peer_id, "5.5.6.1")
    assert read_address(sealed) is None and read_address(with_peer(sealed, ALICE.peer_id)) == ALICE.peer_id
    assert route(sealed) == "local"
    for legal in (address_bytes, lambda text: read_address(text + "/tcp/1")):
        with pytest.raises(ValueError, match="is not an address"):
            legal(sealed)


@pytest.mark.parametrize(
    ("own", "announced"),
    [
        ((PUBLIC, CIRCUIT, LAN[0], LOOPBACK), (PUBLIC, CIRCUIT)),
        ((CIRCUIT, f"{NEAR}4Vq9", LAN[0], LOOPBACK), (CIRCUIT, f"{NEAR}4Vq9")),
        ((LAN[0], LAN[1], LOOPBACK), (LAN[0], LAN[1])),
        ((LOOPBACK,), (LOOPBACK,)),
    ],
    ids=["on the internet", "behind a router", "on a local network alone", "on this machine alone"],
)
def test_a_record_contains_local_addresses_only_sealed(own: tuple[str, ...], announced: tuple[str, ...]) -> None:
    assert announceable(own, ALICE.peer_id) == announced
