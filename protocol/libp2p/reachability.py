"""Whether others can call this peer, by their own word; and the relays through which they reach it where they cannot.

Partners are asked to call us (`dial_back.py`), a few at a time, for as long as we live; most of the latest answers decide, so that one
liar among several moves nothing. Each answer also says where the partner relays. A peer that cannot be called then has a place at up to
two relays, and finds others when it has lost both. The role of a p2pd cannot be changed while it runs, so each change means another one.

One limit is known: a router that lets anybody in whose host we have called passes for open with those whom we ask.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from gossamer.protocol.addresses import host_of, read_address, route
from gossamer.protocol.errors import BadMessage, Unreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.libp2p.dial_back import Answer, Reached, ask
from gossamer.protocol.libp2p.p2pd import Control
from gossamer.protocol.newest import keep_newest

ASKED_AT_ONCE = 3
TICK_S = (1.0, 5.0)  # between two looks: while something is unsettled, and otherwise
AGAIN_S = (6.0, 300.0)  # until the same partner is asked again, likewise
NUM_ANSWERS = 7  # the latest ones of different partners, which decide
NUM_RELAYS = 2  # at which we have a place
KNOWN_RELAYS = 32
FIRST_S, LOST_S = 4.0, 8.0  # without a place at any relay, at first and later, before p2pd is started with others, or anew with the same;
MOST_S = 300.0  # twice as long each time that it got none: relays may be full, and whoever cannot be called can call all the same


class Reachability:
    """What is known, over the lives of several p2pds. `through`: the relays of last time; the peer could not be called then."""

    def __init__(self, through: Collection[str] = ()) -> None:
        self.is_open: bool | None = False if through else None
        """Whether others can call us; None while nobody has said."""
        self.open_at = ""
        """The address at which others have last called us, without our id; empty while nobody has."""
        self.through = tuple(through)
        """The relays, with their ids, at which p2pd shall have a place; none where it needs none, or none is known."""
        self._patience_s = FIRST_S
        self._relays: dict[PeerId, str] = {}
        self._answers: dict[PeerId, bool] = {}
        self._seen_at: dict[PeerId, str] = {}
        self._asked_s: dict[PeerId, float] = {}
        for relay in through:
            self._know(relay)

    @property
    def public_host(self) -> str:
        """Where most of those who were asked last see us; empty while nobody has said."""
        counts = Counter(self._seen_at.values())
        return max(counts, key=lambda host: (counts[host], host), default="")

    async def until_role_changes(self, control: Control, port: int) -> str:
        """Ask, and watch our places at relays, until p2pd must be started anew in another role; return why.

        `port`: where we listen. Raises Unreachable when p2pd has gone.
        """
        loop = asyncio.get_running_loop()
        placed_s, had_place = loop.time(), False  # when we last had a place, or could have
        while True:
            await asyncio.sleep(TICK_S[self._is_settled and (self.is_open is True or had_place or self._patience_s > FIRST_S)])
            connected = await control.connected()
            await self._ask_some(control, connected, port)
            _, addresses = await control.identify()
            if self.is_open is not False or _places(addresses):
                placed_s = loop.time()
            if _places(addresses):
                had_place, self._patience_s = True, FIRST_S
            patience_s = LOST_S if had_place else self._patience_s
            if self.is_open and self.through:
                self.through = ()
                return "others can call this peer now, so that it needs no relay"
            if self.is_open is False and (not self.through or loop.time() - placed_s >= patience_s):
                through = await self._choose_relays(control)
                if through:
                    if self.through and not had_place:
                        self._patience_s = min(2 * patience_s, MOST_S)
                    self.through = through
                    return f"others reach this peer through {len(through)} relay{'s' if len(through) > 1 else ''} from now on"

    @property
    def _is_settled(self) -> bool:
        return self.is_open is True or (self.is_open is False and bool(self.through))

    # ---- asking ----

    async def _ask_some(self, control: Control, connected: Mapping[PeerId, str], port: int) -> None:
        now_s = asyncio.get_running_loop().time()
        again_s = AGAIN_S[self._is_settled]
        direct = [peer for peer, end in connected.items() if route(end) == "direct"]
        due = [peer for peer in direct if now_s - self._asked_s.get(peer, -again_s) >= again_s]
        asked = random.sample(due, min(len(due), ASKED_AT_ONCE))
        for peer in asked:
            keep_newest(self._asked_s, peer, now_s, KNOWN_RELAYS * 4)
        answers = await asyncio.gather(*(self._ask(control, peer, port) for peer in asked))
        for peer, answer in zip(asked, answers, strict=True):
            if answer is not None:
                self._hear(peer, answer)

    async def _ask(self, control: Control, peer: PeerId, port: int) -> Answer | None:
        with suppress(Unreachable, BadMessage):  # a peer of another version, or one that has just left
            return await ask(control, peer, port)
        return None

    def _hear(self, peer: PeerId, answer: Answer) -> None:
        self._relays.pop(peer, None)
        if answer.relay:
            self._know(answer.relay)
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

    def _know(self, relay: str) -> None:
        with suppress(ValueError):
            peer = read_address(relay)
            if peer is not None:
                keep_newest(self._relays, peer, relay, KNOWN_RELAYS)

    # ---- relays ----

    async def _choose_relays(self, control: Control) -> tuple[str, ...]:
        """Return relays that answer now, those where we have no place first: the others have lost us."""
        candidates = random.sample(list(self._relays.items()), len(self._relays))
        candidates.sort(key=lambda known: known[1] in self.through)
        there = await asyncio.gather(*(_answers(control, peer, relay) for peer, relay in candidates[: 2 * NUM_RELAYS]))
        return tuple(relay for (_, relay), is_there in zip(candidates, there, strict=False) if is_there)[:NUM_RELAYS]


def _places(addresses: Iterable[str]) -> list[str]:
    """Return those of our addresses that lead through a relay: p2pd names them while it has a place there."""
    return [address for address in addresses if route(address) == "relayed"]


async def _answers(control: Control, peer: PeerId, relay: str) -> bool:
    with suppress(Unreachable):
        await control.connect(peer, [relay])
        return True
    return False
