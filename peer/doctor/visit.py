"""Call the peers that an invite or the home names: reachability, round trip, and what they observe of this peer.

The calls use a p2pd of their own on the port where the peer would listen. Unless the home's own key is free to use, they use a temporary
identity. Nothing is stored, here or at the other peers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.peer.machine.home import Home, write_whole
from gossamer.peer.machine.runtime_folder import runtime_folder
from gossamer.peer.node.membership_watch import latest_credential
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.membership import OwnCredential
from gossamer.peer.sync.client import FetchClient
from gossamer.peer.sync.line_rate import line_rates
from gossamer.protocol.addresses import by_peer
from gossamer.protocol.errors import GossamerError, PeerMisbehaved, RefusalCode, Refused, TransportError, short_reason
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import INVITE_BOOTSTRAPS, SEED_BYTES
from gossamer.protocol.run.invite import Credential, Invite
from gossamer.protocol.run.manifest import SignedManifest
from gossamer.protocol.streams.transport import Purpose, Stream

if TYPE_CHECKING:
    from gossamer.protocol.libp2p.p2pd import Control

VISIT_S = 17.0  # for all calls
CALL_S = 10.0  # for one call
ECHO_S = 8.0


@dataclass(frozen=True, slots=True)
class Call:
    """The result of calling one peer."""

    address: str  # one of the called addresses
    trouble: str = ""  # why it could not be reached; empty if it could
    connect_s: float = 0.0  # until the connection was open
    round_trip_s: float = 0.0  # of a small request
    refused: Refused | None = None  # reachable, but it refused the request
    clock_ahead_s: float = 0.0  # of this machine's clock
    observed: str = ""  # the multiaddr that it observes for this peer
    is_open: bool | None = None  # whether it could connect to this peer; None if it did not try
    manifest: SignedManifest | None = None

    @property
    def name(self) -> str:
        """The end of the peer's id, and its address."""
        _, _, host, _, port, *_ = self.address.split("/")
        return f"{self.address[-6:]} at {host}:{port}"


@dataclass(frozen=True, slots=True)
class CallRound:
    """The results of calling all peers."""

    trouble: str = ""  # why no peer could be called
    way_out: str = "an invite names peers to ask; without one, `peer join` and `peer host` go on with what the home holds"
    calls: tuple[Call, ...] = field(default=())
    under_own_name: bool = False
    line: tuple[float, float] | None = None  # bytes a second, up and down, to the fastest

    @property
    def reached(self) -> list[Call]:
        """The peers that were reached, the fastest first."""
        return sorted((call for call in self.calls if not call.trouble), key=lambda call: call.round_trip_s or call.connect_s)

    @property
    def manifest(self) -> SignedManifest | None:
        """The run's manifest, from the first peer that sent it."""
        return next((call.manifest for call in self.calls if call.manifest), None)


@dataclass(frozen=True, slots=True)
class Place:
    """The address to listen on, and the port that other peers try to reach."""

    host: str
    port: int  # 0: any
    running: int = 0  # port of the peer that already runs; if set, this port is tried


def visit(home: Home, invite: Invite | None, held: SignedManifest | None, own: Identity | None, place: Place) -> CallRound:
    """Call all peers at once, with the home's own key if there is one and no running peer uses it.

    Raises nothing; blocks for VISIT_S at most.
    """
    run = invite or held
    book = AddressBook((own or Identity(bytes(SEED_BYTES))).peer_id)
    book.load(home.peers, time.time())
    named = invite.bootstraps if invite else ()
    addresses = tuple(dict.fromkeys((*named, *book.entry_addresses(time.time()))))[:INVITE_BOOTSTRAPS]
    if run is None or not addresses:
        return CallRound("no peer of the run is known") if run else CallRound()
    is_own = own is not None and not place.running
    identity = own if own is not None and is_own else Identity(os.urandom(SEED_BYTES))
    from_invite = invite.credential_for(identity.peer_id) if invite else None
    credential = latest_credential(home, from_invite, run.run_id, identity.peer_id)
    try:
        with runtime_folder(0) as folder:
            calls, line = asyncio.run(_call_all(folder, identity, run.run_id, credential, addresses, place))
        return CallRound(calls=calls, under_own_name=is_own, line=line)
    except TimeoutError:
        return CallRound(f"no peer answered within {VISIT_S:.0f} s", "try again when the machine is less busy")
    except GossamerError as error:
        return CallRound(str(error), error.hint)
    except OSError as error:
        return CallRound(f"the network part of a peer does not start here: {error}", "repair that first; without it no peer can be asked")


async def _call_all(
    folder: Path, identity: Identity, run_id: bytes, credential: Credential | None, addresses: Sequence[str], place: Place
) -> tuple[tuple[Call, ...], tuple[float, float] | None]:
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + VISIT_S
    async with asyncio.timeout_at(ends_s), AsyncExitStack() as stack:
        from gossamer.protocol.libp2p.p2pd import Daemon, DaemonSettings  # hivemind takes seconds to import, which count
        from gossamer.protocol.libp2p.splice import CarriedBytes
        from gossamer.protocol.libp2p.tunnel import tunnel_transport
        from gossamer.protocol.streams.admission import Admission

        key = folder / "key"
        write_whole(key, identity.to_bytes())
        settings = DaemonSettings(key, folder / "net", place.host, place.port, asks_router=False)
        daemon = await stack.enter_async_context(Daemon(settings))
        tunnel = tunnel_transport(daemon.control, folder / "net", _refuse_calls, Admission(), CarriedBytes())
        client = FetchClient(identity, run_id, OwnCredential(credential), await stack.enter_async_context(tunnel))
        port = place.running or daemon.port
        calls = tuple(await asyncio.gather(*(_call(daemon.control, client, *peer, port) for peer in by_peer(addresses).items())))
        left_s = ends_s - loop.time() - 1.0  # a slow measurement must not lose the results so far
        return calls, await _measure(client, CallRound(calls=calls).reached, min(ECHO_S, max(0.0, left_s)))


async def _refuse_calls(purpose: Purpose, stream: Stream) -> None:
    raise Refused(RefusalCode.NOT_READY, "this is peer doctor, not a member")


async def _call(control: Control, client: FetchClient, partner: PeerId, addresses: Sequence[str], port: int) -> Call:
    """Connect to one peer, fetch the manifest, and ask what the peer observes of this one."""
    address, began_s = addresses[0], time.monotonic()
    try:
        async with asyncio.timeout(CALL_S):
            await control.connect(partner, addresses)
            connect_s = time.monotonic() - began_s
            try:
                answered = await _ask(client, partner, Call(address, connect_s=connect_s))
                return replace(answered, is_open=await _is_open(control, partner, port))
            except Refused as refusal:
                return Call(address, connect_s=connect_s, refused=refusal)
    except TimeoutError:
        return Call(address, f"no answer within {CALL_S:.0f} s")
    except (TransportError, PeerMisbehaved) as error:
        return Call(address, short_reason(str(error)))


async def _ask(client: FetchClient, partner: PeerId, call: Call) -> Call:
    async with client.source(partner, ()) as source:
        signed = await source.manifest()
        asked_s, asked_unix_s = time.monotonic(), time.time()
        observed_address = await source.observed_address()
        took_s = time.monotonic() - asked_s
        ahead_s = observed_address.unix_ms / 1000 - (asked_unix_s + took_s / 2)
        return replace(call, manifest=signed, round_trip_s=took_s, clock_ahead_s=ahead_s, observed=observed_address.observed)


async def _is_open(control: Control, partner: PeerId, port: int) -> bool | None:
    from gossamer.protocol.libp2p.dial_back import Reached, ask

    try:
        reached = (await ask(control, partner, port)).reached
    except (TransportError, PeerMisbehaved):
        return None
    return None if reached is Reached.NOT_TRIED else reached is Reached.YES


async def _measure(client: FetchClient, reached: Sequence[Call], within_s: float) -> tuple[float, float] | None:
    """Return the rate to the fastest peer, in bytes a second each way; None if it could not be measured."""
    fastest = next((call for call in reached if call.manifest), None)
    if fastest is None:
        return None
    partner, rates = PeerId.from_text(fastest.address.rpartition("/p2p/")[2]), None
    try:
        async with asyncio.timeout(within_s), client.source(partner, ()) as source:
            async for found in line_rates(source, fastest.round_trip_s):
                rates = found
    except (TimeoutError, TransportError, PeerMisbehaved, Refused):
        pass  # the measurements so far count
    return rates
