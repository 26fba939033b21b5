"""Joining late, starting together, finishing, and leaving."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from gossamer.peer.meeting.interface import MeetingState
from gossamer.peer.sync import pieces
from gossamer.protocol.errors import RefusalCode, RunRefusesUs, SwarmUnreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.messages.messages import Refusal, RunPhase
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import loop_s
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import ADDRESSES, Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
JOINER = {"waits_for_start": True, "is_founder": False}


def adopted(joiner: Peer, source: Peer) -> bool:
    """Return whether the joiner has just taken over this source's weights and momentum."""
    pairs = zip(joiner.trainer.replica.fragments, source.trainer.replica.fragments, strict=True)
    return all(as_sent(theirs.slow, own.slow) and as_sent(theirs.momentum, own.momentum) for own, theirs in pairs)


def as_sent(sent: torch.Tensor, got: torch.Tensor) -> bool:
    return torch.equal(sent.bfloat16().float(), got)


def group(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# --------------------------------------------------------------------------- joining


def test_a_late_joiner_takes_weights_momentum_and_global_step_and_warms_up_again(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        residents = swarm.start(2)
        await swarm.until(lambda: all(peer.num_completed >= 4 and peer.global_step > 40 for peer in residents))
        for peer in residents:
            peer.trainer.frozen = True
        await asyncio.sleep(12.0)
        joiner = swarm.add(**JOINER)
        joiner.trainer.frozen = True
        joiner.start()
        assert joiner.lifecycle.refusal is RefusalCode.NOT_READY
        await swarm.until(lambda: joiner.trainer.started)
        assert any(adopted(joiner, source) for source in residents)
        assert 0 <= residents[0].global_step - joiner.global_step <= 10, "as the source's node last received, a second ago at most"
        assert torch.equal(joiner.fast, torch.cat([p.detach().flatten() for p in joiner.trainer.replica.parameters.values()]))
        rates = [peer.trainer.replica.steps_since_join() for peer in (joiner, residents[0])]
        assert rates[0] == 0 < rates[1], "its learning rate starts low again"
        for peer in swarm.peers:
            peer.trainer.frozen = False
        await swarm.until(lambda: len(joiner.partners()) == 2)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_joiner_begins_no_meeting_before_it_has_weights(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        resident = swarm.add().start()
        await swarm.until(lambda: resident.trainer.replica.own_steps >= 10)
        swarm.network.kill_at(resident.peer_id, sent=10_000)
        joiner = swarm.add(**JOINER).start()
        swarm.network.refuse(resident.peer_id)
        resident.book.add_address(joiner.peer_id, "/ip4/192.0.2.1/tcp/4001", loop_s())
        await asyncio.sleep(20.0)
        assert not joiner.trainer.started and not joiner.meetings
        assert resident.outcomes()["refused"] >= 1
        swarm.network.refuse(resident.peer_id, False)
        await swarm.until(lambda: joiner.num_completed >= 2)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_transfer_continues_after_its_sources_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2000)

    async def story(swarm: Swarm) -> None:
        *doomed, last = swarm.start(3)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in swarm.peers))
        for peer in swarm.peers:
            peer.trainer.frozen = True
        await asyncio.sleep(12.0)
        for peer, num_more in zip(doomed, (6, 9), strict=True):
            swarm.network.kill_at(peer.peer_id, sent=swarm.network.counts[peer.peer_id].num_sent + num_more, is_delivered=True)
        swarm.network.refuse(last.peer_id)  # so that both others are asked before it
        joiner = swarm.add(**JOINER).start()
        joiner.trainer.frozen = True
        await swarm.until(lambda: not any(swarm.network.is_up(peer.peer_id) for peer in doomed))
        assert not joiner.trainer.started
        swarm.network.refuse(last.peer_id, False)
        await swarm.until(lambda: joiner.transfers)
        (transferred,) = joiner.transfers
        assert str(last.peer_id) == transferred.sources[0] and transferred.fetched_bytes == transferred.num_bytes
        assert not list((tmp_path / "peer-4" / "downloads").iterdir()), "half a state is left behind"

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_joiner_waits_for_sources_that_have_not_begun(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        host = swarm.add(waits_for_start=True, wait_for_peers=2).start()
        joiners = [swarm.add(**JOINER).start()]
        await asyncio.sleep(100.0)
        assert not host.trainer.started and not joiners[0].trainer.started and joiners[0].failure is None
        assert any("waiting for peers: 1 seen, 2 wanted" in reported.reason for reported in host.reported)
        joiners.append(swarm.add(**JOINER).start())
        await swarm.until(lambda: all(peer.trainer.started for peer in swarm.peers), within_s=30.0)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in swarm.peers))
        assert max(peer.global_step for peer in swarm.peers) - min(peer.global_step for peer in swarm.peers) < 60

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_founder_that_lost_its_disk_takes_over_the_run_that_goes_on(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        founder = swarm.add(waits_for_start=True).start()
        await swarm.until(lambda: founder.trainer.started)
        rest = [swarm.add(**JOINER).start() for _ in range(2)]
        await swarm.until(lambda: all(peer.num_completed >= 3 for peer in swarm.peers))
        founder.kill()
        await asyncio.sleep(25.0)
        founder.start()  # without a checkpoint
        await swarm.until(lambda: founder.trainer.started)
        assert founder.global_step >= min(peer.global_step for peer in rest) - 20

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_an_unreachable_swarm_is_reported_after_a_minute(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        joiner = swarm.add(**JOINER).start()
        await asyncio.sleep(55.0)
        assert joiner.failure is None
        await asyncio.sleep(20.0)
        failure = group(joiner.failure)
        assert isinstance(failure, SwarmUnreachable) and failure.hint
        joiner.failure = None

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_joiner_of_a_paused_run_blames_no_network(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        host = swarm.start(1)[0]
        await swarm.until(lambda: host.trainer.replica.own_steps >= 40)
        host.lifecycle.pause()
        await asyncio.sleep(5.0)
        joiner = swarm.add(**JOINER).start()
        await asyncio.sleep(75.0)
        failure = group(joiner.failure)
        assert isinstance(failure, SwarmUnreachable) and "those in sight are paused" in str(failure) and "resumed" in failure.hint
        joiner.failure = None

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_a_joiner_goes_on_with_other_peers_when_its_host_dies(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        host, member = swarm.start(2)
        await swarm.until(lambda: member.trainer.replica.own_steps >= 40)
        joiner = swarm.add(**JOINER, is_blind=True, bootstraps=(f"{ADDRESSES[0]}/p2p/{host.peer_id}",)).start()
        await swarm.until(lambda: joiner.peer.member)
        await asyncio.sleep(1.0)
        host.kill()
        await swarm.until(lambda: joiner.partners()[str(member.peer_id)] >= 2, within_s=40.0)
        assert joiner.transfers, "it began from the seed"

    play(Swarm(tmp_path, manifest=QUIET), story)


async def unfriendly(purpose: Purpose, stream: Stream) -> None:
    await stream.receive()
    await stream.send(Refusal(RefusalCode.NOT_INVITED, "go away"))
    stream.close()


@pytest.mark.parametrize("num_friends", [0, 1])
def test_a_joiner_gives_up_only_when_all_peers_refuse_it(tmp_path: Path, num_friends: int) -> None:
    async def story(swarm: Swarm) -> None:
        friends = swarm.start(num_friends)
        await asyncio.sleep(1.0)
        strangers = [Identity(bytes([99, number] * 16)) for number in range(2)]
        for stranger in strangers:
            swarm.network.start_peer(stranger.peer_id, unfriendly)
        joiner = swarm.add(**JOINER).start()
        for other in (*(friend.peer_id for friend in friends), *(stranger.peer_id for stranger in strangers)):
            joiner.book.add_address(other, "/ip4/192.0.2.1/tcp/4001", loop_s())
        await asyncio.sleep(15.0)
        if friends:
            assert joiner.trainer.started
        else:
            assert isinstance(group(joiner.failure), RunRefusesUs)
            joiner.failure = None

    play(Swarm(tmp_path, manifest=QUIET), story)


# --------------------------------------------------------------------------- the end


@pytest.mark.parametrize("speeds", [(0.25, 0.25, 0.25, 0.25), (0.15, 0.2, 0.3, 0.6)])
def test_finishing_leaves_all_peers_with_the_same_weights(tmp_path: Path, speeds: tuple[float, ...]) -> None:
    async def story(swarm: Swarm) -> None:
        peers = [swarm.add(step_s=step_s).start() for step_s in speeds]
        await swarm.until(lambda: peers[0].trainer.replica.phase is RunPhase.FINISH)
        apart = max(float((peer.fast - peers[0].fast).norm()) for peer in peers)
        await swarm.until(lambda: all(peer.is_done for peer in peers), within_s=150.0)
        assert apart > 0.0
        for peer in peers:
            assert torch.equal(peer.fast, peers[0].fast), "the result is not the same at all"
            assert torch.equal(peer.slow, torch.cat([f.slow for f in peer.trainer.replica.fragments]))
            assert peer.global_step == 60 and peer.trainer.replica.phase is RunPhase.FINISH

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 60})), story)


def test_the_last_one_alone_finishes_too(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peer = swarm.add().start()
        await swarm.until(lambda: peer.is_done, within_s=40.0)
        assert not peer.partners()

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 20})), story)


def test_a_peer_that_dies_at_the_end_does_not_hold_the_others(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peers = swarm.start(3)
        await swarm.until(lambda: peers[0].global_step >= 25)
        peers[2].kill()
        await swarm.until(lambda: all(peer.is_done for peer in peers[:2]), within_s=120.0)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 40})), story)


def test_a_trainer_that_restarts_at_the_end_is_still_notified(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        peer = swarm.add().start()
        await swarm.until(lambda: peer.lifecycle.finished)
        peer.save()
        peer.kill_trainer()  # the word that it is over goes nowhere
        await asyncio.sleep(20.0)
        assert not peer.is_done
        peer.restart_trainer()
        await swarm.until(lambda: peer.is_done, within_s=10.0)

    play(Swarm(tmp_path, manifest=tiny_manifest(run={"total_steps": 20})), story)


# --------------------------------------------------------------------------- leaving


LEAVING = [  # where the meeting is then, at which rate, and how it ends
    (MeetingState.OPENING, 1e6, None),  # of a call that nobody has heard of nothing is told
    (MeetingState.EXCHANGING, 2e3, "abandoned"),
    (MeetingState.GREETING, 200.0, "abandoned"),
    (MeetingState.APPLYING, 1e6, "completed"),
]


@pytest.mark.parametrize(("state", "bytes_per_s", "outcome"), LEAVING)
def test_leaving_finishes_or_drops_within_the_grace_time(
    tmp_path: Path, state: MeetingState, bytes_per_s: float, outcome: str | None
) -> None:
    async def story(swarm: Swarm) -> None:
        a, b, c = swarm.start(3)
        await swarm.until(lambda: any(active.meeting.state is state for active in a.node.meetings.active.values()), within_s=60.0)
        began_s, num_before = loop_s(), len(a.meetings)
        await a.leave(3.0)
        assert loop_s() - began_s < 3.0 + 1.5
        assert outcome is None or outcome in [done.outcome for done in a.meetings[num_before:]]
        for peer in (b, c):
            peer.trainer.frozen = True
        await asyncio.sleep(35.0)
        taken = sum((peer.trainer.applied for peer in swarm.peers), Counter[str]())
        assert set(taken.values()) <= {2}, "an outer step that one side took and the other did not"
        assert sum(peer.partners()[str(a.peer_id)] for peer in (b, c)) == a.num_completed
        assert all(fragment.meeting is None for peer in (b, c) for fragment in peer.trainer.replica.fragments)

    play(Swarm(tmp_path, manifest=QUIET, wire=Wire(latency_s=0.05, bytes_per_s=bytes_per_s)), story)


def test_a_peer_that_left_is_not_asked_again(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        a, b, c = swarm.start(3)
        await swarm.until(lambda: all(peer.num_completed >= 2 for peer in swarm.peers))
        await a.node.meetings.leave(3.0)
        await a.presence.leave(1.0)
        await asyncio.sleep(25.0)
        for peer in (b, c):
            assert a.peer_id not in [entry.peer_id for entry in peer.book.live(loop_s())]
        assert not a.node.meetings.active

    play(Swarm(tmp_path, manifest=QUIET), story)
