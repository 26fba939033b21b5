"""`peer invite`: write an invite, if the manifest allows this peer to."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Annotated

import typer

from gossamer.cli.issued import show_issued
from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json, Uses
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.units import duration_s
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.peer.swarm.issued_invites import USES, IssuedInvite, IssuedInvites
from gossamer.peer.swarm.membership import held_revocations
from gossamer.protocol.addresses import NEAR, is_public, with_peer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import INVITE_BOOTSTRAPS
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import RunManifest

LIFETIME = "30d"
WITHOUT_INVITES = {  # by access, whom an invite lets in where nobody needs one: it says only where the run is
    "allowlist": "for the members that the manifest lists, and for nobody else",
    "open": "for everybody: the run is open",
}
OWN_ADDRESSES = 3  # of this peer, before those of other peers: one public, one or two through relays

Subject = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="PEERID",
        help="Id of the only peer that may use the invite (`peer id` prints it). Default: anyone who has the invite.",
    ),
]
Expires = Annotated[str, typer.Option("--expires", metavar="TIME", help="How long the invite is valid, like 90m, 12h or 30d.")]

Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="MULTIADDR", help="Another bootstrap address to include, such as that of a bootstrap node. May repeat."),
]


List = Annotated[
    bool,
    typer.Option("--list", help="Write no invite, but list those of this peer: for whom, until when, and which members have used them."),
]


def invite(
    home: HomeFolder = DEFAULT_HOME,
    subject: Subject = None,
    uses: Uses = None,
    expires: Expires = LIFETIME,
    also: Also = None,
    listed: List = False,
    as_json: Json = False,
) -> None:
    """Print an invite to the run of this peer, or list those that it has issued.

    The invite is one line on stdout. Anybody who has it can join, up to `--uses` peers; with `--for`, one peer alone.
    """
    folder = Home(home)
    signed = need_manifest(folder)
    identity = Identity.load_or_create(folder.identity)
    need_issuer(signed.manifest(), identity.peer_id)
    if listed:
        if subject or uses is not None or also or expires != LIFETIME:
            raise BadSettings("--list writes no invite, so it takes no option of one", hint="leave out --list, or all but --json")
        show_issued(folder, identity.peer_id, signed, as_json=as_json)
        return
    if subject and uses is not None:
        raise BadSettings("an invite with --for admits one peer, so --uses does not apply", hint="leave out one of them")
    not_after_s = int(time.time()) + lifetime_s(expires)
    to = PeerId.from_text(subject) if subject else None
    if to is not None and held_revocations(folder).has_revoked(identity.peer_id, to):
        hint = "it needs another key: `peer id --home DIR` prints that of another folder, from which it then joins"
        raise BadSettings(f"{to.short()} is revoked for good: no invite admits it again", hint=hint)
    terms = signed.manifest().run
    if to is not None and terms.access == "allowlist" and str(to) not in terms.members:
        raise BadSettings(f"{to.short()} is not on the run's list of members", hint="host a new run whose manifest lists it in run.members")
    addresses = known_addresses(folder, identity.peer_id, tuple(also or ()))
    issued = _issue(folder, identity, signed.run_id, addresses, to, not_after_s, uses or USES)
    name, not_after_s, written = issued.credential.name, issued.credential.not_after_s, issued.to_text()
    back = f"; `peer revoke {name.short()}` takes it back" if terms.access == "invite" else ""
    print(f"{_for_whom(issued, uses or USES, terms.access)}{back}", file=sys.stderr)
    found = {"invite": written, "id": str(name), "run_id": signed.run_id.hex(), "not_after_s": not_after_s}
    print(json.dumps(found) if as_json else written)


def issued_to_anybody(folder: Home, identity: Identity, run_id: bytes, own: tuple[str, ...], uses: int | None) -> Invite:
    """Issue an invite to the run of a running peer with these addresses, with limited uses; valid for 30 days.

    Raises BadSettings for uses that admit nobody.
    """
    if uses is not None and uses < 1:
        raise BadSettings(f"an invite for {uses} peers admits nobody", hint="give 1 or more")
    addresses = bootstraps(folder, identity.peer_id, own)
    return _issue(folder, identity, run_id, addresses, None, int(time.time() + lifetime_s(LIFETIME)), uses or USES)


def need_issuer(manifest: RunManifest, me: PeerId) -> None:
    """Raise BadSettings unless this peer may write invites."""
    if manifest.run.access == "invite" and str(me) not in manifest.run.issuers:
        raise BadSettings(
            "this peer may not write invites for its run", hint="ask one of the peers that the manifest lists under run.issuers"
        )


def _issue(
    folder: Home, identity: Identity, run_id: bytes, addresses: tuple[str, ...], to: PeerId | None, not_after_s: int, uses: int
) -> Invite:
    """Issue and note an invite, for anybody with limited uses. If an earlier invite for anybody is the same, it expires a second later."""
    while True:
        issued = Invite.issue(identity, run_id, addresses, to, not_after_s)
        noted = IssuedInvite(uses if to is None else None, int(time.time()), not_after_s)
        if IssuedInvites(folder).note(issued.credential.name, noted):
            return issued
        not_after_s += 1


def _for_whom(issued: Invite, uses: int, access: str) -> str:
    """Return what the issuer of an invite should know about who can use it."""
    if access != "invite":
        return WITHOUT_INVITES[access]
    if issued.credential.subject is not None:
        return f"for {issued.credential.subject} alone"
    most = "one peer" if uses == 1 else f"up to {uses} peers"
    return f"for anybody who has it: {most}, which this peer counts while it runs; --for PEERID admits one peer alone"


def lifetime_s(text: str) -> int:
    """Read how long an invite is valid, like 90m, 12h or 30 days. Raises BadSettings."""
    try:
        seconds = int(duration_s(text))
    except ValueError as error:
        raise BadSettings(f"--expires {text!r} is not a duration: {error}", hint="for example 90m, 12h or 30d") from error
    if seconds < 1:
        raise BadSettings(f"--expires {text!r} is over at once", hint="for example 90m, 12h or 30d")
    return seconds


def known_addresses(folder: Home, me: PeerId, given: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return bootstrap addresses: the given ones, this peer's own if it runs, then those of peers in its address book.

    Raises BadSettings if there are none.
    """
    own: tuple[str, ...] = ()
    with contextlib.suppress(BadSettings):  # it does not run: the address book must do
        own = tuple(ask(folder.path, {"verb": "status"})["addresses"])
    addresses = bootstraps(folder, me, own, given)
    if not addresses:
        raise BadSettings("no bootstrap address is known for the invite", hint="start this peer first, with `peer host` or `peer join`")
    return addresses


def bootstraps(folder: Home, me: PeerId, own: tuple[str, ...], given: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the bootstrap addresses for an invite: given ones, this peer's, then as many of the address book as fit.

    One reachable address is enough to join, so the best address of each peer comes before the second of any.
    """
    book = AddressBook(me)
    book.load(folder.peers, 0.0)
    met = [[with_peer(address, peer.peer_id) for address in peer.addresses if not address.startswith(NEAR)] for peer in book.live(0.0)]
    ways = [sorted(addresses, key=lambda address: not is_public(address)) for addresses in met if addresses]
    first, others = own[:OWN_ADDRESSES], [addresses[0] for addresses in ways]
    rest = [*own[OWN_ADDRESSES:], *(address for addresses in ways for address in addresses[1:])]
    return tuple(dict.fromkeys((*given, *first, *others, *rest)))[:INVITE_BOOTSTRAPS]
