"""Determine whether other peers can reach this one directly, and choose relays if they cannot.

Partners are asked periodically to dial us (`dial_back.py`); the majority of the latest results decides. An unreachable peer has
reservations at up to two relays. Known limit: a router that accepts connections from any host that we have dialled looks open.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress

from gossamer.protocol.addresses import host_of, read_address, route
from gossamer.protocol.errors import BadMessage, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import Answer, Reached, ask
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.newest import keep_newest
from gossamer.protocol.tasks import loop_s

ASKED_AT_ONCE = 3  # partners that are asked concurrently
TICK_S = (1.0, 5.0)  # interval of checks: while the role is unsettled, and afterwards
AGAIN_S = (6.0, 300.0)  # time until the same partner is asked again, likewise
NUM_ANSWERS = 7  # latest results of different partners, whose majority decides
NUM_RELAYS = 2  # relays with a reservation of ours
KNOWN_RELAYS = 32  # relay addresses that are remembered
FIRST_S, LOST_S = 4.0, 8.0  # timeout without a relay reservation, at first and after losing one, before p2pd restarts with new relays
MOST_S = 300.0  # largest timeout: it doubles after each restart without a reservation, because all relays may be full


class Reachability:
    """The reachability of this peer, across restarts of p2pd. `through` holds the relays of the last run; empty if it was reachable."""

    def __init__(self, through: Collection[str] = ()) -> None:
        self.is_open: bool | None = False if through else None  # whether other peers can reach us directly; None while unknown
        self.open_at = ""  # the address of the last successful dial-back, without our id; empty if there is none
        self.through = tuple(through)  # relays, with their ids, at which p2pd shall have a reservation; empty if none is needed or known
        self._timeout_s = FIRST_S
        self._relays: dict[PeerId, str] = {}
        self._answers: dict[PeerId, bool] = {}
        self._seen_at: dict[PeerId, str] = {}
        self._asked_s: dict[PeerId, float] = {}
        for relay in through:
            self._add_relay(relay)

    @property
    def public_host(self) -> str:
        """Our public IP address as most of the last partners observe it; empty if unknown."""
        counts = Counter(self._seen_at.values())
        return max(counts, key=lambda host: (counts[host], host), default="")

    async def until_role_changes(self, control: Control, port: int) -> str:
        """Track our reachability at `port` and our relays until p2pd needs another role; return the reason. Raises Unreachable."""
        loop = asyncio.get_running_loop()
        reserved_s, had_reservation = loop.time(), False  # loop time at which we last had a reservation, or needed none
        while True:
            await asyncio.sleep(TICK_S[self._is_reachable and (self.is_open is True or had_reservation or self._timeout_s > FIRST_S)])
            connected = await control.connected()
            await self._ask_some(control, connected, port)
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

    async def _ask_some(self, control: Control, connected: Mapping[PeerId, str], port: int) -> None:
        now_s = loop_s()
        again_s = AGAIN_S[self._is_reachable]
        direct = [peer for peer, end in connected.items() if route(end) == "direct"]
        due = [peer for peer in direct if now_s - self._asked_s.get(peer, -again_s) >= again_s]
        asked = random.sample(due, min(len(due), ASKED_AT_ONCE))
        for peer in asked:
            keep_newest(self._asked_s, peer, now_s, KNOWN_RELAYS * 4)
        answers = await asyncio.gather(*(self._ask(control, peer, port) for peer in asked))
        for peer, answer in zip(asked, answers, strict=True):
            if answer is not None:
                self._take_answer(peer, answer)

    async def _ask(self, control: Control, peer: PeerId, port: int) -> Answer | None:
        with suppress(Unreachable, BadMessage):  # a peer of another version, or one that has just left the run
            return await ask(control, peer, port)
        return None

    def _take_answer(self, peer: PeerId, answer: Answer) -> None:
        self._relays.pop(peer, None)
        if answer.relay:
            self._add_relay(answer.relay)
        if route(answer.seen_at) == "direct" and answer.seen_at:
            keep_newest(self._seen_at, peer, host_of(answer.seen_at), NUM_ANSWERS)
        if answer.reached is Reached.NOT_TRIED:
            return
        keep_newest(self._answers, peer, answer.reached is Reached.YES, NUM_ANSWERS)
        if answer.reached is Reached.YES:
            self.open_at = answer.seen_at
        num_yes = sum(self._answers.values())
        if 2 * num_yes != len(self._answers):
            self.is_open = 2 * num_yes > len(self._answers)
        if not self.is_open:
            self.open_at = ""

    def _add_relay(self, relay: str) -> None:
        with suppress(ValueError):
            peer = read_address(relay)
            if peer is not None:
                keep_newest(self._relays, peer, relay, KNOWN_RELAYS)

    async def _choose_relays(self, control: Control) -> tuple[str, ...]:
        """Return relays that respond now. Those that we do not use yet come first, because we have lost the others."""
        candidates = random.sample(list(self._relays.items()), len(self._relays))
        candidates.sort(key=lambda known: known[1] in self.through)
        responses = await asyncio.gather(*(_responds(control, peer, relay) for peer, relay in candidates[: 2 * NUM_RELAYS]))
        return tuple(relay for (_, relay), responds in zip(candidates, responses, strict=False) if responds)[:NUM_RELAYS]


async def _responds(control: Control, peer: PeerId, relay: str) -> bool:
    with suppress(Unreachable):
        await control.connect(peer, [relay])
        return True
    return False
