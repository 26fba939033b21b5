"""One meeting of two peers with a death in it: who dies, when, how, and what both are afterwards.

Both trainers stand still between the boundaries, so that a state is either the one before the meeting or the one after it, hash for hash;
the state after it is taken from the same meeting without a death. Then the dead one comes back; on demand a third peer joins and training
goes on.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gossamer.peer.link import messages
from gossamer.peer.meeting.machine import DOUBT_S
from gossamer.protocol import limits
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.streams.transport import Purpose
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Habits, Peer, Swarm

FRAGMENT = 1
FIRST_STEPS = 2
QUICK_S = 2.0
LATE_S = DOUBT_S + 3.0  # a return after nobody asks any more
ENDED_S = DOUBT_S + 7.0  # by then every deadline has passed
CHUNK_BYTES = 2048  # so that a payload takes several


@dataclass(frozen=True)
class Death:
    """Which peer dies (0 initiates), at which of its messages, and when it comes back."""

    victim: int
    sent: int | None = None
    received: int | None = None
    handled: int | None = None  # its trainer's k-th request, right after it was carried out
    is_delivered: bool = False
    back_s: float = QUICK_S
    what: str = "peer"  # peer, node or trainer
    seed: int = 0  # of the swarm: what is drawn as nonces, and what is delayed


@dataclass(frozen=True)
class Result:
    """What became of the two."""

    before: tuple[str, str]
    at_death: str  # hash of the victim's replica when it died
    after: tuple[str, str]  # hashes once everything is settled; a victim that lost its trainer has come back as before the meeting
    decided: tuple[bool, bool]  # by their journals
    num_messages: tuple[tuple[int, int], tuple[int, int]]  # sent and received
    num_handled: tuple[int, int]


def trial(codec: str, death: Death | None, *, goes_on: bool = False, seed: int = 0) -> Result:
    """Let one meeting with one death happen."""
    seed = death.seed if death is not None else seed
    with tempfile.TemporaryDirectory(prefix="trial-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHUNK_BYTES", CHUNK_BYTES)
        swarm = Swarm(Path(folder), seed, manifest=tiny_manifest(codec={"name": codec}))
        swarm.network.counted = frozenset({Purpose.MEET})
        swarm.kills_nodes_only = death is not None and death.what == "node"
        return virtual_time.run(_play(swarm, death, goes_on))


@functools.lru_cache(maxsize=16)
def undisturbed(codec: str, seed: int = 0) -> Result:
    """The same meeting without a death."""
    result = trial(codec, None, seed=seed)
    assert result.decided == (True, True)
    assert result.before[0] != result.after[0] and result.before[1] != result.after[1]
    return result


async def two_that_stand_still(swarm: Swarm) -> tuple[Peer, Peer]:
    """Start two peers that have trained a little, know each other, and make no step."""
    peers = swarm.add(Habits(step_s=0.2)), swarm.add(Habits(step_s=0.2))
    for peer in peers:
        _train(peer, FIRST_STEPS)
        peer.trainer.frozen = True
        peer.save()
        peer.start()
    for peer, other in (peers, peers[::-1]):
        peer.book.add_address(other.peer_id, "/ip4/192.0.2.1/tcp/4001", 0.0)
    await asyncio.sleep(1.0)
    return peers


async def _play(swarm: Swarm, death: Death | None, goes_on: bool) -> Result:
    peers = await two_that_stand_still(swarm)
    before = peers[0].hash, peers[1].hash
    trainers = [peer.trainer for peer in peers]
    lines = [swarm.network.counts[peer.peer_id] for peer in peers]
    if death is not None:
        _condemn(swarm, peers[death.victim], death)
    meeting = asyncio.create_task(peers[0].node.meetings.try_next(FRAGMENT, set()))
    at_death = "" if death is None else await _bring_back(swarm, peers[death.victim], death)
    await asyncio.sleep(ENDED_S)
    meeting.cancel()
    result = Result(
        before,
        at_death,
        (peers[0].hash, peers[1].hash),
        (peers[0].has_decided, peers[1].has_decided),
        ((lines[0].num_sent, lines[0].num_received), (lines[1].num_sent, lines[1].num_received)),
        (len(trainers[0].handled), len(trainers[1].handled)),
    )
    if goes_on:
        await go_on(swarm, peers)
    for trainer in (*trainers, *(peer.trainer for peer in swarm.peers)):
        assert set(trainer.applied.values()) <= {1}, "a meeting was applied twice"
    swarm.check()
    await swarm.close()
    return result


def _train(peer: Peer, num_steps: int) -> None:
    for _ in range(num_steps):
        peer.trainer.replica.inner_step()


def _condemn(swarm: Swarm, victim: Peer, death: Death) -> None:
    if death.handled is None:
        swarm.network.kill_at(victim.peer_id, sent=death.sent, received=death.received, is_delivered=death.is_delivered)
        return
    kill: Callable[[], None] = victim.kill_trainer if death.what == "trainer" else victim.kill
    left = death.handled

    def strike(_: messages.Reply) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            kill()

    victim.trainer.on_handled = strike


async def _bring_back(swarm: Swarm, victim: Peer, death: Death) -> str:
    await swarm.until(lambda: not victim.link.is_up, within_s=ENDED_S)
    await asyncio.sleep(0)
    at_death = victim.hash
    await asyncio.sleep(death.back_s)
    if death.what == "node":
        victim.start_node()
    elif death.what == "trainer":
        victim.restart_trainer()
    else:
        assert not swarm.network.is_up(victim.peer_id)
        victim.start()
    victim.trainer.frozen = True
    return at_death


async def go_on(swarm: Swarm, peers: Sequence[Peer]) -> None:
    """Train on, with a third peer: all of these must meet it."""
    third = swarm.add()
    _train(third, FIRST_STEPS)
    third.start()
    for peer in peers:
        peer.trainer.frozen = False
    await swarm.until(lambda: all(str(third.peer_id) in peer.partners() for peer in peers))


def check(codec: str, death: Death, result: Result) -> None:
    """Both are as before the meeting or as after it, and no state differs from its journal."""
    post = undisturbed(codec, death.seed).after
    for index in (0, 1):
        assert result.after[index] in (result.before[index], post[index]), f"between: {death}"
        if index == death.victim and death.what != "node":
            assert result.after[index] == result.before[index]  # back from its checkpoint
        else:
            assert (result.after[index] == post[index]) == result.decided[index], f"state and journal differ: {death}"
    assert result.at_death in (result.before[death.victim], post[death.victim]), f"died in between: {death}"
    assert result.at_death == result.before[death.victim] or result.decided[death.victim]
    assert result.decided[0] or not result.decided[1], f"the responder counts what the initiator did not decide: {death}"


def deaths(codec: str, victim: int, *, what: str = "peer", back_s: float = QUICK_S, seed: int = 0) -> list[Death]:
    """Every death at a message of this meeting: lost with what was under way, delivered all the same, or at what arrives."""
    num_sent, num_received = undisturbed(codec, seed).num_messages[victim]
    death = Death(victim, back_s=back_s, what=what, seed=seed)
    sent = [replace(death, sent=k, is_delivered=delivered) for k in range(1, num_sent + 1) for delivered in (False, True)]
    return sent + [replace(death, received=k) for k in range(1, num_received + 1)]


def one_sided(results: list[Result]) -> Counter[tuple[bool, bool]]:
    """Count the meetings that only one of the two has decided to count."""
    return Counter(result.decided for result in results if result.decided[0] != result.decided[1])
