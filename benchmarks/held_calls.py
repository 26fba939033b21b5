"""Strangers that hold calls open: how long each call lasts, and what many of them cost the honest, in virtual time.

    python -m benchmarks.held_calls [--strangers 12]

Real nodes of a staged run on a network in memory, with admission control; the strangers have valid credentials, a new key each, and seem to
come from as many networks. First table: seconds until the honest side ends a call that stops at a point of its conversation, without any
pressure on its places. Second table: so many strangers hold calls at the same point at a holder of the last stage. `steps` are those of the
honest driver in a minute; `window` is what the holder grants it. A stranger whose call ends makes the next one at once, under another key.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path

from gossamer.peer.pipeline.greeting import LaneSide
from gossamer.peer.swarm.membership import Membership, OwnCredential
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Chunk, ContentsKind, FetchRequest, Hello, HopForward, Part, RunPhase
from gossamer.protocol.messages.terms import FragmentTerms, ModelPlan, StageTerms
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.swarm.holders import IN_BATCH, TOKEN_BYTES, VALUE_BYTES, Holder, StagedRun, play

FOR_S = 300.0
PRESSURE_S = 60.0
SERVICE_S = 0.5  # of a micro-batch at an honest trainer
RETRY_S = 1.0  # between two tries of a stranger that is rejected
FIRST_KEY = 1000
KEYS_OF_ONE = 7  # of a stranger, used in turn

Say = Callable[["Stranger", Stream], AsyncGenerator[None, None]]  # what is said before the call is held


class Stranger:
    """A member that nobody has met. `of`: the stage that it claims to hold, from 0."""

    def __init__(self, run: StagedRun, victim: Holder, number: int, of: int) -> None:
        self.run, self.victim, self.of = run, victim, of
        self.identity = Identity(number.to_bytes(4, "little") * 8)
        stage = StageTerms(of, run.manifest.num_stages, TOKEN_BYTES, VALUE_BYTES, IN_BATCH)
        plan = ModelPlan(16, (FragmentTerms(0, 1000, 0),), 800, stage)
        self.membership = Membership.of(self.identity, run.manifest, OwnCredential()).with_plan(plan)
        self.transport = run.network.start_peer(self.identity.peer_id, _refuse)

    async def hold(self, purpose: Purpose, say: Say) -> float:
        """Say something and keep silent; return after how many seconds the victim ends the call. Raises GossamerError."""
        stream = await self.transport.connect(self.victim.peer_id, (), purpose)
        began_s = asyncio.get_running_loop().time()
        async with aclosing(say(self, stream)) as saying:
            with suppress(GossamerError):
                async for _ in saying:
                    pass
            with suppress(TimeoutError):
                async with asyncio.timeout(FOR_S):
                    while stream._inbox.ended is None:  # noqa: ASYNC110 (a held call reads nothing)
                        await asyncio.sleep(1.0)
        ended = stream._inbox.ended is not None
        stream.close()
        return asyncio.get_running_loop().time() - began_s if ended else math.inf


async def _refuse(purpose: Purpose, stream: Stream) -> None:
    stream.close()


# ---------------------------------------------------------------------- the points of the conversations


async def nothing(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Say nothing."""
    return
    yield


async def hello(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Begin a meeting about the fragment of the victim's stage."""
    terms = stranger.membership.terms
    first = Hello(
        terms.protocol_version, terms.run_id, stranger.identity.peer_id, stranger.victim.peer_id, bytes(16), b"", 0, 16, 100,
        stranger.victim.trainer.steps, 0, 1000, RunPhase.TRAIN, None, (), stage=terms.own_stage,
    )  # fmt: skip
    await stream.send(first.signed(stranger.identity))
    yield


async def peer_list(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Ask for members once."""
    terms = stranger.membership.terms
    request = FetchRequest(
        terms.protocol_version, terms.run_id, stranger.identity.peer_id, stranger.victim.peer_id, random.Random(1).randbytes(16),
        ContentsKind.PEER_LIST, 0, 4096, 0, None,
    )  # fmt: skip
    await stream.send(request.signed(stranger.identity))
    yield


async def peer_lists(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Ask for members every 20 s, for ever."""
    while stream._inbox.ended is None:
        async with aclosing(peer_list(stranger, stream)) as asking:
            async for _ in asking:
                yield
        for _ in range(2):
            with suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    while True:
                        await stream.receive()


async def lane(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Open a lane."""
    run, steps = stranger.run, stranger.victim.trainer.steps
    own = LaneSide(stranger.membership, steps, RunPhase.TRAIN, 8, (), run.network.now_s())
    assert stranger.victim.trainer.stage is not None
    await own.open(stream, stranger.victim.trainer.stage + 1, random.Random(1))
    yield


async def half_hop(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Open a lane and stop in the middle of a hop's bytes."""
    async with aclosing(lane(stranger, stream)) as opening:
        async for _ in opening:
            yield
    await stream.send(HopForward(1, stranger.identity.peer_id.raw[-16:], False, 0))
    await stream.send(Chunk(Part.TOKENS, 0, bytes(TOKEN_BYTES)))
    yield


async def whole_hop(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Open a lane, send one hop, and read no answer."""
    async with aclosing(half_hop(stranger, stream)) as sending:
        async for _ in sending:
            yield
    for offset in range(0, VALUE_BYTES, 1 << 18):
        await stream.send(Chunk(Part.ACTIVATIONS, offset, bytes(min(1 << 18, VALUE_BYTES - offset))))
        yield


async def slow_hops(stranger: Stranger, stream: Stream) -> AsyncGenerator[None, None]:
    """Open a lane, and send a hop every 25 s."""
    async with aclosing(whole_hop(stranger, stream)) as sending:
        async for _ in sending:
            yield
    for number in itertools.count(2):
        with suppress(TimeoutError):
            async with asyncio.timeout(25.0):
                while True:
                    await stream.receive()
        await stream.send(HopForward(number, random.Random(f"{stranger.identity.peer_id}{number}").randbytes(16), False, 0))
        await stream.send(Chunk(Part.TOKENS, 0, bytes(TOKEN_BYTES)))
        for offset in range(0, VALUE_BYTES, 1 << 18):
            await stream.send(Chunk(Part.ACTIVATIONS, offset, bytes(min(1 << 18, VALUE_BYTES - offset))))
        yield


POINTS: dict[str, tuple[Purpose, Say, int]] = {  # with the stage that the stranger claims
    "Meet, no message": (Purpose.MEET, nothing, 1),
    "Meet, Hello, then silence": (Purpose.MEET, hello, 1),
    "Fetch, no message": (Purpose.FETCH, nothing, 1),
    "Fetch, one request": (Purpose.FETCH, peer_list, 1),
    "Fetch, one request in 20 s": (Purpose.FETCH, peer_lists, 1),
    "Pass, no message": (Purpose.PASS, nothing, 0),
    "Pass, lane, then silence": (Purpose.PASS, lane, 0),
    "Pass, half a hop": (Purpose.PASS, half_hop, 0),
    "Pass, a hop, nothing read": (Purpose.PASS, whole_hop, 0),
    "Pass, a hop in 25 s": (Purpose.PASS, slow_hops, 0),
}


def swarm(folder: Path, num_strangers: int) -> StagedRun:
    """Return a driver and a holder of the last stage, and room for strangers on the list of members."""
    run = StagedRun(folder, 2, 2, others=[Identity(number.to_bytes(4, "little") * 8) for number in _keys(num_strangers)])
    for holder, stage in zip(run.holders, (0, 1), strict=True):
        holder.fits, holder.service_s = (stage,), SERVICE_S
    return run


def _keys(num_strangers: int) -> range:
    return range(FIRST_KEY, FIRST_KEY + KEYS_OF_ONE * max(1, num_strangers))


def lasts_s(name: str) -> float:
    """Return for how long one held call lasts."""
    found = [math.nan]

    async def story(run: StagedRun) -> None:
        purpose, say, stage = POINTS[name]
        await run.until(lambda: run.holders[1].trainer.steps >= 2)
        found[0] = await Stranger(run, run.holders[1], FIRST_KEY, stage).hold(purpose, say)

    with tempfile.TemporaryDirectory() as folder:
        play(swarm(Path(folder), 1), story)
    return found[0]


async def _hold_on(run: StagedRun, victim: Holder, keys: Iterator[int], purpose: Purpose, say: Say, stage: int) -> None:
    """Hold a call after the other, each under another key."""
    while True:
        with suppress(GossamerError):
            await Stranger(run, victim, next(keys), stage).hold(purpose, say)
        await asyncio.sleep(RETRY_S)


def under_pressure(name: str, num_strangers: int) -> tuple[int, int]:
    """Return what many held calls leave the honest driver: its steps and its window."""
    found: list[tuple[int, int]] = []

    async def story(run: StagedRun) -> None:
        driver, last = run.holders
        await run.until(lambda: driver.trainer.steps >= 10)
        keys, holding = itertools.cycle(_keys(num_strangers)), []
        if name:
            purpose, say, stage = POINTS[name]
            holding = [asyncio.create_task(_hold_on(run, last, keys, purpose, say, stage)) for _ in range(num_strangers)]
        await asyncio.sleep(60.0)
        steps = driver.trainer.steps
        await asyncio.sleep(PRESSURE_S)
        made = driver.trainer.steps - steps
        windows = [down.window for down in driver.pipeline.carrier.down.values()]
        found.append((made, max(windows, default=0)))
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)

    with tempfile.TemporaryDirectory() as folder:
        play(swarm(Path(folder), num_strangers), story)
    return found[0]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strangers", type=int, default=12)
    parser.add_argument("--points", nargs="*", default=list(POINTS), choices=list(POINTS), metavar="POINT")
    given = parser.parse_args()
    print(f"{'held at':<30}{'ends after, s':>15}")
    for name in given.points:
        print(f"{name:<30}{lasts_s(name):>15.0f}", flush=True)
    print(f"\n{given.strangers} strangers: held at{'':<9}{'steps':>8}{'window':>8}")
    for name in ["", *given.points]:
        steps, window = under_pressure(name, given.strangers)
        print(f"{name or 'no strangers':<30}{steps:>8}{window:>8}", flush=True)


if __name__ == "__main__":
    main()
