"""Faults of hops: holders that die at any event, frames that are spoiled, a stage that loses its last holder.

Most trials are of carriers among scripted trainers, in memory and virtual time (tests/peer/pipeline/carriers.py): what must always hold is
checked after every event of every holder there. Some are of real nodes.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gossamer.peer.pipeline.lane import FIRST_PATIENCE_S, MOST_PATIENCE_S
from gossamer.protocol.errors import BadMessage, PeerMisbehaved, Refused
from gossamer.protocol.messages.frames import from_frame, to_frame
from gossamer.protocol.messages.messages import Chunk, HopAnswer, HopForward, HopNotice, Message
from gossamer.protocol.streams.transport import Inbox, Purpose
from tests.faults.damage import damaged
from tests.peer.pipeline.carriers import World
from tests.swarm.holders import Holder as Peer
from tests.swarm.holders import StagedRun, play

NODES = 16  # every so many trials one is of real nodes
PROGRESS_S = 30.0  # after the last fault, with one live path
QUIET_S = 3 * MOST_PATIENCE_S  # for all hops to end once none begins
CALM_EVENTS_PER_S = 50  # at most, of all holders together, while a stage is lost
ABSENCES_S = (1.0, 3600.0)
KINDS = ("flipped", "cut short", "twice", "swapped", "of an earlier hop", "lost")


def killed(number: int) -> float:
    """Kill holders, their trainers or lanes at any event of a hop; return the seconds from the last fault to a driver's progress."""
    draws = random.Random(number)
    if number % NODES == 0:
        return killed_node(number, draws)
    world = drawn_world(number, draws)
    for _ in range(draws.randint(1, 4)):
        world.run_until(world.now_s + draws.uniform(1.0, 6.0), lambda: strike(world, draws), world.num_events + draws.randint(1, 900))
    return settled(world)


def drawn_world(number: int, draws: random.Random) -> World:
    return World(draws.randint(2, 4), draws.randint(1, 3), number)


def strike(world: World, draws: random.Random) -> None:
    """Kill something that lives."""
    holder = draws.choice([holder for holder in world.holders if holder.is_alive] or world.holders)
    match draws.choice(("holder", "node", "trainer", "lane")):
        case "lane" if holder.wires:
            world.cut(draws.choice(list(holder.wires.values())))
        case "trainer" if holder.is_alive:
            world.kill_trainer(holder)
        case "node" if holder.is_alive:
            world.kill(holder, node_only=True)
        case _ if holder.is_alive:
            world.kill(holder)


def settled(world: World, within_s: float = PROGRESS_S, *, is_honest: bool = True) -> float:
    """See that a driver makes progress, and that nothing is left of any hop once none begins; return the seconds of the first."""
    took_s = world.run_until_trained(within_s)
    world.stop()
    began_s = world.now_s
    while any(holder.carrier.hops or not holder.is_alive for holder in world.holders):
        world.run_until(world.now_s + 1.0)
        assert world.now_s - began_s <= QUIET_S, "a hop does not end"
    world.run_until(world.now_s + 5.0)  # for the replies of trainers to withdrawn requests
    for holder in world.holders:
        assert not holder.carrier.hops and not holder.files and not holder.begun
        assert not (is_honest and holder.faults), f"{holder.name} blames a partner: {holder.faults}"
    return took_s


# ---------------------------------------------------------------------- frames


class Tampering:
    """Spoils the k-th frame about a hop, and a later one at times. What no reader accepts arrives as its error."""

    def __init__(self, draws: random.Random) -> None:
        self.draws, self.num_frames = draws, 0
        self.kinds = {draws.randint(1, 4000): draws.choice(KINDS) for _ in range(draws.randint(1, 3))}
        self.earlier: list[bytes] = []
        self._held: bytes | None = None

    @property
    def is_over(self) -> bool:
        return self.num_frames >= max(self.kinds) and self._held is None

    def change(self, frame: bytes) -> list[bytes]:
        """Return the frames that arrive instead."""
        self.num_frames += 1
        held, self._held = self._held, None
        kind = self.kinds.get(self.num_frames, "")
        if held is not None:
            return [frame, held]
        if self.draws.random() < 0.1 and len(self.earlier) < 100:
            self.earlier.append(frame)
        return self._spoilt(frame, kind) if kind else [frame]

    def _spoilt(self, frame: bytes, kind: str) -> list[bytes]:
        match kind:
            case "swapped":
                self._held = frame
                return []
            case "of an earlier hop":
                return [self.draws.choice(self.earlier or [frame])]
        return damaged(frame, kind, self.draws)

    def read(self, message: Message) -> list[Message | PeerMisbehaved]:
        """Return what a reader makes of the frames that arrive in place of a message. An unknown kind of message ends a lane too."""
        read: list[Message | PeerMisbehaved] = []
        for frame in self.change(to_frame(message)):
            try:
                read.append(from_frame(frame))
            except PeerMisbehaved as error:
                read.append(error)
            except Refused as refused:
                read.append(PeerMisbehaved(str(refused)))
        return read


def tampered(number: int) -> float:
    """Spoil up to three frames of hops; return the seconds from the last one to a driver's progress."""
    draws = random.Random(number)
    tampering = Tampering(draws)
    if number % NODES == 0:
        return tampered_nodes(number, tampering)
    world = drawn_world(number, draws)
    world.tamper = tampering.read
    while not tampering.is_over:
        world.run_until(world.now_s + 0.25)
        assert world.now_s < 600.0, "no frames any more"
    return settled(world, PROGRESS_S + FIRST_PATIENCE_S, is_honest=False)  # the bytes of a lost frame are waited for


# ---------------------------------------------------------------------- a lost stage


def lost(number: int) -> float:
    """Kill all holders of a stage, for a second or for an hour; return the seconds from the first return to a driver's progress."""
    draws = random.Random(number)
    world, away_s = drawn_world(number, draws), draws.choice(ABSENCES_S)
    world.run_until(draws.uniform(2.0, 8.0))
    victims = draws.choice(world.stages)
    back_s = world.now_s + away_s + 5.0
    for victim in victims:
        world.run_until(world.now_s + draws.choice((0.0, 0.1, 2.0)), at_event=0)
        world.kill(victim, back_s - world.now_s + draws.choice((0.0, 0.0, 20.0)) * (victim is not victims[0]))
    if away_s > 60.0:
        world.run_until(world.now_s + 3 * MOST_PATIENCE_S)
        trained, num_events, rests_s = world.trained, world.num_events, world.now_s
        world.run_until(back_s - 1.0)
        assert world.trained == trained
        assert world.num_events - num_events <= CALM_EVENTS_PER_S * (world.now_s - rests_s), "somebody spins"
        for holder in world.holders:
            assert holder.stage == 0 or not holder.is_alive or not holder.carrier.hops, "a hop is kept for an hour"
    world.run_until(back_s)
    return settled(world)


# ---------------------------------------------------------------------- real nodes


def killed_node(number: int, draws: random.Random) -> float:
    """Kill a holder of six, or its trainer, at a message of a lane; return the seconds until the drivers go on."""
    stage, kills_trainer = draws.randrange(3), draws.random() < 0.3
    took_s = 0.0

    async def story(run: StagedRun) -> None:
        nonlocal took_s
        victim = draws.choice(run.of(stage))
        run.network.counted = frozenset({Purpose.PASS})
        side, num_later = draws.choice(("sent", "received")), draws.randint(1, 60)
        counts = run.network.counts[victim.peer_id]
        at = getattr(counts, f"num_{side}") + num_later
        if kills_trainer:
            await run.until(lambda: getattr(counts, f"num_{side}") >= at)
            victim.trainer.kill()
        else:
            run.network.kill_at(victim.peer_id, **{side: at}, is_delivered=draws.random() < 0.5)
            await run.until(lambda: not run.network.is_up(victim.peer_id))
        took_s = await goes_on(run, [driver for driver in run.of(0) if driver is not victim])
        if kills_trainer:
            victim.trainer.added.clear()
            victim.trainer.is_up = True
        else:
            victim.start()
        served = len(victim.trainer.served_s)
        await run.until(lambda: len(victim.trainer.served_s) > served + 4)
        await rests(run)

    _play(number, 6, story)
    return took_s


def tampered_nodes(number: int, tampering: Tampering) -> float:
    """Spoil frames between real nodes; return the seconds until a driver goes on."""
    took_s, put = 0.0, Inbox.put

    async def story(run: StagedRun) -> None:
        nonlocal took_s

        def put_changed(inbox: Inbox, frame: bytes) -> None:
            for one in tampering.change(frame) if _is_of_hop(frame) else [frame]:
                put(inbox, one)

        tampering.kinds = {1 + at % 60: kind for at, kind in tampering.kinds.items()}  # there are fewer frames
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inbox, "put", put_changed)
            await run.until(lambda: tampering.is_over)
        took_s = await goes_on(run, run.of(0), any)  # each spoiled frame bans a partner, so some driver may have no path left
        await rests(run)

    _play(number, 6, story)
    return took_s


def _is_of_hop(frame: bytes) -> bool:
    """Return whether this is a frame about a hop: no end, and no bytes of a bulk stream."""
    try:
        return len(frame) > 0 and isinstance(from_frame(frame), HopForward | HopAnswer | HopNotice | Chunk)
    except BadMessage:
        return False


async def goes_on(run: StagedRun, drivers: list[Peer], how_many: Callable[[Iterable[bool]], bool] = all) -> float:
    """Wait until each of these drivers, or any, has trained a batch more; return the seconds."""
    began_s = asyncio.get_running_loop().time()
    before = {driver: driver.trainer.steps for driver in drivers}
    await run.until(lambda: how_many(driver.trainer.steps > steps for driver, steps in before.items()), PROGRESS_S)
    return asyncio.get_running_loop().time() - began_s


async def rests(run: StagedRun) -> None:
    """End the drivers' part, and see that no hop and no file is left."""
    for driver in run.of(0):
        driver.peer.stop()
    await run.until(lambda: all(holder.pipeline.carrier.is_quiet for holder in run.holders), QUIET_S)
    await asyncio.sleep(5.0)  # for the replies of trainers to withdrawn requests
    assert not [file for holder in run.holders for file in holder.payloads.path("").glob("hop-*")]


def _play(number: int, num_holders: int, story: Callable[[StagedRun], object]) -> None:
    with tempfile.TemporaryDirectory(prefix="hops-") as folder:
        play(StagedRun(Path(folder), 3, num_holders, number), story)  # type: ignore[arg-type]
