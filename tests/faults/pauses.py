"""Pauses and absences of every length: no peer loses steps because another was away, and all meet again."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from tests.faults.suite import Played
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

GAP_STEPS = 60  # of the tiny run's clocks
STEP_S = (0.15, 0.35)  # of a peer's inner step
AWAY_S = (1.0, 200.0)  # the longest is some ten gaps
TOGETHER_S = 180.0  # within which all meet again after the last return
QUIET = tiny_manifest(run={"total_steps": 100_000})


def pauses(number: int) -> Played:
    """Let some peers of a swarm be away, one after another or at once; return the seconds until all meet again, and the absences."""
    draws = random.Random(number)
    num_peers = draws.randint(2, 8)
    together_s, num_absences = 0.0, 0

    async def story(swarm: Swarm) -> None:
        nonlocal together_s, num_absences
        for _ in range(num_peers):
            swarm.add(step_s=draws.uniform(*STEP_S)).start()
        await swarm.until(lambda: all(peer.num_completed >= 3 and peer.global_step > 2 * GAP_STEPS for peer in swarm.peers))
        watching = asyncio.create_task(keep_steps(swarm))
        for _ in range(draws.randint(1, 2)):
            away = draws.sample(swarm.peers, draws.randint(1, num_peers - 1))
            at_once = draws.random() < 0.5
            seconds = draws.uniform(*AWAY_S) if draws.random() < 0.5 else draws.uniform(10.0, 40.0)
            num_absences += len(away)
            await asyncio.gather(*(be_away(peer, seconds if at_once else draws.uniform(*AWAY_S), draws) for peer in away))
        began_s = asyncio.get_running_loop().time()
        met = {peer: peer.num_completed for peer in swarm.peers}
        await swarm.until(
            lambda: watching.done() or (are_together(swarm) and all(peer.num_completed > met[peer] for peer in swarm.peers)),
            within_s=TOGETHER_S,
        )
        together_s = asyncio.get_running_loop().time() - began_s
        if watching.done():
            await watching
        watching.cancel()

    with tempfile.TemporaryDirectory(prefix="pauses-") as folder:
        play(Swarm(Path(folder), number, manifest=QUIET), story)
    return Played(together_s, num_absences)


async def keep_steps(swarm: Swarm) -> None:
    """Raise as soon as the global step of a peer that trains goes back."""
    most = dict.fromkeys(swarm.peers, 0)
    while True:
        for peer in swarm.peers:
            if peer.link.is_up:
                assert peer.global_step >= most[peer], f"peer {swarm.peers.index(peer)} went from step {most[peer]} to {peer.global_step}"
                most[peer] = peer.global_step
            else:
                most[peer] = 0  # it is away: it goes on from its checkpoint
        await asyncio.sleep(0.1)


def are_together(swarm: Swarm) -> bool:
    """Return whether any two peers may meet."""
    steps = [peer.global_step for peer in swarm.peers]
    return max(steps) - min(steps) <= GAP_STEPS


async def be_away(peer: Peer, seconds: float, draws: random.Random) -> None:
    """Pause a peer, or end it and start it again from what it has saved."""
    await asyncio.sleep(draws.uniform(0.0, 20.0))  # it may be away again before it has caught up
    pauses_only = draws.random() < 0.7
    peer.lifecycle.pause()
    await peer.node.meetings.until_quiet()
    peer.save()
    if pauses_only:
        peer.kill_trainer()
    else:
        peer.home.peers.write_bytes(peer.book.to_bytes(asyncio.get_running_loop().time(), peer.peer.time.local_s()))
        peer.kill()
    await asyncio.sleep(seconds)
    if pauses_only:
        peer.lifecycle.resume()
        peer.restart_trainer()
    else:
        peer.start()
