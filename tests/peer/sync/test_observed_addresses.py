"""The budgets of small answers, and what others may ask about themselves."""

from __future__ import annotations

import random

import pytest

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.peer.sync.server import ECHOES_TO_ALL, ECHOES_TO_ONE, PEER_LISTS_TO_NETWORK, PEER_LISTS_TO_ONE, AnswerBudgets
from gossamer.protocol.errors import RefusalCode, Refused
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import CHUNK_BYTES
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.messages.frames import to_frame
from gossamer.protocol.messages.messages import Chunk, Contents, ContentsKind, Part
from gossamer.protocol.messages.replies import LISTED_BYTES, SEEN_BYTES, PeerList
from tests.protocol.samples import ALICE, BOB, DIGEST, FETCH, RECORD, TERMS

HERE = "/ip4/127.0.0.1/tcp/50000"


def test_a_short_reply_contains_the_observed_address_and_the_time() -> None:
    async def test() -> None:
        exchange = PeerExchange(TERMS, AddressBook(BOB.peer_id), SwarmTime(lambda: 1_800_000_000.5), random.Random(0), own=RECORD)
        seen = PeerList.from_bytes(exchange.peer_list(ALICE.peer_id, HERE, SEEN_BYTES))
        assert seen == PeerList((), 1_800_000_000_500, HERE)
        assert PeerList.from_bytes(exchange.peer_list(ALICE.peer_id, "x" * 1000, SEEN_BYTES)).observed == ""
        assert PeerList.from_bytes(exchange.peer_list(ALICE.peer_id, HERE, SEEN_BYTES + LISTED_BYTES)).members == (RECORD.to_bytes(),)

    virtual_time.run(test())


def test_echoes_are_counted_per_partner_and_in_all() -> None:
    async def test() -> None:
        budgets, num_allowed = AnswerBudgets(), int(ECHOES_TO_ONE.capacity) // CHUNK_BYTES
        for number in range(int(ECHOES_TO_ALL.capacity / ECHOES_TO_ONE.capacity)):
            partner = Identity(number.to_bytes(32, "little")).peer_id
            for _ in range(num_allowed):
                budgets.allow_echo(partner, CHUNK_BYTES)
            with pytest.raises(Refused) as caught:
                budgets.allow_echo(partner, CHUNK_BYTES)
            assert caught.value.code is RefusalCode.BUSY
        with pytest.raises(Refused):
            budgets.allow_echo(BOB.peer_id, 1)

    virtual_time.run(test())


def test_introductions_are_counted_per_partner_and_per_network() -> None:
    async def test() -> None:
        budgets, places = AnswerBudgets(), [f"/ip4/5.5.0.{number}/tcp/4001" for number in range(250)]
        keys = [Identity(number.to_bytes(32, "little")).peer_id for number in range(250)]
        of_one, of_network = PEER_LISTS_TO_ONE.capacity, PEER_LISTS_TO_NETWORK.capacity
        assert sum(budgets.may_list_peers(keys[0], places[0]) for _ in range(2 * int(of_one))) == of_one
        listed = sum(budgets.may_list_peers(key, place) for key, place in zip(keys, places, strict=True) for _ in range(4))
        assert listed == of_network - of_one, "two hundred keys of one network"
        assert budgets.may_list_peers(BOB.peer_id, "/ip4/5.6.0.1/tcp/4001"), "another network is told all the same"
        assert budgets.may_list_peers(keys[9], HERE), "on a local network each is one"

    virtual_time.run(test())


def test_an_answer_is_never_larger_than_what_was_asked() -> None:
    seen = PeerList((), 1_800_000_000_000, "/ip6/2001:db8:1234:5678:9abc:def0:1234:5678/tcp/65535").to_bytes()
    header = Contents(ContentsKind.PEER_LIST, len(seen), DIGEST).signed(BOB, *FETCH.asked)
    assert len(to_frame(header)) + len(to_frame(Chunk(Part.CONTENTS, 0, seen))) < len(to_frame(FETCH))
