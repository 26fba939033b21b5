"""Faults of one meeting: crashes, partners that disappear or hang, and corrupted frames."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gossamer.peer.meeting.driver import FLUSH_S
from gossamer.peer.meeting.machine import CONFIRM_S, DOUBT_S, SILENCE_SHARE
from gossamer.protocol import limits
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link as Wire
from gossamer.protocol.streams.transport import Inbox
from tests.faults.damage import damaged
from tests.protocol.scripted import Doom
from tests.swarm.tiny import tiny_manifest
from tests.swarm.trials import CHUNK_BYTES, ENDED_S, FRAGMENT, LATE_S, QUICK_S, Death, check, deaths, go_on, trial, two_that_stand_still
from tests.swarm.trials import undisturbed as undisturbed_trial
from tests.swarm.world import Peer, Swarm

CODECS = ("int8", "modulo4")
STORY = 24  # crashes per prepared meeting: each needs a reference run without a crash
COMPANY = 16  # every COMPANY-th trial continues with a third peer


def killed(number: int) -> None:
    """Kill a peer, node or trainer at one step of a meeting: both must end in the state before or after it, and continue."""
    story, draws = number // STORY, random.Random(number)
    codec, victim, what = CODECS[story % 2], draws.randrange(2), draws.choice(("peer", "node", "trainer"))
    back_s = draws.choice((QUICK_S, LATE_S))
    if what == "trainer":
        num_handled = undisturbed_trial(codec, story).num_handled[victim]
        death = Death(victim, handled=draws.randint(1, num_handled), what=what, back_s=back_s, seed=story)
    else:
        death = draws.choice(deaths(codec, victim, what=what, back_s=back_s, seed=story))
    check(codec, death, trial(codec, death, goes_on=number % COMPANY == 0))


class Pair:
    """Two peers that meet once, with their states before and after an undisturbed meeting."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.peers: tuple[Peer, Peer]
        self.before: tuple[str, str]

    async def meet(self, hurt: Callable[[tuple[Peer, Peer]], object]) -> tuple[float, float]:
        """Run the meeting with the fault; return the seconds until each side has finished it."""
        self.peers = peers = await two_that_stand_still(self.swarm)
        self.before = peers[0].hash, peers[1].hash
        hurt(peers)
        loop, began_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        meeting = asyncio.create_task(peers[0].node.meetings.try_next(FRAGMENT, set()))
        over_s = [0.0, 0.0]
        while loop.time() < began_s + ENDED_S + 10.0:
            await asyncio.sleep(0.25)
            for side, peer in enumerate(peers):
                if peer.node.meetings.active:
                    over_s[side] = loop.time() - began_s
        meeting.cancel()
        return over_s[0], over_s[1]

    def look(self, after: tuple[str, str], sides: tuple[int, ...] = (0, 1)) -> None:
        """Check that these sides are in the state before or after, as in their journals, and applied no outer step twice."""
        for side in sides:
            peer = self.peers[side]
            assert peer.hash in (self.before[side], after[side]), "something in between"
            assert (peer.hash == after[side]) == peer.has_decided, "state and journal differ"
            assert set(peer.trainer.applied.values()) <= {1}, "applied twice"
            assert not list(peer.payloads.path("x").parent.iterdir()), "files are left behind"
        if len(sides) == 2:
            assert self.peers[0].has_decided or not self.peers[1].has_decided, "counted by the responder alone"


def _swarm(folder: str, codec: str, seed: int, silence_s: float = 30.0) -> Swarm:
    wire = Wire(latency_s=0.02, jitter_s=0.01, bytes_per_s=1e6, silence_s=silence_s)
    return Swarm(Path(folder), seed, manifest=tiny_manifest(codec={"name": codec}), wire=wire)


def gone(number: int) -> float:
    """Make the partner disappear, hang or close at one of its messages; return the seconds that the other waited too long."""
    story, draws = number // STORY, random.Random(number)
    codec, bad = CODECS[story % 2], draws.randrange(2)
    num_sent, num_received = undisturbed_trial(codec, story).num_messages[bad]
    how = draws.choice(("dies", "cut", "hangs", "closes"))
    moment = draws.randint(1, num_sent + num_received)
    sent, received = (moment, None) if moment <= num_sent else (None, moment - num_sent)
    doom = Doom(sent, received, draws.random() < 0.5, "cut" if how == "hangs" else how)
    late_s = 0.0

    async def story_of(swarm: Swarm) -> None:
        nonlocal late_s
        pair = Pair(swarm)
        over_s = await pair.meet(lambda peers: swarm.network.condemn(peers[bad].peer_id, doom))
        good = 1 - bad
        silence_s = SILENCE_SHARE * swarm.manifest.outer.deadline_s
        deadline_s = silence_s + FLUSH_S + (DOUBT_S if good else CONFIRM_S)
        late_s = max(0.0, over_s[good] - deadline_s)
        assert late_s <= 1.0, f"{how}: the other was not through after {over_s[good]:.1f} s"
        pair.look(undisturbed_trial(codec, story).after, (good,))
        if number % COMPANY == 0:
            swarm.network.partition()
            await go_on(swarm, [pair.peers[good]])
        swarm.check()
        await swarm.close()

    with tempfile.TemporaryDirectory(prefix="gone-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHUNK_BYTES", CHUNK_BYTES)
        virtual_time.run(story_of(_swarm(folder, codec, story, 1e9 if how == "hangs" else 30.0)))
    return late_s


KINDS = ("flipped", "cut short", "twice", "swapped", "of an earlier meeting", "of the other side", "lost")


class Tampering:
    """An attacker between the peers that replaces the k-th frame of the meeting. `earlier` holds frames of another meeting."""

    def __init__(self, kind: str, moment: int, draws: random.Random, earlier: list[bytes]) -> None:
        self.kind, self.moment, self.draws, self.earlier = kind, moment, draws, earlier
        self.frames: list[bytes] = []
        self.is_on = False
        self._held: bytes | None = None

    def change(self, frame: bytes) -> list[bytes]:
        """Return the frame that arrives instead."""
        if not self.is_on:
            return [frame]
        self.frames.append(frame)
        held, self._held = self._held, None
        if held is not None:
            return [frame, held]
        return self._spoilt(frame) if len(self.frames) == self.moment else [frame]

    def _spoilt(self, frame: bytes) -> list[bytes]:
        match self.kind:
            case "swapped":
                self._held = frame
                return []
            case "of an earlier meeting":
                return [self.draws.choice(self.earlier)]
            case "of the other side":
                return [self.draws.choice(self.frames[:-1] or [frame[::-1]])]
        return damaged(frame, self.kind, self.draws)


@dataclass(frozen=True)
class Honest:
    """The undisturbed meeting: its frames, and the states after it."""

    after: tuple[str, str]
    frames: list[bytes]


def tampered(number: int) -> None:
    """Corrupt one frame in transit: it must never be merged, and only the undisturbed meeting may count."""
    story, draws = number // STORY, random.Random(number)
    codec = CODECS[story % 2]
    earlier, honest = _honest(codec, story + 1000), _honest(codec, story)
    _meet_tampered(codec, story, Tampering(draws.choice(KINDS), draws.randint(1, len(honest.frames)), draws, earlier.frames), honest)


@functools.lru_cache(maxsize=16)
def _honest(codec: str, seed: int) -> Honest:
    tampering = Tampering("", 0, random.Random(0), [])
    return Honest(_meet_tampered(codec, seed, tampering, None), tampering.frames)


def _meet_tampered(codec: str, seed: int, tampering: Tampering, honest: Honest | None) -> tuple[str, str]:
    """Run a meeting and return the states after it. The states are checked if the allowed ones are known."""
    put = Inbox.put

    def put_changed(inbox: Inbox, frame: bytes) -> None:
        for one in tampering.change(frame):
            put(inbox, one)

    async def story(swarm: Swarm) -> tuple[str, str]:
        pair = Pair(swarm)

        def hurt(_: object) -> None:
            tampering.is_on = True

        await pair.meet(hurt)
        tampering.is_on = False
        swarm.check()
        if honest is not None:
            pair.look(honest.after)
        after = pair.peers[0].hash, pair.peers[1].hash
        await swarm.close()
        return after

    with tempfile.TemporaryDirectory(prefix="tampered-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(Inbox, "put", put_changed)
        return virtual_time.run(story(_swarm(folder, codec, seed)))
