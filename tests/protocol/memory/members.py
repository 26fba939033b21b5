"""Members that run only the real directory over in-memory calls, and a malicious member."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Any

from gossamer.peer.swarm.membership import Membership, OwnCredential
from gossamer.protocol.errors import GossamerError
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.libp2p.directory import DhtDirectory
from gossamer.protocol.libp2p.hivemind_imports import dht_pb2
from gossamer.protocol.libp2p.kademlia import RecordProtocol
from gossamer.protocol.libp2p.neighbours import Held, nearest
from gossamer.protocol.libp2p.record_store import RecordStore, join_records
from gossamer.protocol.memory.calls import MemoryP2P
from gossamer.protocol.memory.network import EPOCH_S, MemoryNetwork
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import RunTerms, check_record
from gossamer.protocol.run.invite import Invite
from tests.protocol.peers import nobody

RUN_ID = hashlib.sha256(b"members").digest()
HOST = Identity(b"h" * 32)
HOST_ADDRESS = "/ip4/101.0.0.1/tcp/4001"
RELAY = f"{HOST_ADDRESS}/p2p/{HOST.peer_id}/p2p-circuit"
INVITE = Invite.issue(HOST, RUN_ID, (f"{HOST_ADDRESS}/p2p/{HOST.peer_id}",), None, int(EPOCH_S) + 10**7)
TERMS = RunTerms(RUN_ID, 1, 2, (), 8000, "invite", frozenset({HOST.peer_id}), frozenset(), 100)
MINTED = 200
MINTED_AGAIN_S = 60.0


def now_s() -> float:
    """Return simulated Unix time, which follows the loop's clock."""
    return EPOCH_S + asyncio.get_running_loop().time()


def is_member(record: MemberRecord) -> bool:
    try:
        check_record(record, TERMS, now_s())
    except GossamerError:
        return False
    return True


def membership(identity: Identity) -> Membership:
    credential = None if identity is HOST else INVITE.credential_for(identity.peer_id)
    return Membership(identity, TERMS, OwnCredential(credential), 1000, 10.0, False)


class Seat:
    """Member `number` of the directory; number 0 is the host. A member that is not open is reached through the host as its relay."""

    def __init__(self, network: MemoryNetwork, number: int, *, is_open: bool = True) -> None:
        self.identity = HOST if number == 0 else Identity(number.to_bytes(4, "little") * 8)
        self.is_open = is_open
        address = HOST_ADDRESS if number == 0 else f"/ip4/{102 + number % 100}.{number * 7 % 250}.{number % 250}.9/tcp/4001"
        self.addresses = (address,) if is_open else (RELAY,)
        self.life = network.start_peer(self.peer_id, nobody)
        network.places[self.peer_id] = address
        if not is_open:
            network.hidden[self.peer_id] = ()
        self.p2p: Any = MemoryP2P(network, self.life)
        self.membership = membership(self.identity)
        record_store = RecordStore(RUN_ID, is_member, now_s, random.Random(number))
        self.rpc = RecordProtocol(self.p2p, record_store, self.p2p, lambda: self.membership.bare_record(self.addresses, now_s()))
        self.directory = DhtDirectory(self.rpc)

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it has sent and received."""
        return self.life.line.num_sent + self.life.line.num_received

    @property
    def holds(self) -> set[PeerId]:
        """Return the peers whose records it stores."""
        return {held.peer for held in self.rpc.holdings.all()}

    async def open(self) -> None:
        await self.directory.open()
        if self.identity is not HOST:
            await self.p2p.connect(HOST.peer_id, [HOST_ADDRESS])
            await self.directory.join([HOST.peer_id])

    def misbehave(self) -> None:
        """Behave maliciously: name only dead members, as near to the place as MINTED keys allow, and store no records."""
        rng = random.Random(5)
        minted: list[Held] = []
        made_s = -MINTED_AGAIN_S

        def near(place: int) -> list[Held]:
            nonlocal minted, made_s
            if asyncio.get_running_loop().time() - made_s >= MINTED_AGAIN_S:
                made_s = asyncio.get_running_loop().time()
                minted = [_minted(rng) for _ in range(MINTED)]
            return nearest(minted, place, 16)

        async def store(request: Any, context: Any) -> Any:
            return dht_pb2.StoreResponse(store_ok=[True])

        async def find(request: Any, context: Any) -> Any:
            response = await self.rpc.rpc_find(request, context)
            place, *known = request.keys
            response.results[0].value = join_records(near(int.from_bytes(place, "big")), known)
            return response

        for name, (_, kind) in list(self.life.calls.items()):
            if (answer := {"rpc_store": store, "rpc_find": find}.get(name.rpartition(".")[2])) is not None:
                self.life.calls[name] = answer, kind


def _minted(rng: random.Random) -> Held:
    address = f"/ip4/{rng.randrange(100, 200)}.{rng.randrange(250)}.1.1/tcp/4001"
    record = membership(Identity(rng.randbytes(32))).bare_record((address,), now_s())
    return Held(record, record.to_bytes())
