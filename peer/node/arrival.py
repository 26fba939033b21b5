"""How a newcomer gets in: through any of the doors that it knows, to the run's manifest and the names of several members.

Each door is asked for members first and the manifest beside it, and those whom it names are doors too: one that dies, lies or refuses ends
nothing as long as another is left. Doors are tried one after the other, the next when the last has not answered in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.peer.sync.client import FetchClient, as_final, in_their_version
from gossamer.protocol.addresses import by_peer, with_peer
from gossamer.protocol.errors import BadMessage, BadSignature, GossamerError, PeerMisbehaved, Refused, SwarmUnreachable, TransportError
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import MANIFEST_BYTES
from gossamer.protocol.messages.messages import ContentsKind
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.protocol.tasks import cancel

PATIENCE_S = 60.0  # for the first door that answers
PAUSE_S = 1.0
NEXT_S = 2.0  # until the next door is tried beside one that has not answered
DOORS = 32  # known at most: those of the invite, and those whom they named first


@dataclass(slots=True)
class Doors:
    """Whom a newcomer may ask, and what came of it."""

    addresses: dict[PeerId, tuple[str, ...]]  # each ends in the peer's id
    time: SwarmTime  # that hears what time it is at each
    members: list[bytes] = field(default_factory=list)  # records that were named, unchecked but for their signature
    refusals: dict[PeerId, GossamerError] = field(default_factory=dict)  # that no retry can change
    last: str = "none was asked"

    @classmethod
    def of(cls, addresses: Sequence[str], time: SwarmTime) -> Doors:
        """Take the addresses of an invite."""
        return cls(by_peer(addresses), time)

    def name(self, members: Sequence[bytes], run_id: bytes) -> None:
        """Take in whom a door has named. What it makes up leads nowhere: a manifest has a hash, and a peer proves its key."""
        for raw in members:
            with suppress(BadMessage, BadSignature, ValueError):
                record = MemberRecord.from_bytes(raw)
                record.verify(record.peer_id)
                if record.run_id == run_id and record.addresses and (record.peer_id in self.addresses or len(self.addresses) < DOORS):
                    self.addresses.setdefault(record.peer_id, tuple(with_peer(text, record.peer_id) for text in record.addresses))
                    self.members.append(raw)


async def find_run(
    client: FetchClient, addresses: Sequence[str], time: SwarmTime, say: Callable[[str], None]
) -> tuple[SignedManifest, list[bytes]]:
    """Ask the peers at `addresses` (multiaddrs that end in a peer id), and those whom they name, for the manifest of the client's run.

    Returns it and the records of the members that were named, to be checked by the manifest's terms; the time is set by them. `say` is told
    whom it asks. Raises RunRefusesUs or WrongVersion when nobody wants us, SwarmUnreachable when nobody gave it for a minute,
    BadManifest or WrongVersion when this build cannot read it. Cancel-safe.
    """
    doors, loop = Doors.of(addresses, time), asyncio.get_running_loop()
    until_s = loop.time() + PATIENCE_S
    while loop.time() < until_s:
        doors.refusals.clear()
        signed = await _knock(client, doors, say)
        if signed is not None:
            signed.manifest()  # can this build read it?
            return signed, doors.members
        if doors.refusals.keys() == doors.addresses.keys():
            break
        await asyncio.sleep(PAUSE_S)
    for refusal in doors.refusals.values():
        raise refusal
    raise SwarmUnreachable(
        f"none of the invite's addresses gave the manifest in {PATIENCE_S:.0f} s (last: {doors.last})",
        hint="check that the host is running and that its address can be reached from here, then join again; "
        "peers that have banned this one do not answer it either",
    )


async def _knock(client: FetchClient, doors: Doors, say: Callable[[str], None]) -> SignedManifest | None:
    """Try every door once, those named meanwhile too, until one gives the manifest."""
    asked: set[PeerId] = set()
    asking: set[asyncio.Task[SignedManifest | None]] = set()
    try:
        while True:
            peer = next((peer for peer in doors.addresses if peer not in asked), None)
            if peer is not None:
                asked.add(peer)
                say(f"asking {doors.addresses[peer][0]} for the run's manifest")
                asking.add(asyncio.create_task(_ask(client, peer, doors), name=f"door {peer.short()}"))
            elif not asking:
                return None
            done, asking = await asyncio.wait(asking, timeout=NEXT_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (signed := task.result()) is not None:
                    return signed
    finally:
        await cancel(*asking)


async def _ask(client: FetchClient, peer: PeerId, doors: Doors) -> SignedManifest | None:
    """Ask one door; None, and `doors` knows why, when it does not give the manifest."""
    try:
        return await in_their_version(client, lambda client: _ask_for_all(client, peer, doors))
    except Refused as refusal:
        doors.last = str(refusal)
        if (final := as_final(refusal)) is not None:
            doors.refusals[peer] = final
    except (TransportError, PeerMisbehaved) as error:
        doors.last = f"{doors.addresses[peer][0]}: {error}"
    return None


async def _ask_for_all(client: FetchClient, peer: PeerId, doors: Doors) -> SignedManifest:
    """Ask one door who is in the run, and what the run is."""
    async with client.source(peer, doors.addresses[peer]) as source:
        introduction = await source.introduction((), doors.time, is_door=True)
        doors.name(introduction.members, client.run_id)
        await source.ask(ContentsKind.MANIFEST, 0, MANIFEST_BYTES)
        return SignedManifest.from_bytes(await source.take_manifest(), expect=client.run_id)
