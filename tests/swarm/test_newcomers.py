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
JOINER = {"waits_for_start": True, "is_founder": False}


@pytest.mark.parametrize("num_keys", [0, 1, 50])
def test_a_newcomer_gets_the_weights_that_most_heads_give(tmp_path: Path, num_keys: int) -> None:
    """Three honest peers came by three invites; the keys share a fourth."""

    async def story(swarm: Swarm) -> None:
        residents = [swarm.add() for _ in range(3)]
        for number, resident in enumerate(residents):
            resident.join_with(credential_of(swarm, resident.identity, number), place=number + 1).start()
        await swarm.until(lambda: min(resident.trainer.replica.own_steps for resident in residents) >= 60)
        noise = (torch.randn(residents[0].slow.shape, generator=torch.Generator().manual_seed(1)) * 0.3).bfloat16()
        weights = noise.view(torch.int16).numpy().tobytes()
        work = asyncio.create_task(Sybils(swarm, num_keys, lambda: residents[0].global_step, lambda: weights, invite=3).run())
        joiner = swarm.add(**JOINER)
        joiner.join_with(credential_of(swarm, joiner.identity, 0), place=9).start()
        await swarm.until(lambda: joiner.transfers, within_s=30.0)
        assert {*joiner.transfers[0].sources} <= {str(resident.peer_id) for resident in residents}
        assert any("sources" in reported.reason for reported in joiner.reported), "it says what it found"
        await swarm.until(lambda: joiner.num_completed >= 2)
        await cancel(work)

    play(Swarm(tmp_path, manifest=INVITES), story)
