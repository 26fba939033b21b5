"""A whole swarm of real nodes in virtual time: arrivals, a cut into two halves and its healing, churn, traffic, and what must not be.

The peers arrive, run together, are partitioned into two halves, and merge again. Trainers are stand-ins (`stand_in.py`), so no figure says
anything about learning; keys, signatures, messages, directory look-ups and meetings are the real code.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.peer.machine.runtime_folder import MEMORY_FOLDER
from gossamer.peer.simulator.resident import Resident, Run, identity_of
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import EPOCH_S, MemoryNetwork
from gossamer.protocol.run.manifest import Manifest
from gossamer.protocol.tasks import cancel, loop_s, spawn

ARRIVAL_S = 60.0  # in which all but the host come
STEADY_S = 60.0  # from the last arrival to the cut, and from the healing to the end
ENOUGH = 20  # members that a peer should know
LOOK_S = 0.5  # between two looks at who knows whom
HEAL_S = 600.0  # most that healing may take
CHURN_S = 600.0  # in which the share of --churn is killed
BACK_S = (10.0, 120.0)  # until a killed peer is back
WATCH_S = 5.0
BLIND_S = 120.0  # the longest that a peer with others within reach may know nobody
NUM_BOOTSTRAPS = 3
WRONG_CLOCKS = 10  # every so manyth


Follow = Callable[[float, float], None]  # virtual seconds that are over, and about how many there will be


@dataclass(frozen=True)
class SwarmScene:
    """The swarm and the events of one simulation."""

    peers: int = 60
    cut_s: float = 300.0
    churn: float = 0.0  # share of the peers that is killed in ten minutes, each back after a minute or so
    loss: float = 0.0  # share of messages that are lost and sent again
    skew_s: float = 0.0  # of every tenth clock, one way or the other
    reachable: float = 1.0  # share of the peers that can be called; the others have places at relays
    latency_s: float = 0.05  # one way
    bandwidth: float = 1e8  # bits per second, each way
    seed: int = 0


@dataclass(frozen=True)
class Spread:
    """Figures of many peers."""

    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, figures: Collection[float]) -> Spread | None:
        """Sum up; None where there are none."""
        ordered = sorted(figures)
        if not ordered:
            return None
        return cls(ordered[len(ordered) // 2], ordered[max(0, -(-95 * len(ordered) // 100) - 1)], ordered[-1])


@dataclass
class SwarmResult:
    """The result of one simulation. Seconds are virtual."""

    peers: int
    reachable: int  # peers that can be called
    virtual_s: float = 0.0
    know_enough_s: Spread | None = None  # from its start until a newcomer knew 20 members, or all where there were fewer
    healed_s: Spread | None = None  # from the end of the cut until a peer knew 20 of the other half again, or all of it
    background_bytes_per_s: Spread | None = None  # of a peer, sent and received, all but meetings
    meetings: dict[str, int] = field(default_factory=dict)  # by outcome, as each side saw it
    counted_by_one: int = 0  # meetings that only one side counts, as the other died or was cut off before the decision arrived
    kills: int = 0
    violations: list[str] = field(default_factory=list)


def simulate_swarm(scene: SwarmScene, manifest: Manifest, follow: Follow = lambda done_s, total_s: None) -> SwarmResult:
    """Play a scene. `manifest`: of the run; its access and issuers are replaced. `follow` is called with the progress from time to time."""
    place = str(MEMORY_FOLDER) if MEMORY_FOLDER.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="swarm-", dir=place) as folder:
        return virtual_time.run(SwarmStory(scene, manifest, Path(folder), follow).play())


class SwarmStory:
    """One scene, once."""

    def __init__(self, scene: SwarmScene, manifest: Manifest, folder: Path, follow: Follow) -> None:
        self._scene = scene
        self._folder = folder
        self._follow = follow
        self._rng = random.Random(scene.seed)
        self._network = MemoryNetwork(scene.seed)
        host = identity_of(2**31 + scene.seed)
        issued = manifest.model_copy(update={"run": manifest.run.model_copy(update={"access": "invite", "issuers": (str(host.peer_id),)})})
        self._run = Run.of(host, issued, tuple(self._bootstraps(host)), int(EPOCH_S) + 10**7)
        self._peers: list[Resident] = []
        self._aside: set[asyncio.Task[None]] = set()
        self._know_enough_s: list[float] = []
        self._healed_s: list[float] = []
        self._blind_since_s: dict[PeerId, float] = {}
        self._result = SwarmResult(scene.peers, 0)

    async def play(self) -> SwarmResult:
        """Run the scene."""
        scene, result = self._scene, self._result
        self._peers = [self._resident(number) for number in range(scene.peers)]
        result.reachable = scene.peers - len(self._network.hidden)
        arrivals = sorted(self._rng.uniform(1.0, ARRIVAL_S) for _ in self._peers[1:])
        spawn(self._watch(), self._aside, "watch")
        self._start(self._peers[0])
        for peer, at_s in zip(self._peers[1:], arrivals, strict=True):
            await asyncio.sleep(max(0.0, at_s - loop_s()))
            self._start(peer)
        await asyncio.sleep(STEADY_S)
        began_s, before = loop_s(), [peer.num_bytes - peer.counts.meeting_bytes for peer in self._peers]
        if scene.churn:
            spawn(self._churn(), self._aside, "churn")
        if scene.cut_s:
            await self._cut()
        await asyncio.sleep(STEADY_S)
        after = [peer.num_bytes - peer.counts.meeting_bytes for peer in self._peers]
        rates = [(late - early) / (loop_s() - began_s) for early, late in zip(before, after, strict=True)]
        result.background_bytes_per_s = Spread.of(rates)
        await self._end()
        return result

    async def _cut(self) -> None:
        scene, network = self._scene, self._network
        mixed = self._rng.sample(self._peers, len(self._peers))
        halves = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
        network.partition([peer.peer_id for peer in halves[0]])
        await asyncio.sleep(scene.cut_s)
        network.partition()
        began_s, waiting = loop_s(), [(peer, halves[1 - side]) for side in (0, 1) for peer in halves[side]]
        while waiting and loop_s() < began_s + HEAL_S:
            healed = [one for one in waiting if self._knows(*one)]
            self._healed_s += [loop_s() - began_s] * len(healed)
            waiting = [one for one in waiting if one not in healed and one[0].is_up]
            await asyncio.sleep(LOOK_S)
        self._result.violations += [f"{peer.peer_id.short()} does not know the other half after {HEAL_S:.0f} s" for peer, _ in waiting]

    def _knows(self, peer: Resident, others: Sequence[Resident]) -> bool:
        there = {other.peer_id for other in others if other.is_up}
        return peer.is_up and len(peer.members_in_force() & there) >= min(ENOUGH, len(there))

    async def _churn(self) -> None:
        pause_s = CHURN_S / max(1.0, self._scene.churn * len(self._peers))
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * pause_s)
            victims = [peer for peer in self._peers if peer.is_up]
            if len(victims) > 2:
                victim = self._rng.choice(victims)
                victim.stop()
                self._result.kills += 1
                spawn(self._bring_back(victim), self._aside, "bring back")

    async def _bring_back(self, peer: Resident) -> None:
        await asyncio.sleep(self._rng.uniform(*BACK_S))
        peer.start()

    def _start(self, peer: Resident) -> None:
        there = sum(other.is_up for other in self._peers)
        peer.start()
        if there:
            spawn(self._time_newcomer(peer, min(ENOUGH, there)), self._aside, "time newcomer")

    async def _time_newcomer(self, peer: Resident, enough: int) -> None:
        began_s = loop_s()
        while len(peer.members_in_force()) < enough:  # noqa: ASYNC110 (records go out of force by themselves)
            await asyncio.sleep(LOOK_S)
        self._know_enough_s.append(loop_s() - began_s)

    async def _watch(self) -> None:
        """Check that every peer with others within reach knows one of them; report progress."""
        total_s = ARRIVAL_S + 2 * STEADY_S + self._scene.cut_s
        while True:
            await asyncio.sleep(WATCH_S)
            self._follow(min(loop_s(), total_s), total_s)
            for peer in self._peers:
                others = [other for other in self._peers if other.is_up and not self._network.is_cut(peer.peer_id, other.peer_id)]
                if not peer.is_up or len(others) < 2 or peer.members_in_force():
                    self._blind_since_s.pop(peer.peer_id, None)
                elif loop_s() - self._blind_since_s.setdefault(peer.peer_id, loop_s()) > BLIND_S:
                    self._blind_since_s[peer.peer_id] = float("inf")
                    self._result.violations.append(f"{peer.peer_id.short()} knew nobody for {BLIND_S:.0f} s at {loop_s():.0f} s")

    async def _end(self) -> None:
        result = self._result
        await cancel(*self._aside)
        result.virtual_s, result.know_enough_s, result.healed_s = loop_s(), Spread.of(self._know_enough_s), Spread.of(self._healed_s)
        unknowing = self._scene.peers - 1 - len(self._know_enough_s)
        if unknowing:
            result.violations.append(f"{unknowing} newcomers never knew {ENOUGH} members")
        for peer in self._peers:
            result.violations += [f"{peer.peer_id.short()} died of {bug}" for bug in peer.counts.bugs]
            banned_by = [other.peer_id.short() for other in self._peers if other.is_up and other.book.is_banned(peer.peer_id, loop_s())]
            result.violations += [f"{peer.peer_id.short()} was banned by {by}" for by in banned_by]
            peer.stop()
        await self._network.close()
        result.meetings = dict(sum((peer.counts.meetings for peer in self._peers), Counter[str]()))
        counted = Counter(self._counted())
        result.violations += [f"meeting {name[:8]} was counted {times} times" for name, times in counted.items() if times > 2]
        result.counted_by_one = sum(times == 1 for times in counted.values())

    def _counted(self) -> Iterator[str]:
        for peer in self._peers:
            for trainer in peer.trainers:
                num_twice = sum(times > 1 for times in trainer.applied.values())
                self._result.violations += [f"{peer.peer_id.short()} applied a meeting twice"] * num_twice
                yield from trainer.applied

    def _resident(self, number: int) -> Resident:
        scene, rng = self._scene, self._rng
        if number >= NUM_BOOTSTRAPS and rng.random() >= scene.reachable:
            self._network.hidden[identity_of(number).peer_id] = ()
        latency_s = scene.latency_s * rng.uniform(0.5, 1.5)
        link = Link(latency_s, jitter_s=scene.latency_s / 5, bytes_per_s=scene.bandwidth / 8, loss=scene.loss)
        ahead_s = rng.choice((-scene.skew_s, scene.skew_s)) if number % WRONG_CLOCKS == WRONG_CLOCKS - 1 else 0.0
        return Resident(self._network, self._run, number, self._folder / str(number), link, ahead_s, _address_of(number))

    def _bootstraps(self, host: Identity) -> Iterator[str]:
        for number in range(min(NUM_BOOTSTRAPS, self._scene.peers)):
            peer = host.peer_id if number == 0 else identity_of(number).peer_id
            yield f"{_address_of(number)}/p2p/{peer}"


def _address_of(number: int) -> str:
    """Return an address in a network of its own."""
    return f"/ip4/{101 + number // 250}.{number % 250}.1.9/tcp/4001"
