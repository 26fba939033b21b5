"""Cost of the directory for a peer in swarms of up to a million: the real walk over members that are only places.

    python -m benchmarks.directory_scale [--real 60,300] [--members 60,300,1000,100000,1000000] [--walks 100]

First the reference: complete members of the real directory (see directory.py) in virtual time, two minutes after the last has joined:
number of calls per walk, bytes per call. Then the model of a swarm in its steady state: each member knows eight random members of those
whose places differ from its own in the same first bit, or all if there are fewer, and stores the records of the eight nearest. The walk,
the sizes of answers and the intervals between walks are those of the real directory. In the model a walk never starts with a known record,
which is the most expensive case.

Printed: calls of a look-up and of a walk to the own place, and the records received on it (others are named by their gists); the share of
both that end at the nearest members; kB per second that a peer sends and receives if all accept connections; and kB per second of the
peers that accept connections if one in ten does, because all calls end there.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.directory import PULSE_S, Member
from gossamer.peer.swarm.presence import LOOK_S
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.directory import HOME_S, LEAVE_S, MIX_S, MIXED, MOST_CALLS, NUM_HOLDERS, NUM_LOOKED_AT, Walk
from gossamer.protocol.libp2p.kademlia import NAMED, NAMED_TOO
from gossamer.protocol.libp2p.neighbours import BUCKET, nearest, place_of
from gossamer.protocol.libp2p.record_store import split_reply
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import FRAMING_BYTES, Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.records import GIST_BYTES
from gossamer.protocol.tasks import cancel

PREFIX = Identity(bytes(32)).peer_id.raw[:-32]
PLACE_BITS = 160
STEADY_S = 120.0
ONE_IN = 10
Ask = Callable[[Any], Coroutine[Any, Any, Any]]
HEAD = "members      of  calls of a look  records  of a walk home  records  at the nearest  kB/s, all can be called  one in ten"


@dataclass
class Weights:
    """Bytes of calls, both ways, by kind; records in answers are counted apart."""

    num_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def of(self, kind: str) -> float:
        """Return the mean of a kind."""
        return self.num_bytes[kind] / max(1, self.calls[kind])

    def weigh(self, member: Member) -> None:
        """Count the bytes of calls to a member from now on."""
        for name, (handler, kind) in member.life.calls.items():
            member.life.calls[name] = self._weighed(name.rpartition("_")[2], handler), kind

    def _weighed(self, kind: str, handler: Any) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            response = await handler(request, context)
            records = _records_in(response) if kind == "find" else []
            self.calls += Counter({kind: 1, "record": len(records)})
            self.num_bytes[kind] += request.ByteSize() + response.ByteSize() + 2 * FRAMING_BYTES - sum(map(len, records))
            self.num_bytes["record"] += sum(map(len, records))
            return response

        return answer


def _records_in(response: Any) -> list[bytes]:
    return [listed for listed in split_reply(response.results[0].value) if len(listed) > GIST_BYTES]


@dataclass
class Walks:
    """Calls and received records of each walk."""

    looks: list[tuple[int, int]] = field(default_factory=list)
    homes: list[tuple[int, int]] = field(default_factory=list)
    at_nearest: list[bool] = field(default_factory=list)

    async def both(
        self, ask_towards: Callable[[int], Ask], first: list[Any], me: PeerId, place: int, truly: Callable[[int, int], Any]
    ) -> None:
        """Look up a place and walk to the own one; `truly` names the nearest peers."""
        for took, towards, num in ((self.looks, place, NUM_LOOKED_AT), (self.homes, place_of(me), NUM_HOLDERS)):
            asked, listed, ask = list[Any](), set[PeerId](), ask_towards(towards)

            async def counted(held: Any, ask: Ask = ask, asked: list[Any] = asked, listed: set[PeerId] = listed) -> Any:
                asked.append(held)
                named = await ask(held)
                named = named and [one for one in named if one.peer != me]  # nobody is told of itself
                listed.update(one.peer for one in named or ())
                return named

            found = await Walk(towards, counted).run(first, num, MOST_CALLS)
            took.append((len(asked), len(listed)))
            wanted = [peer for peer in truly(towards, num + 1) if peer != me][:num]
            self.at_nearest.append([held.peer for held in found] == wanted)

    def row(self, members: int, of: str, weights: Weights) -> str:
        """Return a line of the table."""
        (looks, listed), (homes, listed_home) = (map(fmean, zip(*taken, strict=True)) for taken in (self.looks, self.homes))
        walks = _weight(looks, listed, weights) / LOOK_S[2] + _weight(homes, listed_home, weights) / HOME_S[1]
        pings = 1 / PULSE_S + MIXED / MIX_S  # at the most
        own = walks + NUM_HOLDERS / LEAVE_S * weights.of("store") + pings * weights.of("ping")
        return (
            f"{members:>7} {of:>7} {looks:>16.1f} {listed:>8.1f} {homes:>15.1f} {listed_home:>8.1f} {fmean(self.at_nearest):>15.0%}"
            f" {2 * own / 1e3:>24.2f} {(1 + ONE_IN) * own / 1e3:>11.2f}\n"
        )


def _weight(calls: float, listed: float, weights: Weights) -> float:
    return calls * weights.of("find") + listed * weights.of("record")


async def real(num_members: int, num_walks: int, weights: Weights) -> Walks:
    """Measure walks among real members."""
    rng, network = random.Random(1), MemoryNetwork(1, Link(latency_s=0.025, jitter_s=0.05))
    swarm, walks = list[Member](), Walks()
    tasks = []
    for number in range(num_members):
        member = Member(network, number, True)
        member.swarm = swarm
        await member.directory.open()
        swarm.append(member)
        weights.weigh(member)
        tasks.append(asyncio.create_task(member.live()))
        await asyncio.sleep(0.1)
    await asyncio.sleep(STEADY_S)

    def truly(place: int, num: int) -> list[PeerId]:
        return sorted((member.peer_id for member in swarm), key=lambda peer: place_of(peer) ^ place)[:num]

    for member in rng.choices(swarm, k=num_walks):
        protocol = member.rpc
        await walks.both(
            lambda place, protocol=protocol: functools.partial(protocol.call_find, place=place),  # type: ignore[misc]
            protocol.neighbours.all(), member.peer_id, rng.getrandbits(PLACE_BITS), truly,
        )  # fmt: skip
    await cancel(*tasks)
    return walks


@dataclass(frozen=True)
class Place:
    """A member of the model."""

    peer: PeerId


class Model:
    """Members of the model, in the order of their places."""

    def __init__(self, num_members: int) -> None:
        peers = [PeerId(PREFIX + number.to_bytes(32, "little")) for number in range(1, num_members + 1)]
        by_place = sorted((place_of(peer), peer) for peer in peers)
        self.peers = [Place(peer) for _, peer in by_place]
        self._places = [place for place, _ in by_place]
        self.known = functools.lru_cache(1 << 16)(self._known)

    def among(self, prefix: int, bits: int) -> range:
        """Return the members whose places without their last `bits` bits are `prefix`."""
        return range(bisect_left(self._places, prefix << bits), bisect_left(self._places, (prefix + 1) << bits))

    def _known(self, peer: PeerId) -> list[Place]:
        """Return a member's neighbours."""
        own, rng, known = place_of(peer), random.Random(peer.raw), list[Place]()
        for bit in reversed(range(PLACE_BITS)):
            bucket = self.among((own >> bit) ^ 1, bit)
            known += [self.peers[index] for index in rng.sample(bucket, min(BUCKET, len(bucket)))]
            if len(self.among(own >> bit, bit)) == 1:
                return known
        return known

    def truly(self, place: int, num: int) -> list[PeerId]:
        """Return the nearest of all members."""
        bit = next(bit for bit in range(PLACE_BITS + 1) if len(self.among(place >> bit, bit)) >= min(num, len(self.peers)))
        near = [self.peers[index].peer for index in self.among(place >> bit, bit)]
        return sorted(near, key=lambda peer: place_of(peer) ^ place)[:num]

    async def named(self, held: Place, place: int) -> list[Any]:
        """Answer as a member does: neighbours, and members whose records it stores, near a place."""
        known: list[Any] = nearest(self.known(held.peer), place, NAMED)  # type: ignore[arg-type]
        left: list[Any] = [Place(peer) for peer in self.truly(place_of(held.peer), NUM_HOLDERS) if peer != held.peer]
        return [*known, *nearest([one for one in left if one not in known], place, NAMED_TOO)]

    async def walk(self, num_walks: int) -> Walks:
        """Measure walks among the members."""
        rng, walks = random.Random(1), Walks()
        for one in rng.choices(self.peers, k=num_walks):
            ask_towards = lambda place: functools.partial(self.named, place=place)  # noqa: E731
            await walks.both(ask_towards, self.known(one.peer), one.peer, rng.getrandbits(PLACE_BITS), self.truly)
        return walks


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", default="60,300")
    parser.add_argument("--members", default="60,300,1000,100000,1000000")
    parser.add_argument("--walks", type=int, default=100)
    given = parser.parse_args()
    weights = Weights()
    sys.stdout.write(f"{HEAD}\n")
    for members in map(int, given.real.split(",")):
        sys.stdout.write(virtual_time.run(real(members, given.walks, weights)).row(members, "code", weights))
        sys.stdout.flush()
    for members in map(int, given.members.split(",")):
        sys.stdout.write(virtual_time.run(Model(members).walk(given.walks)).row(members, "model", weights))
        sys.stdout.flush()
    sys.stdout.write("bytes of a call: " + ", ".join(f"{kind} {weights.of(kind):.0f}" for kind in sorted(weights.calls)) + "\n")


if __name__ == "__main__":
    main()
