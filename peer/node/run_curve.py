"""The curve of the run before this member came: other members tell what they have seen themselves, and this one tells the same to others.

The page shows the curves of others, and nothing acts on them. The supervisor weighs them by Sybil group (`peer/machine/run_view.py`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gossamer.peer.machine.events import CurveTold, Event
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import kept_view
from gossamer.peer.machine.told_curve import RunPoint
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.sync.client import Source
from gossamer.peer.sync.sources import Sources, spread_over
from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.figures import loss_milli
from gossamer.protocol.messages.messages import ContentsKind, RunPhase
from gossamer.protocol.messages.replies import CURVE_BYTES, RunCurve
from gossamer.protocol.tasks import loop_s

READ_S: Final = 60.0  # between two looks at what the supervisor has kept
WAITS_S: Final = (60.0, 300.0, 1800.0)  # before each round of questions: first the run is trained
ASKED: Final = 5  # members, of as many Sybil groups as there are
ANSWER_S: Final = 15.0


class OwnCurve:
    """What this member has seen of the run, for others: only its own points, never those that others told."""

    def __init__(self, home: Home, now_s: Callable[[], float] = loop_s) -> None:
        self._home, self._now_s = home, now_s
        self._read_s, self._encoded = -READ_S, b""

    def to_bytes(self) -> bytes:
        """Return the encoded curve, at most READ_S old; nothing where there is none."""
        if self._now_s() - self._read_s >= READ_S:
            self._read_s, self._encoded = self._now_s(), encoded(kept_view(self._home).points)
        return self._encoded


def encoded(points: list[RunPoint]) -> bytes:
    """Return points as a message: at most so many as it may hold, spread evenly."""
    every = -(-len(points) // limits.CURVE_POINTS) or 1
    by_time = {int(point.ts): point for point in points[::every]}  # an older one of the same second is left out
    chosen = [by_time[ts] for ts in sorted(by_time)]
    try:
        return RunCurve(
            times_s=tuple(int(point.ts) for point in chosen),
            steps=tuple(point.step for point in chosen),
            losses_milli=tuple(loss_milli(point.loss) for point in chosen),
            lows_milli=tuple(loss_milli(point.low) for point in chosen),
            highs_milli=tuple(loss_milli(point.high) for point in chosen),
            lives=tuple(point.members for point in chosen),
            trained=tuple(min(limits.TOKENS, int(point.tokens)) for point in chosen),
        ).to_bytes()
    except BadMessage:  # a loss beyond what may be told, or a clock that went back
        return b""


@dataclass(slots=True)
class CurveReader:
    """Asks some members, once in a start, what they have seen of the run, and emits their answers."""

    sources: Sources
    emit: Callable[[Event], None]
    lifecycle: Lifecycle
    told: set[PeerId] = field(default_factory=set)

    @classmethod
    def of(cls, sources: Sources, me: PeerId, emit: Callable[[Event], None], lifecycle: Lifecycle) -> CurveReader:
        """Make one whose random choices disturb nobody else's."""
        return cls(Sources(sources.client, sources.groups, random.Random(str(me))), emit, lifecycle)

    async def run(self) -> None:
        """Ask until enough have answered, in a few rounds; not at the end of the run, where members fetch its result from each other."""
        for wait_s in WAITS_S:
            await asyncio.sleep(wait_s)
            if self.lifecycle.phase is RunPhase.FINISH:
                return
            groups = [[peer for peer in group if peer.peer_id not in self.told] for group in self.sources.live_groups()]
            peers = spread_over(groups)[: ASKED - len(self.told)]
            names = self.sources.groups.names(self.sources.book.live(loop_s()))
            for peer, curve in await self.sources.ask_all(peers, _curve, ANSWER_S):
                if isinstance(curve, RunCurve):
                    self.told.add(peer.peer_id)
                    is_issuer = peer.peer_id in self.sources.groups.terms.issuers
                    self.emit(CurveTold(str(peer.peer_id), names.get(peer.peer_id, ""), is_issuer, points_of(curve)))
            if len(self.told) >= ASKED:
                return


async def _curve(source: Source) -> RunCurve:
    await source.ask(ContentsKind.RUN_CURVE, 0, CURVE_BYTES)
    _, data = await source.take()
    return RunCurve.from_bytes(data)


def points_of(curve: RunCurve) -> tuple[tuple[float | None, ...], ...]:
    """Return the points of a curve: time, step, loss, its range, live members, tokens."""

    def losses(values: tuple[int, ...]) -> list[float | None]:
        return [(value - 1) / 1000 if value else None for value in values]

    columns = losses(curve.losses_milli), losses(curve.lows_milli), losses(curve.highs_milli)
    return tuple(zip(curve.times_s, curve.steps, *columns, curve.lives, curve.trained, strict=True))
