"""Reports about other peers: only changes, and a newer release only if half of the Sybil groups run one."""

from __future__ import annotations

import asyncio
import random

import pytest

from gossamer.peer.machine.events import AddressesChanged, Event, OthersTrained, PeersSeen, Warned
from gossamer.peer.machine.status import VERSION
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.presence import RELEASE, SwarmReporter, release_number, version_text
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory.virtual_time import run
from gossamer.protocol.messages.records import MemberRecord
from tests.peer.two_sides import SEEDS, TERMS

ME = Identity(SEEDS[0])


def events_about(*others: tuple[int, int], is_paused: bool = False) -> list[Event]:
    """Return the events of two reports about peers with these releases and tokens, each in a network of its own."""
    events: list[Event] = []

    async def report() -> None:
        book = AddressBook(ME.peer_id)
        reporter = SwarmReporter(events.append, PeerExchange(TERMS, book, SwarmTime(lambda: 1000.0), random.Random(0)))
        for number, (release, tokens) in enumerate(others, 1):
            who = Identity(bytes(31) + bytes([number]))
            record = MemberRecord(
                TERMS.run_id, who.peer_id, (f"/ip4/20.{number}.0.1/tcp/1",), 5, False, 1, 1090, None, is_paused, tokens, release
            )
            book.learn(record.signed(who), asyncio.get_running_loop().time())
            book.note_meeting(who.peer_id, asyncio.get_running_loop().time(), 5)
        for _ in range(2):
            reporter.report(len(others), ())

    run(report())
    return events


def test_the_tokens_of_the_other_peers_are_added_and_emitted_once() -> None:
    assert events_about((RELEASE, 300), (RELEASE, 100)) == [PeersSeen(2), AddressesChanged(()), OthersTrained(400)]


def test_the_tokens_of_paused_peers_count_though_they_are_not_in_sight() -> None:
    assert OthersTrained(400) in events_about((RELEASE, 300), (RELEASE, 100), is_paused=True)


@pytest.mark.parametrize(
    ("others", "is_old"),
    [
        ([], False), ([RELEASE], False), ([RELEASE + 1], True), ([0, 0], False), ([RELEASE + 1, RELEASE], True),
        ([RELEASE + 1, RELEASE, RELEASE], False), ([999_999_999, RELEASE + 1, RELEASE + 1, 0, 0], True),
    ],
)  # fmt: skip
def test_an_old_version_is_warned_of_if_half_of_the_other_peers_run_a_newer_one(others: list[int], is_old: bool) -> None:
    warnings = [event.words for event in events_about(*((release, 0) for release in others)) if isinstance(event, Warned)]
    assert bool(warnings) is is_old
    if is_old:
        (words,) = warnings
        assert f"Gossamer {version_text(RELEASE + 1)}, this is {VERSION}" in words


@pytest.mark.parametrize("version", ["0.0.1", "1.2.3", "12.0.999"])
def test_a_version_is_a_number_on_the_wire(version: str) -> None:
    assert version_text(release_number(version)) == version
    assert release_number("0.9.9") < release_number("0.10.0") < release_number("1.0.0")
