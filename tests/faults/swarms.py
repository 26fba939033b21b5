"""Faults of whole swarms: partitions, lost bootstrap nodes, wrong clocks, churn, and very many meetings."""

from __future__ import annotations

import asyncio
import functools
import random
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.optim.fragments import scatter
from gossamer.peer.model.evaluation import held_out_loss
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.limits import RECORD_LIFETIME_S
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.messages import Refusal
from gossamer.protocol.streams.transport import Purpose
from tests.protocol.peers import Raw, nobody, send_raw
from tests.protocol.samples import changed
from tests.swarm import healing
from tests.swarm.healing import Resident, cut_and_heal, until_all_see_all
from tests.swarm.mallory import MALLORY, hello_to
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Swarm, play

HEALED_S = 60.0
CLOCKS_S = 300.0
LARGE = 100  # trials with 30 peers, the real directory and a partition of five minutes; all others are smaller and have no directory
QUIET = tiny_manifest(run={"total_steps": 100_000})


def cut(number: int) -> float:
    """Partition a swarm into two or three groups, once or repeatedly; return the seconds until each peer sees all others again."""
    if number < LARGE:
        healed = cut_and_heal(30, 300.0, number, directory=True)
        assert healed.bytes_per_s < 10_000
        assert healed.healed_s <= 2 * HEALED_S, f"healed after {healed.healed_s} s"
        return healed.healed_s
    draws, healed_s = random.Random(number), 0.0

    async def story(network: MemoryNetwork) -> list[Resident]:
        nonlocal healed_s
        first = Resident(network, 1000 * number + 1).start()
        others = [Resident(network, 1000 * number + 2 + n, [first.bootstrap]).start() for n in range(draws.randint(5, 11))]
        residents = [first, *others]
        await until_all_see_all(residents, 600.0)
        peers = [resident.peer_id for resident in draws.sample(residents, len(residents))]
        for _ in range(draws.choice((1, 1, 10))):
            ends = sorted(draws.sample(range(1, len(peers)), draws.choice((1, 2))))
            network.partition(*(peers[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)))
            await asyncio.sleep(draws.choice((1.0, 30.0, RECORD_LIFETIME_S + 30.0)))
            network.partition()
            await asyncio.sleep(draws.choice((0.0, 1.0)))
        healed_s = await until_all_see_all(residents, 2 * HEALED_S)
        return residents

    healing.play(story, number, jitter_s=0.05)
    return healed_s


def bootstraps_lost(number: int) -> float:
    """Kill every bootstrap node, before, during or after a restart; return the seconds until a peer is back by its address book."""
    draws, back_s = random.Random(number), 0.0
    when = draws.choice(("all dead at the start", "die in between", "come back"))

    async def story(network: MemoryNetwork) -> list[Resident]:
        nonlocal back_s
        bootstraps = [Resident(network, 1000 * number + n).start() for n in range(1, 3)]
        invited = [bootstrap.bootstrap for bootstrap in bootstraps]
        members = [Resident(network, 1000 * number + n, invited).start() for n in range(3, 9)]
        await until_all_see_all([*bootstraps, *members], 120.0)
        with tempfile.TemporaryDirectory(prefix="bootstraps-") as folder:
            saved = Path(folder) / "peers.json"
            saved.write_bytes(members[0].book.to_bytes(asyncio.get_running_loop().time()))
            members[0].stop()
            for bootstrap in bootstraps[: 1 if when == "die in between" else 2]:
                bootstrap.stop()
            await asyncio.sleep(draws.choice((1.0, 600.0, 3600.0)))
            again = Resident(network, 1000 * number + 3, invited, saved=saved).start()
            there = [again, *members[1:]]
            if when == "die in between":
                await asyncio.sleep(draws.uniform(0.0, 10.0))
                bootstraps[1].stop()
            elif when == "come back":
                await asyncio.sleep(draws.uniform(0.0, 60.0))
                bootstraps = [bootstrap.start() for bootstrap in bootstraps]
                there += bootstraps
            back_s = await until_all_see_all(there, HEALED_S)
        return there

    healing.play(story, number, jitter_s=0.05)
    return back_s


def clocks(number: int) -> float:
    """Set clocks wrong by up to an hour, or let them jump; return the seconds until each peer sees all others."""
    draws, seen_s = random.Random(number), 0.0

    async def story(network: MemoryNetwork) -> list[Resident]:
        nonlocal seen_s
        off_s = [0.0] * 8

        def clock(peer: int) -> Callable[[], float]:
            return lambda: network.now_s() + off_s[peer]

        num_wrong = draws.choice((1, 2, 3, 8))
        for peer in draws.sample(range(8), num_wrong):
            off_s[peer] = draws.choice((-3600.0, -60.0, -5.0, 5.0, 60.0, 3600.0))
        if num_wrong == 8 and draws.random() < 0.5:
            off_s[:] = [off_s[0]] * 8  # all wrong by the same amount
        places = [f"/ip4/{100 + peer}.0.0.1/tcp/4001" for peer in range(8)]
        first = Resident(network, 1000 * number + 1, address=places[0], now_s=clock(0)).start()
        others = [
            Resident(network, 1000 * number + 1 + peer, [first.bootstrap], address=places[peer], now_s=clock(peer)).start()
            for peer in range(1, 8)
        ]
        residents = [first, *others]
        seen_s = await until_all_see_all(residents, CLOCKS_S)
        for _ in range(draws.choice((0, 3))):
            peer = draws.randrange(8)
            off_s[peer] += draws.choice((-3600.0, -5.0, 5.0, 3600.0))
            await asyncio.sleep(draws.uniform(5.0, 60.0))
        await asyncio.sleep(30.0)
        await until_all_see_all(residents, CLOCKS_S)
        return residents

    healing.play(story, number, jitter_s=0.05)
    return seen_s


# --------------------------------------------------------------------------- with trainers

CHURN_PEERS = 20
CHURN_STEPS = 120
CHURN_RATES = (0.3, 0.5)
STEP_S = 0.25
ROUND_TURNS = 6  # mean countdown to a meeting
JUDGE_BATCHES = 40
WORSE = {0.3: 0.01, 0.5: 0.02}


def churn(number: int) -> float:
    """Take 30 or 50 % of the peers away in each round; return by how many per cent the loss of the mean weights is higher."""
    seed, rate = number // len(CHURN_RATES), CHURN_RATES[number % len(CHURN_RATES)]
    worse = _loss(seed, rate) / _loss(seed, 0.0) - 1.0
    assert worse <= WORSE[rate], f"{100 * worse:.2f} % worse at {rate:.0%}"
    return 100 * worse


@functools.lru_cache(maxsize=4)
def _loss(seed: int, rate: float) -> float:
    """Train a swarm for this many steps per peer; return the held-out loss of the mean of their weights."""
    found: list[float] = []
    torch.set_num_threads(1)

    async def story(swarm: Swarm) -> None:
        draws = random.Random(seed)
        peers = swarm.start(CHURN_PEERS)
        away: list[int] = []
        num_turns = 0
        while min(peer.trainer.replica.own_steps for peer in peers) < CHURN_STEPS:
            for peer in peers:  # every peer ends with the same number of steps
                peer.trainer.frozen = peer.trainer.replica.own_steps >= CHURN_STEPS
            if num_turns % ROUND_TURNS == 0:
                for index in away:
                    peers[index].start()
                left = [index for index, peer in enumerate(peers) if peer.trainer.replica.own_steps < CHURN_STEPS]
                away = draws.sample(left, round(rate * len(left)))
                for index in away:
                    peers[index].save()
                    peers[index].kill()
            num_turns += 1
            await asyncio.sleep(STEP_S)
        for peer in peers:
            assert set(peer.trainer.applied.values()) <= {1}, "applied twice"
            assert not peer.outcomes()["misbehaved"], "an honest peer was blamed"
        found.append(_held_out(swarm))

    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        play(Swarm(Path(folder), seed, manifest=QUIET), story)
    return found[0]


def _held_out(swarm: Swarm) -> float:
    replica = swarm.peers[0].trainer.replica
    mean: Tensor = torch.stack([peer.slow for peer in swarm.peers]).mean(0)
    for fragment in replica.fragments:
        scatter(fragment.codec.fragment, mean[: fragment.slow.numel()], replica.parameters)
        mean = mean[fragment.slow.numel() :]
    return held_out_loss(replica.program.model, replica.program.corpus, JUDGE_BATCHES)


SOAK = 10_000
MOST_MIB = 100.0


def soak(number: int) -> float:
    """Run very many meetings; return the growth of the process in MiB since the first ones."""
    grown: list[float] = []

    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        for peer in (a, b):
            peer.trainer.frozen = True
        await asyncio.sleep(25.0)
        before = 0.0
        for count in range(SOAK):
            assert await a.node.searches.search(count % 3)
            for peer in (a, b):
                peer.meetings.clear()
                peer.trainer.handled.clear()
                peer.link.reported.clear()
                assert set(peer.trainer.applied.values()) <= {1}, "applied twice"
                peer.trainer.applied.clear()
            if count == SOAK // 20:
                before = _resident_mib()
                sizes = len(asyncio.all_tasks()), len(a.book)
        await asyncio.sleep(10.0)
        assert len(asyncio.all_tasks()) <= sizes[0] and len(a.book) == sizes[1]
        assert not any(fragment.meeting is not None for peer in (a, b) for fragment in peer.trainer.replica.fragments)
        assert not [path for peer in (a, b) for path in peer.payloads.path("x").parent.iterdir()]
        grown.append(_resident_mib() - before)

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        play(Swarm(Path(folder), number, manifest=QUIET), story)
    assert grown[0] <= MOST_MIB, f"grown by {grown[0]:.0f} MiB"
    return grown[0]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def other_builds(number: int) -> None:
    """Let a peer of another version, run, codec or size call: it gets a refusal, no peer is banned, and the others still meet."""
    draws = random.Random(number)

    async def story(swarm: Swarm) -> None:
        peers = swarm.start(2)
        await swarm.until(lambda: all(peer.num_completed for peer in peers))
        transport = swarm.network.start_peer(MALLORY.peer_id, nobody)
        for called in peers:
            good = replace(hello_to(swarm, called.peer_id), global_step=called.global_step, signature=b"")
            strange = draws.choice(
                (
                    changed(good, protocol_version=draws.randint(2, 9)).signed(MALLORY),
                    changed(good, run_id=draws.randbytes(32)).signed(MALLORY),
                    replace(good, codec=good.codec + 1).signed(MALLORY),
                    replace(good, payload_bytes=good.payload_bytes + draws.randint(1, 999)).signed(MALLORY),
                    Raw(b"\x7a\x01x"),  # a message type that only a newer peer knows
                )
            )
            stream = await transport.connect(called.peer_id, (), Purpose.MEET)
            await stream.send(strange)
            answer = await stream.receive()
            assert isinstance(answer, Refusal) and answer.code is not RefusalCode.BAD_MESSAGE, answer
            assert not called.book.is_banned(MALLORY.peer_id, asyncio.get_running_loop().time())
        counts = [peer.num_completed for peer in peers]
        await swarm.until(lambda: all(peer.num_completed > count for peer, count in zip(peers, counts, strict=True)))

    with tempfile.TemporaryDirectory(prefix="builds-") as folder, pytest.MonkeyPatch.context() as patch:
        send_raw(patch)
        play(Swarm(Path(folder), number, manifest=QUIET), story)
