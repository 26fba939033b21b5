"""Cost and quality of the directory in a swarm of any size, with malicious peers and with peers that accept no connections.

    python -m benchmarks.directory [--members 60,300] [--malicious 1] [--reachable 1.0] [--settle 60] [--seconds 60]

The real directory, presence and address book in virtual time over calls in memory, 50 ms each way. A malicious member names only members
that do not exist, as close to the requested place as 200 generated keys allow, and stores nothing. Prints the bytes per second that a
peer sends and receives, and those of the bootstrap node; the share of announcements that half or more of the eight nearest honest members
store; the share of look-ups that return eight live members or more; and the number of members that a new peer knows after 10 s. One minute
for 60 members, ten for 300, a quarter of an hour or more for 1,000, of which ten join per second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass, field

from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.lifecycle import Lifecycle
from gossamer.peer.swarm.peer_exchange import PeerExchange
from gossamer.peer.swarm.presence import Presence, SwarmReporter
from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.libp2p.directory import NUM_HOLDERS
from gossamer.protocol.libp2p.neighbours import place_of
from gossamer.protocol.memory import virtual_time
from gossamer.protocol.memory.conversation import Link
from gossamer.protocol.memory.network import MemoryNetwork
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.tasks import cancel
from tests.protocol.memory.members import HOST, HOST_ADDRESS, TERMS, Seat, now_s

PULSE_S = 5.0
ENOUGH = 8


@dataclass
class Count:
    """Outcomes of announcements and look-ups."""

    stored: list[bool] = field(default_factory=list)
    looked: list[bool] = field(default_factory=list)


class Member(Seat):
    """A peer with a directory, a presence and a book."""

    def __init__(self, network: MemoryNetwork, number: int, is_open: bool) -> None:
        super().__init__(network, number, is_open=is_open)
        self.is_malicious = False
        self.book, lifecycle = AddressBook(self.peer_id), Lifecycle()
        lifecycle.update(0, RunPhase.TRAIN, True)
        peer_exchange = PeerExchange(TERMS, self.book, SwarmTime(now_s), random.Random(number))
        reporter = SwarmReporter(lambda event: None, peer_exchange)
        self.presence = Presence(self.membership, self, lambda: self.addresses, peer_exchange, lifecycle, reporter, 1)
        self.count = Count()
        self.swarm: list[Member] = []

    async def announce(self, record: MemberRecord) -> None:
        """Announce, and check which members store it."""
        try:
            await self.directory.announce(record)
        except GossamerError:
            self.count.stored.append(False)
            raise
        honest = [other for other in self.swarm if other is not self and other.life.is_up and other.is_open and not other.is_malicious]
        by_place = sorted(honest, key=lambda other: place_of(other.peer_id) ^ place_of(self.peer_id))[:NUM_HOLDERS]
        self.count.stored.append(2 * sum(self.peer_id in other.holds for other in by_place) >= len(by_place))

    async def members(self) -> list[MemberRecord]:
        """Look up members, and check which of them are alive."""
        found = await self.directory.members()
        there = {other.peer_id for other in self.swarm if other.life.is_up}
        self.count.looked.append(sum(record.peer_id in there for record in found) >= min(ENOUGH, len(there) - 1))
        return found

    async def live(self) -> None:
        """Run until cancelled."""
        if self.is_malicious:
            self.misbehave()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.presence.run())
            tasks.create_task(self._pulse())

    async def _pulse(self) -> None:
        while True:
            if not self.directory.num_neighbours and self.identity is not HOST:
                await self.p2p.connect(HOST.peer_id, [HOST_ADDRESS])
                await self.directory.join([HOST.peer_id])
            await self.directory.maintain()
            await asyncio.sleep(PULSE_S)


async def measure(members: int, num_malicious: int, reachable: float, settle_s: float, seconds: float) -> None:
    """Run one swarm and print its cost and quality."""
    rng, network = random.Random(1), MemoryNetwork(1, Link(latency_s=0.025, jitter_s=0.05))
    swarm = [Member(network, number, number == 0 or rng.random() < reachable) for number in range(members)]
    for attacker in [member for member in swarm[1:] if member.is_open][:num_malicious]:
        attacker.is_malicious = True
    tasks: list[asyncio.Task[None]] = []
    there: list[Member] = []
    for member in swarm:
        member.swarm = there
        await member.directory.open()
        there.append(member)
        tasks.append(asyncio.create_task(member.live()))
        await asyncio.sleep(0.1)
    await asyncio.sleep(settle_s)
    honest = [member for member in swarm if not member.is_malicious]
    before = [member.num_bytes for member in swarm]
    for member in swarm:
        member.count = Count()
    await asyncio.sleep(seconds)
    rates = [(member.num_bytes - bytes_before) / seconds for member, bytes_before in zip(swarm, before, strict=True)]
    stored = [was for member in honest for was in member.count.stored]
    looked = [was for member in honest for was in member.count.looked]
    newcomer = Member(network, members, False)
    newcomer.swarm = swarm
    await newcomer.directory.open()
    tasks.append(asyncio.create_task(newcomer.live()))
    await asyncio.sleep(10)
    known = len([entry for entry in newcomer.book.live(asyncio.get_running_loop().time()) if network.peers.get(entry.peer_id)])
    print(
        f"{members:>7} {num_malicious:>9} {reachable:>9.0%} "
        f"{sum(rates) / members / 1e3:>10.2f} {rates[0] / 1e3:>10.2f} {max(rates[1:]) / 1e3:>9.2f} "
        f"{sum(stored) / max(1, len(stored)):>9.1%} {sum(looked) / max(1, len(looked)):>9.1%} {known:>9}",
        flush=True,
    )
    await cancel(*tasks)


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="60,300")
    parser.add_argument("--malicious", type=int, default=0)
    parser.add_argument("--reachable", type=float, default=1.0)
    parser.add_argument("--settle", type=float, default=60.0, help="seconds after the last has come")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    print("members malicious reachable  kB/s mean  kB/s bootstrap  kB/s max announced    looked newcomer")
    for members in map(int, given.members.split(",")):
        virtual_time.run(measure(members, given.num_malicious, given.reachable, given.settle, given.seconds))


if __name__ == "__main__":
    main()
