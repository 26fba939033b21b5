"""Whom a newcomer believes: it compares sources of different heads before it takes a state, and judges the state by its own text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from gossamer.protocol.tasks import cancel
from tests.swarm.sybils import HOST, Sybils, credential_of
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm, play

INVITES = tiny_manifest(run={"total_steps": 100_000, "access": "invite", "issuers": [str(HOST.peer_id)]})
JOINER = {"told_to_start": True, "is_founder": False}


@pytest.mark.parametrize("num_keys", [0, 1, 50])
def test_a_newcomer_gets_the_weights_that_most_heads_give(tmp_path: Path, num_keys: int) -> None:
    """Three honest peers came by three invites; the keys share a fourth."""

    async def story(swarm: Swarm) -> None:
        elders = [swarm.add() for _ in range(3)]
        for number, elder in enumerate(elders):
            elder.join_with(credential_of(swarm, elder.identity, number), place=number + 1).start()
        await swarm.until(lambda: min(elder.trainer.replica.own_steps for elder in elders) >= 60)
        noise = (torch.randn(elders[0].slow.shape, generator=torch.Generator().manual_seed(1)) * 0.3).bfloat16()
        weights = noise.view(torch.int16).numpy().tobytes()
        work = asyncio.create_task(Sybils(swarm, num_keys, lambda: elders[0].clock, lambda: weights, invite=3).run())
        joiner = swarm.add(**JOINER)
        joiner.join_with(credential_of(swarm, joiner.identity, 0), place=9).start()
        await swarm.until(lambda: joiner.clones, within_s=30.0)
        assert {*joiner.clones[0].sources} <= {str(elder.peer_id) for elder in elders}
        assert any("sources" in said.reason for said in joiner.said), "it says what it found"
        await swarm.until(lambda: joiner.outcomes()["completed"] >= 2)
        await cancel(work)

    play(Swarm(tmp_path, manifest=INVITES), story)
