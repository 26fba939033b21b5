"""Reports to the supervisor: how many peers are live, how many tokens they report, whether they run a newer release.

These statements of other peers are shown to the operator and decide nothing.
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

NEWS = 0.01  # a smaller relative change of the reported tokens is not emitted


def release_number(version: str) -> int:
    """Return a version's three numbers as one: 1,002,003 for 1.2.3."""
    major, minor, patch = map(int, version.split("."))
    return (major * 1000 + minor) * 1000 + patch


def version_text(release: int) -> str:
    """Return the version with this `release_number`."""
    return f"{release // 1_000_000}.{release // 1000 % 1000}.{release % 1000}"


RELEASE = release_number(VERSION)


class SwarmReporter:
    """Emits an event for each change."""

    def __init__(self, emit: Callable[[Event], None], peer_exchange: PeerExchange) -> None:
        self._emit = emit
        self._peer_exchange = peer_exchange
        self._groups = SybilGroups(peer_exchange.book, peer_exchange.terms)
        self._reported: list[Event] = [Warned("time of day", ""), Warned("version", "")]
        self._reported_tokens = 0

    def report(self, num_peers: int, addresses: tuple[str, ...]) -> None:
        """Emit what has changed. `num_peers`: live peers other than this one; `addresses`: our own."""
        now_s = loop_s()
        plain = tuple(address for address in addresses if not address.startswith(NEAR))
        now: list[Event] = [PeersSeen(num_peers), AddressesChanged(plain)]
        now += [Warned("time of day", self._peer_exchange.time.warning), Warned("version", self._version_warning(now_s))]
        for event in now:
            if event not in self._reported:
                self._emit(event)
        self._reported = now
        tokens = sum(entry.record.tokens for entry in self._peer_exchange.book.live(now_s) if entry.record)
        if abs(tokens - self._reported_tokens) > NEWS * self._reported_tokens:
            self._reported_tokens = tokens
            self._emit(OthersTrained(tokens))

    def _version_warning(self, now_s: float) -> str:
        """Return a warning if half of the other Sybil groups run a newer release; else an empty string."""
        if not self._groups.half_say(now_s, _runs_newer):
            return ""
        newer = [entry.record.release for entry in self._peer_exchange.book.live(now_s) if entry.record and _runs_newer(entry)]
        theirs = version_text(statistics.median_low(newer))
        return f"many other peers run Gossamer {theirs}, this is {VERSION}: a future version may refuse old peers; update when you can"


def _runs_newer(entry: KnownPeer) -> bool:
    return entry.record is not None and entry.record.release > RELEASE
