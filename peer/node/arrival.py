"""How a newcomer joins: through any bootstrap address that it knows, it gets the run's manifest and the records of several members.

The members that a bootstrap node names serve as bootstrap nodes too, so one that dies, lies or refuses does not end the join.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gossamer.peer.swarm.swarm_time import SwarmTime
from gossamer.peer.sync.client import FetchClient, as_final
from gossamer.protocol.addresses import by_peer, with_peer
from gossamer.protocol.errors import (
    TRIED_BEFORE,
    BadMessage,
    BadSignature,
    GossamerError,
    PeerMisbehaved,
    Refused,
    SwarmUnreachable,
    TransportError,
    short_reason,
)
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.protocol.tasks import cancel

TIMEOUT_S = 60.0  # for the first bootstrap node that answers
PAUSE_S = 1.0
NEXT_S = 2.0  # until the next one is tried beside one that has not answered
MAX_BOOTSTRAPS = 32  # known at most: those of the invite, and the first ones that they named


@dataclass(slots=True)
class Bootstraps:
    """The peers that a newcomer may ask, and their answers so far."""

    addresses: dict[PeerId, tuple[str, ...]]  # each ends in the peer's id
    time: SwarmTime  # gets a reading of each one's clock
    members: list[bytes] = field(default_factory=list)  # records that were named, unchecked but for their signature
    refusals: dict[PeerId, GossamerError] = field(default_factory=dict)  # that no retry can change
    last: str = "none answered"

    def name(self, members: Sequence[bytes], run_id: bytes) -> None:
        """Add members that a peer has named. Invented ones do no harm: the manifest has a known hash, and each peer proves its key."""
        for raw in members:
            with suppress(BadMessage, BadSignature, ValueError):
                record = MemberRecord.from_bytes(raw)
                record.verify(record.peer_id)
                if (
                    record.run_id == run_id
                    and record.addresses
                    and (record.peer_id in self.addresses or len(self.addresses) < MAX_BOOTSTRAPS)
                ):
                    self.addresses.setdefault(record.peer_id, tuple(with_peer(text, record.peer_id) for text in record.addresses))
                    self.members.append(raw)


async def find_run(
    client: FetchClient, addresses: Sequence[str], time: SwarmTime, report: Callable[[str], None]
) -> tuple[SignedManifest, list[bytes]]:
    """Ask the peers at `addresses` (multiaddrs that end in a peer id), and the peers that they name, for the manifest of the client's run.

    Returns it and the records of the members that were named, which the caller checks by the manifest's terms. `time` learns their clocks;
    `report` gets a line about each peer that is asked. Raises RunRefusesUs or WrongVersion when all refuse us, SwarmUnreachable when nobody
    gave it for a minute, BadManifest or WrongVersion when this build cannot read it. Cancel-safe.
    """
    bootstraps, loop = Bootstraps(by_peer(addresses), time), asyncio.get_running_loop()
    until_s = loop.time() + TIMEOUT_S
    while loop.time() < until_s:
        bootstraps.refusals.clear()
        signed = await _ask_in_turn(client, bootstraps, report)
        if signed is not None:
            signed.manifest()  # can this build read it?
            return signed, bootstraps.members
        if bootstraps.refusals.keys() == bootstraps.addresses.keys():
            break
        await asyncio.sleep(PAUSE_S)
    for refusal in bootstraps.refusals.values():
        raise refusal
    raise SwarmUnreachable(
        f"none of the invite's addresses gave the manifest in {TIMEOUT_S:.0f} s (last: {bootstraps.last})",
        hint="check that the host is running, and the way to it with `peer doctor INVITE`, then join again; "
        "peers that have banned this one do not answer it either",
    )


async def _ask_in_turn(client: FetchClient, bootstraps: Bootstraps, report: Callable[[str], None]) -> SignedManifest | None:
    """Try every known peer once, including those named on the way, until one gives the manifest."""
    asked: set[PeerId] = set()
    asking: set[asyncio.Task[SignedManifest | None]] = set()
    try:
        while True:
            peer = next((peer for peer in bootstraps.addresses if peer not in asked), None)
            if peer is not None:
                asked.add(peer)
                report(f"asking {bootstraps.addresses[peer][0]} for the run's manifest")
                asking.add(asyncio.create_task(_ask(client, peer, bootstraps), name=f"bootstrap {peer.short()}"))
            elif not asking:
                return None
            done, asking = await asyncio.wait(asking, timeout=NEXT_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (signed := task.result()) is not None:
                    return signed
    finally:
        await cancel(*asking)


async def _ask(client: FetchClient, peer: PeerId, bootstraps: Bootstraps) -> SignedManifest | None:
    """Ask one peer; return None, with the reason noted in `bootstraps`, if it does not give the manifest."""
    try:
        async with client.source(peer, bootstraps.addresses[peer]) as source:
            peer_list = await source.peer_list((), bootstraps.time, is_bootstrap=True, group=peer)
            bootstraps.name(peer_list.members, client.run_id)
            return await source.manifest()
    except Refused as refusal:
        bootstraps.last = str(refusal)
        if (final := as_final(refusal)) is not None:
            bootstraps.refusals[peer] = final
    except (TransportError, PeerMisbehaved) as error:
        if (reason := short_reason(str(error))) != TRIED_BEFORE:  # then the reason before stands
            bootstraps.last = f"{bootstraps.addresses[peer][0]}: {reason}"
    return None
