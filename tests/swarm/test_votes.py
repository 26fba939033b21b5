"""Votes need evidence: strangers without a meeting, each with an invite of its own, end no run, move no global step, send nobody away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from gossamer.protocol.limits import RECORD_ADDRESSES
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.tasks import cancel
from tests.swarm.sybils import HOST, Strangers, credential_of
from tests.swarm.test_evidence import mean_weights, state
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

TOTAL_STEPS = 20_000
INVITES = tiny_manifest(
    run={"total_steps": TOTAL_STEPS, "access": "invite", "issuers": [str(HOST.peer_id)]}, outer={"alpha": 0.0, "beta": 1.0, "gamma": 1.0}
)
FIRST_STEPS = 40
LATER_STEPS = 180  # by then a few more make little difference
ATTACK_S = 30.0  # the first of these stories ended five of five runs after 20 s
NUM_HONEST = 5
NUM_STRANGERS = 10  # more than there are honest peers


async def honest(swarm: Swarm) -> list[Peer]:
    """Start peers with an invite and a network each, and let them meet."""
    peers = [swarm.add() for _ in range(NUM_HONEST)]
    for number, peer in enumerate(peers, 1):
        peer.join_with(credential_of(swarm, peer.identity, number), place=number).start()
    await swarm.until(lambda: all(peer.trainer.replica.own_steps >= FIRST_STEPS and peer.num_completed >= 4 for peer in peers))
    return peers


def strangers(swarm: Swarm, peers: list[Peer], num: int, ahead_steps: int) -> Strangers:
    """Give each stranger an invite of its own; one claims the honest peers' networks in its records."""
    claims = tuple(peer.addresses[0] for peer in peers)[:RECORD_ADDRESSES]
    return Strangers(
        swarm, num, lambda: min(TOTAL_STEPS, max(peer.global_step for peer in peers) + ahead_steps), lambda: mean_weights(peers), claims
    )


def fast_weights(peers: list[Peer]) -> bytes:
    """Return the mean of what they have now: a result that is as good as any."""
    return state(torch.stack([torch.cat([one.fast() for one in peer.trainer.replica.fragments]) for peer in peers]).mean(0))


def cut_off(swarm: Swarm, others: list[Peer]) -> None:
    """Cut these off from the rest, and have them stand still: what they do matters no more."""
    swarm.network.partition([peer.peer_id for peer in others])
    for peer in others:
        peer.trainer.frozen = True


def steps_ahead(peers: list[Peer]) -> int:
    """Return by how much the peers' global steps exceed what they have trained."""
    return max(peer.global_step - peer.trainer.replica.own_steps for peer in peers)


def test_strangers_that_say_it_is_over_end_no_run(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = await honest(swarm)
        await swarm.until(lambda: peers[0].global_step >= LATER_STEPS)
        others = strangers(swarm, peers, NUM_STRANGERS, TOTAL_STEPS)
        others.finished, others.result_of = True, lambda: fast_weights(peers)
        work = asyncio.create_task(others.run())
        await asyncio.sleep(ATTACK_S)
        assert {peer.trainer.replica.phase for peer in peers} == {RunPhase.TRAIN}
        assert not any(peer.lifecycle.finished for peer in peers)
        assert steps_ahead(peers) <= INVITES.outer.nominal_steps
        await cancel(work)

    play(Swarm(tmp_path, manifest=INVITES), story)


def test_strangers_move_no_global_step_of_a_peer_that_is_cut_off(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        victim, *others = await honest(swarm)
        cut_off(swarm, others)
        work = asyncio.create_task(strangers(swarm, [victim, *others], NUM_STRANGERS, 5000).run())
        await asyncio.sleep(2 * ATTACK_S)
        assert steps_ahead([victim]) <= INVITES.outer.nominal_steps and not victim.transfers
        await cancel(work)

    play(Swarm(tmp_path, manifest=INVITES), story)


def test_refusals_of_strangers_send_nobody_back(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        victim, *others = await honest(swarm)
        await swarm.until(lambda: victim.global_step > 100)
        cut_off(swarm, others)
        behind = strangers(swarm, [victim, *others], NUM_STRANGERS, 0)
        behind.global_step_of = lambda: 1
        work = asyncio.create_task(behind.run())
        clocks = [victim.global_step]
        while len(clocks) < 2 * ATTACK_S:
            await asyncio.sleep(1.0)
            clocks.append(victim.global_step)
        assert clocks == sorted(clocks) and not victim.transfers
        await cancel(work)

    play(Swarm(tmp_path, manifest=INVITES), story)


def test_a_peer_restarted_among_many_strangers_follows_those_it_has_met(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = await honest(swarm)
        back = peers[0]
        back.save()
        back.home.peers.write_bytes(back.book.to_bytes(asyncio.get_running_loop().time()))
        back.kill()
        work = asyncio.create_task(strangers(swarm, peers[1:], NUM_STRANGERS, 5000).run())
        await asyncio.sleep(ATTACK_S)
        back.start()
        await swarm.until(
            lambda: back.global_step >= min(peer.global_step for peer in peers[1:]) - INVITES.outer.max_clock_gap_steps, within_s=60.0
        )
        await swarm.until(lambda: back.num_completed >= 6, within_s=60.0)
        assert back.global_step <= max(peer.global_step for peer in peers[1:]) + INVITES.outer.nominal_steps
        await cancel(work)

    play(Swarm(tmp_path, manifest=INVITES), story)
