"""What the directory costs a peer, and what it is worth, in a swarm of any size, with liars and with peers that cannot be called.

    python -m benchmarks.directory [--members 60,300] [--liars 1] [--reachable 1.0] [--seconds 60]

The real directory, presence and address book in virtual time over calls in memory, 50 ms each way. A liar is a member that names only
members which are not there, as near to the place asked for as 200 minted keys allow, and holds nothing. Prints the bytes of a peer in a
second, sent and received; the share of announcements that half or more of the eight nearest honest members hold; the share of looks that
bring eight live members or more; and how many members a newcomer knows after 10 s. A minute for 60 members, ten for 300.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from peer.swarm.address_book import AddressBook, RecordIntake
from peer.swarm.membership import Membership
from peer.swarm.presence import Presence
from peer.swarm.standing import Standing
from protocol.errors import GossamerError
from protocol.identity import Identity
from protocol.libp2p.directory import NUM_HOLDERS, DhtDirectory
from protocol.libp2p.hivemind_imports import dht_pb2
from protocol.libp2p.neighbours import Held, nearest, place_of
from protocol.libp2p.record_store import RecordShelf
from protocol.messages.messages import RunPhase
from protocol.messages.records import MemberRecord
from protocol.messages.terms import RunTerms, check_record
from protocol.run.invite import Invite
from tests.memory import virtual_time
from tests.memory.unary import UnaryNetwork

EPOCH_S = 1_700_000_000
RUN_ID = hashlib.sha256(b"benchmarks.directory").digest()
HOST = Identity(b"h" * 32)
HOST_ADDRESS = "/ip4/101.0.0.1/tcp/4001"
RELAY = f"{HOST_ADDRESS}/p2p/{HOST.peer_id}/p2p-circuit"
INVITE = Invite.issue(HOST, RUN_ID, (f"{HOST_ADDRESS}/p2p/{HOST.peer_id}",), None, EPOCH_S + 10**7)
TERMS = RunTerms(RUN_ID, 1, 2, (), 8000, "invite", frozenset({HOST.peer_id}), frozenset(), 100)
MINTED = 200
PULSE_S = 5.0
WARM_UP_S = 60.0
ENOUGH = 8


def now_s() -> float:
    """Return Unix time, which follows the loop's clock."""
    return EPOCH_S + asyncio.get_running_loop().time()


@dataclass
class Count:
    """What came of announcements and looks."""

    stored: list[bool] = field(default_factory=list)
    looked: list[bool] = field(default_factory=list)


class Member:
    """A peer with a directory, a presence and a book."""

    def __init__(self, network: UnaryNetwork, number: int, is_open: bool) -> None:
        self.identity = HOST if number == 0 else Identity(number.to_bytes(4, "little") * 8)
        self.address = HOST_ADDRESS if number == 0 else f"/ip4/{102 + number % 100}.{number * 7 % 250}.{number % 250}.9/tcp/4001"
        self.is_open, self.is_liar = is_open, False
        self.p2p: Any = network.join(self.identity.peer_id, self.address, is_open=is_open)
        credential = None if number == 0 else INVITE.credential_for(self.identity.peer_id)
        self.membership = Membership(self.identity, TERMS, credential, 1000, 10.0, False)
        addresses = (self.address,) if is_open else (RELAY,)
        self.shelf = RecordShelf(RUN_ID, _is_member, now_s, random.Random(number))
        self.directory = DhtDirectory(self.p2p, self.shelf, self.p2p, lambda: self.membership.bare_record(addresses, now_s()))
        self.book, standing = AddressBook(self.identity.peer_id), Standing()
        standing.told(0, RunPhase.TRAIN, True)
        intake = RecordIntake(TERMS, self.book, now_s)
        self.presence = Presence(self.membership, self, lambda: addresses, intake, standing, lambda event: None, 1)
        self.count = Count()
        self.swarm: list[Member] = []

    @property
    def holds(self) -> set[Any]:
        """Return whose records it holds."""
        return {held.peer for held in self.directory._protocol.holdings.all()}

    async def announce(self, record: MemberRecord) -> None:
        """Announce, and see who holds it."""
        try:
            await self.directory.announce(record)
        except GossamerError:
            self.count.stored.append(False)
            raise
        honest = [other for other in self.swarm if other is not self and other.p2p.is_up and other.is_open and not other.is_liar]
        by_place = sorted(honest, key=lambda other: place_of(other.identity.peer_id) ^ place_of(self.identity.peer_id))[:NUM_HOLDERS]
        self.count.stored.append(2 * sum(self.identity.peer_id in other.holds for other in by_place) >= len(by_place))

    async def members(self) -> list[MemberRecord]:
        """Look, and see who of those is there."""
        found = await self.directory.members()
        there = {other.identity.peer_id for other in self.swarm if other.p2p.is_up}
        self.count.looked.append(sum(record.peer_id in there for record in found) >= min(ENOUGH, len(there) - 1))
        return found

    async def live(self) -> None:
        """Be there."""
        if self.is_liar:
            lie(self)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.presence.run())
            tasks.create_task(self._pulse())

    async def _pulse(self) -> None:
        while True:
            if not self.directory.num_neighbours and self.identity is not HOST:
                await self.p2p.connect(HOST.peer_id, [HOST_ADDRESS])
                await self.directory.join([HOST.peer_id])
            await self.directory.tend()
            await asyncio.sleep(PULSE_S)


def _is_member(record: MemberRecord) -> bool:
    try:
        check_record(record, TERMS, now_s())
    except GossamerError:
        return False
    return True


def lie(member: Member) -> None:
    """Make a member name only minted keys that are not there, and hold nothing."""
    rng = random.Random(5)
    protocol: Any = member.directory._protocol
    minted: list[Held] = []
    made_s = -1e9

    def near(place: int, caller: object) -> list[Held]:
        nonlocal minted, made_s
        if now_s() - made_s > 60:
            made_s = now_s()
            minted = [_minted(rng) for _ in range(MINTED)]
        return nearest(minted, place, 16)

    async def store(request: Any, context: Any) -> Any:
        return dht_pb2.StoreResponse(store_ok=[True])

    protocol._near = near
    name, (_, kind) = next(item for item in member.p2p.handlers.items() if "rpc_store" in item[0])
    member.p2p.handlers[name] = store, kind


def _minted(rng: random.Random) -> Held:
    identity = Identity(rng.randbytes(32))
    membership = Membership(identity, TERMS, INVITE.credential_for(identity.peer_id), 1000, 10.0, False)
    record = membership.bare_record((f"/ip4/{rng.randrange(100, 200)}.{rng.randrange(250)}.1.1/tcp/4001",), now_s())
    return Held(record, record.to_bytes())


async def measure(members: int, liars: int, reachable: float, seconds: float) -> None:
    """Play one swarm and print what it cost and was worth."""
    rng, network = random.Random(1), UnaryNetwork(1)
    swarm = [Member(network, number, number == 0 or rng.random() < reachable) for number in range(members)]
    for liar in [member for member in swarm[1:] if member.is_open][:liars]:
        liar.is_liar = True
    tasks: list[asyncio.Task[None]] = []
    there: list[Member] = []
    for member in swarm:
        member.swarm = there
        await member.directory.open()
        there.append(member)
        tasks.append(asyncio.create_task(member.live()))
        await asyncio.sleep(0.1)
    await asyncio.sleep(WARM_UP_S)
    honest = [member for member in swarm if not member.is_liar]
    before = [member.p2p.sent + member.p2p.received for member in swarm]
    for member in swarm:
        member.count = Count()
    await asyncio.sleep(seconds)
    rates = [(member.p2p.sent + member.p2p.received - bytes_before) / seconds for member, bytes_before in zip(swarm, before, strict=True)]
    stored = [was for member in honest for was in member.count.stored]
    looked = [was for member in honest for was in member.count.looked]
    newcomer = Member(network, members, False)
    newcomer.swarm = swarm
    await newcomer.directory.open()
    tasks.append(asyncio.create_task(newcomer.live()))
    await asyncio.sleep(10)
    known = len([entry for entry in newcomer.book.live(asyncio.get_running_loop().time()) if network.peers.get(entry.peer_id)])
    print(
        f"{members:>7} {liars:>5} {reachable:>9.0%} {sum(rates) / members / 1e3:>10.2f} {max(rates) / 1e3:>9.2f} "
        f"{sum(stored) / max(1, len(stored)):>9.1%} {sum(looked) / max(1, len(looked)):>9.1%} {known:>9}",
        flush=True,
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="60,300")
    parser.add_argument("--liars", type=int, default=0)
    parser.add_argument("--reachable", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    print("members liars reachable  kB/s mean  kB/s max announced    looked newcomer")
    for members in map(int, given.members.split(",")):
        virtual_time.run(measure(members, given.liars, given.reachable, given.seconds))


if __name__ == "__main__":
    main()
