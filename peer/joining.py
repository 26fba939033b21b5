"""How a joiner gets its weights: from one live donor after another, until one delivers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peer import requests as ask
from peer.driver import LinkLost, Tools
from peer.partners import AddressBook, Entry
from peer.state_transfer import Asker
from protocol.errors import BadContents, GossamerError, PeerMisbehaved, RunRefusesUs, SwarmUnreachable, TransportError, WrongVersion
from protocol.messages import RefusalCode, Refused

PATIENCE_S = 60.0  # without any donor that answers at all
PAUSE_S = 1.0

_FINAL = {
    RefusalCode.NOT_INVITED: RunRefusesUs,
    RefusalCode.WRONG_RUN: RunRefusesUs,
    RefusalCode.WRONG_VERSION: WrongVersion,
}


def as_final(refusal: Refused) -> GossamerError | None:
    """Return the operator's error behind a refusal that no retry can change, or None."""
    kind = _FINAL.get(refusal.code)
    return kind(str(refusal), hint=refusal.hint) if kind else None


@dataclass(slots=True)
class Joining:
    """Take over a donor's slow weights, momentum and clock."""

    asker: Asker
    book: AddressBook
    tools: Tools
    state_bytes: int
    report: Callable[[dict[str, Any]], None]
    _names: int = field(default=0)

    async def take_over_weights(self, now_s: Callable[[], float], rng: random.Random, *, patience_s: float = PATIENCE_S) -> None:
        """Fetch a clone and have the trainer adopt it.

        Waits as long as donors answer that they have not begun themselves. Raises SwarmUnreachable when none has answered for
        `patience_s`, RunRefusesUs or WrongVersion when they do not want us.
        """
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while loop.time() - heard_s < patience_s:
            donors = self.book.live(now_s())
            rng.shuffle(donors)
            for donor in donors:
                try:
                    await self._take_from(donor)
                    return
                except Refused as refusal:
                    heard_s = loop.time()
                    if (final := as_final(refusal)) is not None:
                        raise final from refusal
                    self.report({"state": "joining", "reason": f"{donor.peer_id.short()} cannot give its weights yet: {refusal}"})
                except PeerMisbehaved as error:
                    self.book.ban(donor.peer_id, now_s())
                    self.report({"state": "joining", "reason": f"{donor.peer_id.short()} sent bad weights: {error}"})
                except TransportError as error:
                    self.report({"state": "joining", "reason": f"{donor.peer_id.short()} cannot be reached: {error}"})
                except LinkLost:
                    heard_s = loop.time()
                    self.report({"state": "joining", "reason": "the trainer is being restarted"})
            await asyncio.sleep(PAUSE_S)
        raise SwarmUnreachable(
            f"no peer of the run answered for {patience_s:.0f} s",
            hint="check that the host is running and that its address in the invite can be reached from here, then join again",
        )

    async def _take_from(self, donor: Entry) -> None:
        payloads = self.tools.payloads
        self._names += 1
        name = f"adopt-{self._names}"
        done = 0

        def keep(data: bytes) -> None:
            nonlocal done
            payloads.append(name, data)
            done += len(data)
            percent = 100 * done // self.state_bytes
            self.report({"state": "joining", "reason": f"downloading weights from {donor.peer_id.short()}: {percent} %"})

        try:
            header = await self.asker.state(donor.peer_id, donor.addresses, self.state_bytes, keep)
            adopted = await self.tools.link.request(ask.Adopt(name, header.clock_steps))
        finally:
            payloads.remove(name)
        if isinstance(adopted, ask.Adopted) and not adopted.accepted:
            raise BadContents(adopted.reason)
