"""Endings with restarts, unlike texts and a malicious writer: one result for all honest peers, the same bits."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from gossamer.peer.sync.pieces import RunResult
from gossamer.peer.sync.state_source import OF_RESULT
from gossamer.protocol.errors import PeerGone, RefusalCode
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.messages import FetchRequest, Refusal
from gossamer.protocol.streams.transport import Purpose, Stream
from tests.swarm.sybils import give
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

TOTAL_STEPS = 200
SPREADING = {"inner": {"learning_rate": 0.02}, "outer": {"inner_steps": 30}, "codec": {"name": "modulo4"}}  # far apart at the end
RESTARTS = (0, 1, 1, 2)
AWAY_S = (0.5, 4.0)  # a peer that stays away for longer may come back when all others have gone
DONE_S = 300.0
NOISE = (0.01, 0.03, 0.1)  # of the length of the weights, added to what a malicious writer gives
LIARS = ("", "", "one result", "another result for each")


def endings(number: int) -> float:
    """Play an ending; return by how many per cent the loss of the result, on the honest peers' texts, exceeds that of the mean of all."""
    draws, worse = random.Random(number), 0.0
    lie = draws.choice(LIARS)
    num_honest = draws.randint(3, 4) if lie else draws.randint(2, 4)

    async def story(swarm: Swarm) -> None:
        nonlocal worse
        texts = [draws.randrange(3) for _ in range(num_honest)]
        honest = [begin(swarm.add(text=text)) for text in texts]
        liars = [begin(swarm.add(text=draws.randrange(3)))] if lie else []
        lying = [asyncio.create_task(lies(swarm, liar, lie == "one result", draws)) for liar in liars]
        restarts = [asyncio.create_task(restart(swarm, draws.choice(honest), draws)) for _ in range(draws.choice(RESTARTS))]
        await swarm.until(lambda: all(peer.lifecycle.finished for peer in honest))
        mean = torch.stack([peer.fast for peer in swarm.peers]).mean(0)
        await swarm.until(lambda: all(peer.is_done for peer in honest) and all(task.done() for task in restarts), within_s=DONE_S)
        assert all(torch.equal(peer.fast, honest[0].fast) for peer in honest), "two results"
        assert all(task.done() for task in lying), "the malicious writer did not write"
        after = sum(peer.trainer.replica.program.losses().mean for peer in honest)
        for peer in honest:
            put(peer, mean)
        worse = 100.0 * (after / sum(peer.trainer.replica.program.losses().mean for peer in honest) - 1.0)

    with tempfile.TemporaryDirectory(prefix="endings-") as folder:
        play(Swarm(Path(folder), number, manifest=tiny_manifest(run={"total_steps": TOTAL_STEPS}, **SPREADING)), story)
    return worse


def begin(peer: Peer) -> Peer:
    """Start a peer whose trainer keeps what it saves."""
    peer.start()
    peer.trainer.on_save = peer.save
    return peer


def put(peer: Peer, fast: torch.Tensor) -> None:
    """Put weights, in the order of `Peer.fast`, into a peer's model."""
    with torch.no_grad():
        for parameter in peer.trainer.replica.parameters.values():
            parameter.copy_(fast[: parameter.numel()].view_as(parameter))
            fast = fast[parameter.numel() :]


async def restart(swarm: Swarm, peer: Peer, draws: random.Random) -> None:
    """Kill a peer or its trainer near the end of the run, and start it again from a checkpoint that is some steps old."""
    kills_trainer, saved = draws.random() < 0.4, TOTAL_STEPS - draws.choice((0, 2, 10, 100))
    later_s, away_s = draws.uniform(0.0, 4.0), draws.uniform(*AWAY_S)
    await swarm.until(lambda: peer.global_step >= saved)
    if peer.is_done or not swarm.network.is_up(peer.peer_id):
        return
    peer.save()
    await asyncio.sleep(later_s)
    if peer.is_done or not swarm.network.is_up(peer.peer_id) or not peer.link.is_up:
        return
    if kills_trainer:
        peer.kill_trainer()
    else:
        peer.home.peers.write_bytes(peer.book.to_bytes(asyncio.get_running_loop().time()))
        peer.kill()
    await asyncio.sleep(away_s)
    if kills_trainer:
        peer.restart_trainer()
        peer.trainer.on_save = peer.save
    else:
        begin(peer)


async def lies(swarm: Swarm, liar: Peer, is_one: bool, draws: random.Random) -> None:
    """From its end on, have a member give a result of its own at once, spoiled by noise: the same to all, or another to each."""
    await swarm.until(lambda: liar.lifecycle.finished, within_s=DONE_S)
    noise, seed = draws.choice(NOISE), draws.getrandbits(32)
    slow = torch.cat([one.fast() for one in liar.trainer.replica.fragments])
    num_rest = swarm.terms.state_bytes // 2 - slow.numel()
    made: dict[PeerId, tuple[RunResult, bytes]] = {}

    def spoiled(partner: PeerId) -> tuple[RunResult, bytes]:
        if partner not in made:
            generator = torch.Generator().manual_seed(seed if is_one else seed + len(made))
            away = torch.randn(slow.shape, generator=generator)
            values = torch.cat((slow + away * (noise * slow.norm() / away.norm()), torch.zeros(num_rest)))
            content = values.bfloat16().view(torch.int16).numpy().tobytes()
            made[partner] = RunResult.of(memoryview(content)), content
        return made[partner]

    honest: Callable[[Purpose, Stream], object] = liar.peer.answer

    async def answer(purpose: Purpose, stream: Stream) -> None:
        if purpose is Purpose.MEET:
            await honest(purpose, stream)  # type: ignore[misc]
            return
        with suppress(PeerGone):
            while isinstance(request := await stream.receive(), FetchRequest):
                if request.kind not in OF_RESULT:
                    await stream.send(Refusal(RefusalCode.NOT_READY))
                    return
                result, content = spoiled(stream.partner)
                await give(stream, liar.identity, request, result, content, TOTAL_STEPS)

    liar.peer.answer = answer
