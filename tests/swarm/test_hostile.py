"""Partners and callers that lie, shout, or say nothing: refused, banned where they broke the rules, and the next one is met."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.protocol.errors import PeerGone, RefusalCode, Unreachable
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import Chunk, Commit, Hello, Outcome, Part, Refusal, Resolve
from gossamer.protocol.streams.transport import Purpose, Stream
from gossamer.protocol.tasks import cancel, loop_s
from tests.protocol.peers import Raw, send_raw
from tests.protocol.samples import changed
from tests.swarm.mallory import MALLORY, hello_to, nobody, spoil_payload
from tests.swarm.tiny import tiny_manifest
from tests.swarm.world import Peer, Swarm, play

QUIET = tiny_manifest(run={"total_steps": 100_000})
Trick = Callable[[Stream], Awaitable[None]]


@pytest.fixture(autouse=True)
def raw_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    send_raw(monkeypatch)


# --------------------------------------------------------------------------- a partner that is called


async def stays_silent(stream: Stream) -> None:
    await stream.receive()
    await asyncio.sleep(100.0)


async def sends_garbage(stream: Stream) -> None:
    await stream.receive()
    await stream.send(Raw(b"\xff" * 40))
    await asyncio.sleep(100.0)


async def sends_unrequested_bytes(stream: Stream) -> None:
    await stream.receive()
    await stream.send(Chunk(Part.PAYLOAD, 0, b"x" * 200_000))
    await asyncio.sleep(100.0)


async def repeats_our_hello(stream: Stream) -> None:
    await stream.send(await stream.receive())
    await asyncio.sleep(100.0)


async def decides_for_us(stream: Stream) -> None:
    await stream.receive()
    await stream.send(Commit(b"m" * 16))
    await asyncio.sleep(100.0)


async def hangs_up(stream: Stream) -> None:
    await stream.receive()


async def refuses(stream: Stream) -> None:
    await stream.receive()
    await stream.send(Refusal(RefusalCode.STEP_TOO_FAR, "\x1b[2J not printable"))


TRICKS: list[tuple[Trick, bool]] = [
    (stays_silent, False),
    (sends_garbage, True),
    (sends_unrequested_bytes, True),
    (repeats_our_hello, True),
    (decides_for_us, True),
    (hangs_up, False),
    (refuses, False),
]


@pytest.mark.parametrize(("trick", "is_bad"), TRICKS, ids=lambda value: value.__name__ if callable(value) else "")
def test_a_bad_partner_is_dropped_and_the_next_one_is_met(tmp_path: Path, trick: Trick, is_bad: bool) -> None:
    async def play_trick(purpose: Purpose, stream: Stream) -> None:
        await trick(stream)

    async def story(swarm: Swarm) -> None:
        a, b = swarm.start(2)
        for peer in (a, b):
            peer.trainer.frozen = True
        swarm.network.start_peer(MALLORY.peer_id, play_trick)
        await asyncio.sleep(1.0)
        a.book.add_address(MALLORY.peer_id, "/ip4/192.0.2.66/tcp/1", loop_s())
        a.book.add_address(b.peer_id, "/ip4/192.0.2.1/tcp/4001", loop_s())
        a.book.note_not_ready(b.peer_id, loop_s())
        assert await a.node.searches.search(0)
        await asyncio.sleep(5.0)
        assert [done.partner for done in a.meetings] == [str(MALLORY.peer_id), str(b.peer_id)]
        assert a.book.is_banned(MALLORY.peer_id, loop_s()) == is_bad
        assert (a.meetings[0].outcome == "misbehaved") == is_bad
        assert all(char.isprintable() for char in a.meetings[0].reason)
        assert all(fragment.meeting is None for fragment in a.trainer.replica.fragments)
        assert not list(a.payloads.path("x").parent.iterdir()), "files are left behind"

    play(Swarm(tmp_path, manifest=QUIET), story)


# --------------------------------------------------------------------------- a partner that calls


@pytest.mark.parametrize("is_bad", [True, False])
def test_the_first_message_of_a_bad_caller(tmp_path: Path, is_bad: bool) -> None:
    async def story(swarm: Swarm) -> None:
        (victim,) = swarm.start(1)
        await asyncio.sleep(1.0)
        good = hello_to(swarm, victim.peer_id)
        bad = [
            Raw(b"\xff" * 100),
            changed(good, receiver=MALLORY.peer_id, signature=b"").signed(MALLORY),  # caught on its way to another
            replace(good, tokens=5),  # not what was signed
            changed(good, sender=victim.peer_id),
            Chunk(Part.PAYLOAD, 0, b"x"),
            changed(good, partner_nonce=b"x" * 16, signature=b"").signed(MALLORY),
        ]
        strange = [
            Raw(b"\x7a\x01x"),  # of a kind that only a newer peer knows
            Refusal(RefusalCode.BUSY),
            Resolve(swarm.terms.run_id, b"m" * 16),
            Resolve(b"r" * 32, b"m" * 16),
            changed(good, protocol_version=2, signature=b"").signed(MALLORY),
            changed(good, run_id=b"r" * 32, signature=b"").signed(MALLORY),
            replace(good, payload_bytes=7, signature=b"").signed(MALLORY),
            replace(good, fragment=9, signature=b"").signed(MALLORY),
            replace(good, global_step=10_000, signature=b"").signed(MALLORY),
        ]
        transport = swarm.network.start_peer(MALLORY.peer_id, nobody)
        for message in bad if is_bad else strange:
            victim.book._banned_until_s.clear()
            stream = await transport.connect(victim.peer_id, (), Purpose.MEET)
            await stream.send(message)
            await expect_no(stream, message)
            assert victim.book.is_banned(MALLORY.peer_id, loop_s()) == is_bad, message
        assert not victim.meetings and all(f.meeting is None for f in victim.trainer.replica.fragments)
        victim.book.ban(MALLORY.peer_id, loop_s(), "a test")
        for purpose in Purpose:
            with pytest.raises(Unreachable):
                await transport.connect(victim.peer_id, (), purpose)

    async def expect_no(stream: Stream, message: object) -> None:
        if isinstance(message, Refusal):
            with pytest.raises(PeerGone):
                await stream.receive()
            return
        answer = await stream.receive()
        if isinstance(message, Resolve) and message.run_id != b"r" * 32:
            assert answer == Outcome(message.meeting_id, False)
        else:
            assert isinstance(answer, Refusal)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_one_caller_cannot_take_all_places(tmp_path: Path) -> None:
    async def story(swarm: Swarm) -> None:
        (a,) = swarm.start(1)
        await asyncio.sleep(1.0)
        transport = swarm.network.start_peer(MALLORY.peer_id, nobody)
        answers = []
        for fragment in (0, 1):
            stream = await transport.connect(a.peer_id, (), Purpose.MEET)
            terms = swarm.terms.fragments[fragment]
            hello = replace(hello_to(swarm, a.peer_id), fragment=fragment, payload_bytes=terms.payload_bytes, signature=b"")
            await stream.send(replace(hello, global_step=a.global_step).signed(MALLORY))
            answers.append(await stream.receive())
        assert isinstance(answers[0], Hello) and isinstance(answers[1], Refusal) and answers[1].code is RefusalCode.BUSY
        swarm.start(1)
        await swarm.until(lambda: a.num_completed >= 3, within_s=30.0)

    play(Swarm(tmp_path, manifest=QUIET), story)


def test_two_callers_that_go_silent_do_not_keep_a_peer_from_the_others(tmp_path: Path) -> None:
    callers = [Identity(bytes([150 + number]) * 32) for number in range(2)]

    async def pester(swarm: Swarm, victim: Peer, caller: Identity, fragment: int) -> None:
        transport, terms = swarm.network.start_peer(caller.peer_id, nobody), swarm.terms.fragments[fragment]
        while True:
            stream = await transport.connect(victim.peer_id, (), Purpose.MEET)
            hello = replace(hello_to(swarm, victim.peer_id), fragment=fragment, payload_bytes=terms.payload_bytes)
            hello = changed(hello, sender=caller.peer_id, global_step=victim.global_step, nonce=os.urandom(16), signature=b"")
            await stream.send(hello.signed(caller))
            with contextlib.suppress(PeerGone):
                while True:
                    await stream.receive()
            stream.close()
            await asyncio.sleep(0.05)

    async def story(swarm: Swarm) -> None:
        victim, other = swarm.start(2, step_s=0.5)
        await swarm.until(lambda: victim.num_completed >= 3)
        tasks = [asyncio.create_task(pester(swarm, victim, caller, number)) for number, caller in enumerate(callers)]
        await asyncio.sleep(150.0)  # their rests have grown
        count, solos = victim.num_completed, len(victim.trainer.solo)
        failed = victim.outcomes()["failed"]
        await asyncio.sleep(120.0)
        assert victim.num_completed > count + 30, "its fragments are taken"
        assert victim.outcomes()["failed"] - failed <= 8 and len(victim.trainer.solo) - solos <= 6
        assert victim.partners()[str(other.peer_id)]
        await cancel(*tasks)

    play(Swarm(tmp_path, manifest=QUIET), story)


# --------------------------------------------------------------------------- dishonest trainers behind an honest node


@pytest.mark.parametrize(
    ("nan", "rehash", "cut", "outcomes"),
    [(True, True, 0, {"gated"}), (False, False, 0, {"misbehaved"}), (False, True, 4, {"failed", "misbehaved"})],
    ids=["not finite", "another hash", "too few bytes"],
)
def test_a_dishonest_trainer_harms_no_other_peer(tmp_path: Path, nan: bool, rehash: bool, cut: int, outcomes: set[str]) -> None:
    async def story(swarm: Swarm) -> None:
        bad, *good = swarm.start(3)
        spoil_payload(bad, nan=nan, rehash=rehash, cut=cut)
        await swarm.until(lambda: all(outcomes & peer.outcomes().keys() for peer in good), within_s=60.0)
        await swarm.until(lambda: all(peer.num_completed >= 5 for peer in good))
        for peer in good:
            assert not peer.partners()[str(bad.peer_id)] and bool(peer.fast.isfinite().all())
            assert peer.book.is_banned(bad.peer_id, loop_s()) == bool(peer.outcomes()["misbehaved"])
            assert peer.outcomes()["misbehaved"] <= 2
        assert not bad.partners()

    play(Swarm(tmp_path, manifest=QUIET), story)
