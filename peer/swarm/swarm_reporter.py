"""What a peer sees of the others, told to its supervisor whenever it changes.

How many there are, what they say they have trained, and whether they run a newer release. Such words are shown, and decide nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from gossamer.peer.machine.events import AddressesChanged, Event, OthersTrained, PeersSeen, Warned
from gossamer.peer.machine.status import VERSION
from gossamer.peer.swarm.address_book import KnownPeer, loop_s
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.protocol.addresses import NEAR

NEWS = 0.01  # a change of what others have trained by less is none


def release_number(version: str) -> int:
    """Return a version's three numbers as one: 1,002,003 for 1.2.3."""
    major, minor, patch = map(int, version.split("."))
    return (major * 1000 + minor) * 1000 + patch


def version_text(release: int) -> str:
    """Return a version of its `release_number`."""
    return f"{release // 1_000_000}.{release // 1000 % 1000}.{release % 1000}"


RELEASE = release_number(VERSION)


class SwarmReporter:
    """Tells what is new."""

    def __init__(self, emit: Callable[[Event], None], peer_exchange: PeerExchange) -> None:
        self._emit = emit
        self._peer_exchange = peer_exchange
        self._groups = SybilGroups(peer_exchange.book, peer_exchange.terms)
        self._told: list[Event] = [Warned("time of day", ""), Warned("version", "")]
        self._told_tokens = 0

    def report(self, num_peers: int, addresses: tuple[str, ...]) -> None:
        """Take in how many others are there now, and our own addresses."""
        now_s = loop_s()
        plain = tuple(address for address in addresses if not address.startswith(NEAR))
        now: list[Event] = [PeersSeen(num_peers), AddressesChanged(plain)]
        now += [Warned("time of day", self._peer_exchange.time.warning), Warned("version", self._version_warning(now_s))]
        for event in now:
            if event not in self._told:
                self._emit(event)
        self._told = now
        tokens = sum(entry.record.tokens for entry in self._peer_exchange.book.live(now_s) if entry.record)
        if abs(tokens - self._told_tokens) > NEWS * self._told_tokens:
            self._told_tokens = tokens
            self._emit(OthersTrained(tokens))

    def _version_warning(self, now_s: float) -> str:
        """Return what to do where half of the others, by groups, run a newer release; empty elsewhere."""
        if not self._groups.half_say(now_s, _runs_newer):
            return ""
        newer = [entry.record.release for entry in self._peer_exchange.book.live(now_s) if entry.record and _runs_newer(entry)]
        theirs = version_text(statistics.median_low(newer))
        return (
            f"many others run Gossamer {theirs}, this is {VERSION}: peers of an old version may be left out one day; update it when you can"
        )


def _runs_newer(entry: KnownPeer) -> bool:
    return entry.record is not None and entry.record.release > RELEASE
