"""What others may ask about themselves, and how little of us they can make of it."""

from __future__ import annotations

import pytest

from gossamer.peer.sync.server import ECHOES_TO_ALL, ECHOES_TO_ONE, PEER_LISTS_TO_NETWORK, PEER_LISTS_TO_ONE, ObservedAddresses
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.messages.frames import to_frame
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, Part
from gossamer.protocol.messages.replies import Sighting
from tests.protocol.samples import BOB, DIGEST, FETCH

HERE = "/ip4/127.0.0.1/tcp/50000"


def test_a_reply_contains_the_observed_address_and_the_time() -> None:
    observed = ObservedAddresses()
    assert Sighting.from_bytes(observed.observed_address(HERE, 1_800_000_000.5)) == Sighting(HERE, 1_800_000_000_500)
    assert Sighting.from_bytes(observed.observed_address("x" * 1000, 0.0)).observed == ""


def test_echoes_are_counted_per_partner_and_in_all() -> None:
    async def test() -> None:
        observed, num_allowed = ObservedAddresses(), int(ECHOES_TO_ONE.capacity) // CHUNK_BYTES
        for number in range(int(ECHOES_TO_ALL.capacity / ECHOES_TO_ONE.capacity)):
            partner = Identity(number.to_bytes(32, "little")).peer_id
            for _ in range(num_allowed):
                observed.allow_echo(partner, CHUNK_BYTES)
            with pytest.raises(Refused) as caught:
                observed.allow_echo(partner, CHUNK_BYTES)
            assert caught.value.code is RefusalCode.BUSY
        with pytest.raises(Refused):
            observed.allow_echo(BOB.peer_id, 1)

    virtual_time.run(test())


def test_introductions_are_counted_per_partner_and_per_network() -> None:
    async def test() -> None:
        observed, places = ObservedAddresses(), [f"/ip4/5.5.0.{number}/tcp/4001" for number in range(250)]
        keys = [Identity(number.to_bytes(32, "little")).peer_id for number in range(250)]
        of_one, of_network = PEER_LISTS_TO_ONE.capacity, PEER_LISTS_TO_NETWORK.capacity
        assert sum(observed.may_list_peers(keys[0], places[0]) for _ in range(2 * int(of_one))) == of_one
        listed = sum(observed.may_list_peers(key, place) for key, place in zip(keys, places, strict=True) for _ in range(4))
        assert listed == of_network - of_one, "two hundred keys of one network"
        assert observed.may_list_peers(BOB.peer_id, "/ip4/5.6.0.1/tcp/4001"), "another network is told all the same"
        assert observed.may_list_peers(keys[9], HERE), "on a local network each is one"

    virtual_time.run(test())


def test_an_answer_is_never_larger_than_what_was_asked() -> None:
    seen = Sighting("/ip6/2001:db8:1234:5678:9abc:def0:1234:5678/tcp/65535", 1_800_000_000_000).to_bytes()
    header = Contents(ContentsKind.SIGHTING, len(seen), DIGEST).signed(BOB, *FETCH.asked)
    assert len(to_frame(header)) + len(to_frame(Chunk(Part.CONTENTS, 0, seen))) < len(to_frame(FETCH))
