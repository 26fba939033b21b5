"""Determine whether other peers can reach this one directly, and choose relays if they cannot.

Partners are asked periodically to dial us (`dial_back.py`); the majority of the latest results decides. Identities are free, networks are
not: each network has one vote, and strangers have none where members are connected. An unreachable peer has reservations at up to two
relays. Known limit: a router that accepts connections from any host that we have dialled looks open.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from gossamer.protocol.addresses import host_of, network_of, port_of, read_address, route
from gossamer.protocol.errors import BadMessage, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import Answer, Reached, ask
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.tasks import loop_s

T = TypeVar("T")

ASKED_AT_ONCE = 3  # partners that are asked concurrently
TICK_S = (1.0, 5.0)  # interval of checks: while the role is unsettled, and afterwards
AGAIN_S = (6.0, 300.0)  # time until the same partner is asked again, likewise
NUM_ANSWERS = 7  # latest results of different partners of one network, and networks, whose majority decides
NUM_RELAYS = 2  # relays with a reservation of ours
KNOWN_RELAYS = 32  # relay addresses that are remembered
FIRST_S, LOST_S = 4.0, 8.0  # timeout without a relay reservation, at first and after losing one, before p2pd restarts with new relays
MOST_S = 300.0  # largest timeout: it doubles after each restart without a reservation, because all relays may be full


class Reachability:
    """The reachability of this peer, across restarts of p2pd. `through` holds the relays of the last run; empty if it was reachable."""

    def __init__(self, through: Collection[str] = ()) -> None:
        self.is_open: bool | None = False if through else None  # whether other peers can reach us directly; None while unknown
        self.public_host = ""  # our IP address as most of the last networks observe it; empty if unknown
        self.open_at = ""  # the address of the last successful dial-back, without our id; empty if there is none
        self.through = tuple(through)  # relays, with their ids, at which p2pd shall have a reservation; empty if none is needed or known
        self._timeout_s = FIRST_S
        known = ((read_address(relay), relay) for relay in through)
        self._relays = {peer: (relay, network_of(relay)) for peer, relay in known if peer}  # with the network of the relay's connection
        self._answers: dict[str, dict[PeerId, bool]] = {}  # by the network of the partner's connection, like the next one
        self._seen_at: dict[str, dict[PeerId, str]] = {}
        self._asked_s: dict[PeerId, float] = {}

    async def until_role_changes(self, control: Control, port: int, is_member: Callable[[PeerId], bool] = lambda peer: True) -> str:
        """Track our reachability at `port` and our relays until p2pd needs another role; return the reason. Raises Unreachable.

        Peers that are no members are asked only while no member is connected.
        """
        loop = asyncio.get_running_loop()
        reserved_s, had_reservation = loop.time(), False  # loop time at which we last had a reservation, or needed none
        while True:
            await asyncio.sleep(TICK_S[self._is_reachable and (self.is_open is True or had_reservation or self._timeout_s > FIRST_S)])
            connected = await control.connected()
            await self._ask_some(control, connected, port, is_member)
            _, addresses = await control.identify()
            has_reservation = any(route(address) == "relayed" for address in addresses)  # p2pd lists one for each reservation
            if self.is_open is not False or has_reservation:
                reserved_s = loop.time()
            if has_reservation:
                had_reservation, self._timeout_s = True, FIRST_S
            timeout_s = LOST_S if had_reservation else self._timeout_s
            if self.is_open and self.through:
                self.through = ()
                return "other peers can reach this peer directly, so it needs no relay"
            if self.is_open is False and (not self.through or loop.time() - reserved_s >= timeout_s):
                through = await self._choose_relays(control)
                if through:
                    if self.through and not had_reservation:
                        self._timeout_s = min(2 * timeout_s, MOST_S)
                    self.through = through
                    return f"other peers now reach this peer through {len(through)} relay{'s' if len(through) > 1 else ''}"

    @property
    def _is_reachable(self) -> bool:
        return self.is_open is True or (self.is_open is False and bool(self.through))

    async def _ask_some(self, control: Control, connected: Mapping[PeerId, str], port: int, is_member: Callable[[PeerId], bool]) -> None:
        now_s = loop_s()
        again_s = AGAIN_S[self._is_reachable]
        direct = [peer for peer, end in connected.items() if end and route(end) == "direct"]
        if members := list(filter(is_member, direct)):
            direct = members
            self._answers, self._seen_at = _of_members(self._answers, is_member), _of_members(self._seen_at, is_member)
        due = [peer for peer in direct if now_s - self._asked_s.get(peer, -again_s) >= again_s]
        random.shuffle(due)
        asked = _one_of_each_network_first(due, [network_of(connected[peer]) for peer in due])[:ASKED_AT_ONCE]
        for peer in asked:
            keep_newest(self._asked_s, peer, now_s, KNOWN_RELAYS * 4)
        answers = await asyncio.gather(*(self._ask(control, peer, port) for peer in asked))
        for peer, answer in zip(asked, answers, strict=True):
            if answer is not None:
                self._take_answer(peer, network_of(connected[peer]), answer, port)

    async def _ask(self, control: Control, peer: PeerId, port: int) -> Answer | None:
        with suppress(Unreachable, BadMessage):  # a peer of another version, or one that has just left the run
            return await ask(control, peer, port)
        return None

    def _take_answer(self, peer: PeerId, network: str, answer: Answer, port: int) -> None:
        """Take in an answer of a peer in a network to whether it can reach us at `port`."""
        self._relays.pop(peer, None)
        if answer.relay:
            keep_newest(self._relays, peer, (answer.relay, network), KNOWN_RELAYS)
        is_direct = bool(answer.seen_at) and route(answer.seen_at) == "direct"
        if is_direct:
            _note(self._seen_at, network, peer, host_of(answer.seen_at))
            by_network = [_most_common(seen.values(), self.public_host) for seen in self._seen_at.values()]
            self.public_host = _most_common(by_network, self.public_host)
        if answer.reached is Reached.NOT_TRIED:
            return
        is_reached = answer.reached is Reached.YES
        _note(self._answers, network, peer, is_reached)
        if is_reached and is_direct and (host_of(answer.seen_at), port_of(answer.seen_at)) == (self.public_host, port):
            self.open_at = answer.seen_at
        votes = [2 * sum(reached.values()) - len(reached) for reached in self._answers.values()]
        num_yes, num_no = sum(vote > 0 for vote in votes), sum(vote < 0 for vote in votes)
        if num_yes != num_no:
            self.is_open = num_yes > num_no
        if not self.is_open:
            self.open_at = ""

    async def _choose_relays(self, control: Control) -> tuple[str, ...]:
        """Return relays that respond now. Those that we do not use yet come first, because we have lost the others.

        The first of each network precedes others of that network: the owner of a network chooses how many relays it offers. The network is
        that of the relay's connection, since the relay writes its address itself.
        """
        known = [(peer, relay, network) for peer, (relay, network) in self._relays.items()]
        candidates = random.sample(known, len(known))
        candidates.sort(key=lambda candidate: candidate[1] in self.through)
        candidates = _one_of_each_network_first(candidates, [network for _, _, network in candidates])
        responses = await asyncio.gather(*(_responds(control, peer, relay) for peer, relay, _ in candidates[: 2 * NUM_RELAYS]))
        return tuple(relay for (_, relay, _), responds in zip(candidates, responses, strict=False) if responds)[:NUM_RELAYS]


def _note(answers: dict[str, dict[PeerId, T]], network: str, peer: PeerId, answer: T) -> None:
    of_network = answers.get(network, {})
    keep_newest(of_network, peer, answer, NUM_ANSWERS)
    keep_newest(answers, network, of_network, NUM_ANSWERS)


def _of_members(answers: dict[str, dict[PeerId, T]], is_member: Callable[[PeerId], bool]) -> dict[str, dict[PeerId, T]]:
    kept = {network: {peer: answer for peer, answer in of_network.items() if is_member(peer)} for network, of_network in answers.items()}
    return {network: of_network for network, of_network in kept.items() if of_network}


def _most_common(hosts: Iterable[str], last: str) -> str:
    """Return the most common host; of several such, the last one that was believed, so that one network does not change it."""
    counts = Counter(hosts)
    return max(counts, key=lambda host: (counts[host], host == last))


def _one_of_each_network_first(peers: Sequence[T], networks: Sequence[str]) -> list[T]:
    """Return the peers, which are in these networks, with the earliest of each network first."""
    order = sorted(range(len(peers)), key=lambda number: networks.index(networks[number]) != number)
    return [peers[number] for number in order]


async def _responds(control: Control, peer: PeerId, relay: str) -> bool:
    with suppress(Unreachable):
        await control.connect(peer, [relay])
        return True
    return False
