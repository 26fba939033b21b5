"""Calling on the peers that an invite or the home names: are they there, how fast, and what do they say.

With a p2pd of its own that listens nowhere else, and, unless the invite is for the home's own key, under a name that nobody has seen
before and nobody will see again: nothing of this stays, here or there.
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

from peer.machine.home import Home, write_whole
from peer.machine.runtime_folder import runtime_folder
from peer.node.fetching import FetchClient
from peer.swarm.address_book import AddressBook
from protocol.errors import GossamerError, PeerMisbehaved, RefusalCode, Refused, TransportError
from protocol.identity import Identity, PeerId
from protocol.limits import INVITE_BOOTSTRAPS, SEED_BYTES
from protocol.messages.messages import ContentsKind
from protocol.run.invite import Credential, Invite
from protocol.run.manifest import SignedManifest
from protocol.streams.transport import Purpose, Stream

if TYPE_CHECKING:
    from protocol.libp2p.p2pd import Control

VISIT_S = 20.0  # for all
CALL_S = 10.0  # for one
_REASONS = ("connection refused", "no route to host", "network is unreachable", "i/o timeout", "peer id mismatch", "no such host")


@dataclass(frozen=True, slots=True)
class Call:
    """What came of calling on one peer."""

    address: str
    trouble: str = ""  # why it could not be reached; empty if it could
    connect_s: float = 0.0  # until it let us in
    round_trip_s: float = 0.0  # for a small question and its answer
    refused: Refused | None = None  # it is there, and does not answer us
    manifest: SignedManifest | None = None

    @property
    def name(self) -> str:
        """Say who was called: the end of its id, and where."""
        _, _, host, _, port, *_ = self.address.split("/")
        return f"{self.address[-6:]} at {host}:{port}"


@dataclass(frozen=True, slots=True)
class Visit:
    """What came of calling on all."""

    trouble: str = ""  # why nobody could be called at all
    calls: tuple[Call, ...] = field(default=())
    under_own_name: bool = False

    @property
    def reached(self) -> list[Call]:
        """Those who were there, the fastest first."""
        return sorted((call for call in self.calls if not call.trouble), key=lambda call: call.round_trip_s or call.connect_s)

    @property
    def manifest(self) -> SignedManifest | None:
        """The run's manifest, from whoever gave it."""
        return next((call.manifest for call in self.calls if call.manifest), None)


def ways_in(home: Home, invite: Invite | None, me: PeerId | None) -> tuple[str, ...]:
    """Return whom to call: those that the invite names, then those whom this peer has met."""
    book = AddressBook(me or Identity(bytes(SEED_BYTES)).peer_id)
    book.load(home.peers, time.time())
    named = invite.bootstraps if invite else ()
    return tuple(dict.fromkeys((*named, *book.ways_in(time.time()))))[:INVITE_BOOTSTRAPS]


def visit(home: Home, invite: Invite | None, held: SignedManifest | None, own: Identity | None, *, is_own_name_free: bool) -> Visit:
    """Call on all at once. `is_own_name_free`: no peer runs under the home's key. Raises nothing; blocks for VISIT_S at most."""
    run = invite or held
    addresses = ways_in(home, invite, own.peer_id if own else None)
    if run is None or not addresses:
        return Visit("no peer of the run is known" if run else "there is no run to look at")
    is_own = own is not None and is_own_name_free
    identity = own if own is not None and is_own else Identity(os.urandom(SEED_BYTES))
    credential = invite.credential_for(identity.peer_id) if invite else None
    try:
        with runtime_folder(0) as folder:
            calls = asyncio.run(_call_all(folder, identity, run.run_id, credential, addresses))
        return Visit(calls=calls, under_own_name=is_own)
    except TimeoutError:
        return Visit(f"the network part of this machine did not come up within {VISIT_S:.0f} s")
    except (GossamerError, OSError) as error:
        return Visit(str(error))


async def _call_all(
    folder: Path, identity: Identity, run_id: bytes, credential: Credential | None, addresses: Sequence[str]
) -> tuple[Call, ...]:
    async with asyncio.timeout(VISIT_S), AsyncExitStack() as stack:
        from protocol.libp2p.p2pd import Daemon, DaemonSettings  # hivemind: seconds to import, which count
        from protocol.libp2p.splice import CarriedBytes
        from protocol.libp2p.tunnel import TunnelTransport
        from protocol.streams.admission import Admission

        key = folder / "key"
        write_whole(key, identity.to_bytes(), private=True)
        daemon = await stack.enter_async_context(Daemon(DaemonSettings(key, folder / "net", host="127.0.0.1")))
        tunnel = TunnelTransport(daemon.control, folder / "net", _nobody_calls, Admission(), CarriedBytes())
        client = FetchClient(identity, run_id, credential, await stack.enter_async_context(tunnel))
        return tuple(await asyncio.gather(*(_call(daemon.control, client, address) for address in addresses)))


async def _nobody_calls(purpose: Purpose, stream: Stream) -> None:
    raise Refused(RefusalCode.NOT_READY, "I only look around")


async def _call(control: Control, client: FetchClient, address: str) -> Call:
    """Call on one peer: connect, and ask for the manifest."""
    partner, began_s = PeerId.from_text(address.rpartition("/p2p/")[2]), time.monotonic()
    try:
        async with asyncio.timeout(CALL_S):
            await control.connect(partner, [address])
            connect_s = time.monotonic() - began_s
            try:
                return await _ask(client, partner, Call(address, connect_s=connect_s))
            except Refused as refusal:
                return Call(address, connect_s=connect_s, refused=refusal)
    except TimeoutError:
        return Call(address, f"no answer within {CALL_S:.0f} s")
    except (TransportError, PeerMisbehaved) as error:
        return Call(address, short_reason(str(error)))


async def _ask(client: FetchClient, partner: PeerId, call: Call) -> Call:
    data = await client.manifest(partner, ())
    signed = SignedManifest.from_bytes(data, expect=client.run_id)
    asked_s = time.monotonic()
    await client.header(partner, (), ContentsKind.MANIFEST)
    return replace(call, round_trip_s=time.monotonic() - asked_s, manifest=signed)


def short_reason(text: str) -> str:
    """Return the network's own words in what p2pd says, which lists every address that it tried."""
    return next((reason for reason in _REASONS if reason in text), text)
