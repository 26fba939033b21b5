"""`peer invite`: write an invite for somebody, where the manifest lets this peer do so."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.control_socket import ask
from gossamer.peer.machine.home import Home
from gossamer.peer.swarm.address_book import AddressBook
from gossamer.protocol.addresses import NEAR, is_public, with_peer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.limits import INVITE_BOOTSTRAPS
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest

OWN_ADDRESSES = 3  # that come before those of other peers: on the internet, through a relay or two
SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}

Subject = Annotated[
    str | None, typer.Option("--for", metavar="PEERID", help="Who may use it; `peer id` prints it there. Default: whoever has it.")
]
Expires = Annotated[str, typer.Option("--expires", metavar="TIME", help="How long it is good, for example 90m, 12h or 30d.")]

Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="MULTIADDR", help="Another address where newcomers may begin, such as a seed's. May repeat."),
]


def invite(
    home: HomeFolder = DEFAULT_HOME, subject: Subject = None, expires: Expires = "30d", also: Also = None, as_json: Json = False
) -> None:
    """Print an invite to the run of this peer.

    It is one line on stdout.
    """
    folder = Home(home)
    if not folder.manifest.exists():
        raise BadSettings(f"{folder.path} holds no run to invite to", hint="`peer host` starts one; --home DIR names another folder")
    signed = SignedManifest.from_bytes(folder.manifest.read_bytes())
    identity = Identity.load_or_create(folder.identity)
    if signed.manifest().run.access == "invite" and str(identity.peer_id) not in signed.manifest().run.issuers:
        raise BadSettings(
            "this peer may not write invites for its run", hint="ask one of the peers that the manifest lists under run.issuers"
        )
    not_after_s = int(time.time()) + lifetime_s(expires)
    to = PeerId.from_text(subject) if subject else None
    addresses = known_addresses(folder, identity.peer_id, tuple(also or ()))
    written = Invite.issue(identity, signed.run_id, addresses, to, not_after_s).to_text()
    print(json.dumps({"invite": written, "run_id": signed.run_id.hex(), "not_after_s": not_after_s}) if as_json else written)


def lifetime_s(text: str) -> int:
    """Read a length of time like 90m, 12h or 30d. Raises BadSettings."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if match is None:
        raise BadSettings(f"--expires {text!r} is not a length of time", hint="write minutes, hours or days like 90m, 12h or 30d")
    return int(match[1]) * SECONDS[match[2]]


def known_addresses(folder: Home, me: PeerId, given: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return where newcomers may begin: the given addresses, this peer's own if it runs, then those of peers that it has met.

    Raises BadSettings if there are none.
    """
    own: tuple[str, ...] = ()
    with contextlib.suppress(BadSettings):  # it does not run: those whom it has met must do
        own = tuple(ask(folder.path, {"verb": "status"})["addresses"])
    addresses = doors(folder, me, own, given)
    if not addresses:
        raise BadSettings("no address is known where a newcomer could begin", hint="start this peer first, with `peer host` or `peer join`")
    return addresses


def doors(folder: Home, me: PeerId, own: tuple[str, ...], given: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the addresses for an invite: given ones, this peer's, and of as many others that it has met as there is room for.

    Whoever is invited gets in as long as one of them is there: so each other peer's best address comes before anybody's second.
    """
    book = AddressBook(me)
    book.load(folder.peers, 0.0)
    met = [[with_peer(address, peer.peer_id) for address in peer.addresses if not address.startswith(NEAR)] for peer in book.live(0.0)]
    ways = [sorted(addresses, key=lambda address: not is_public(address)) for addresses in met if addresses]
    first, others = own[:OWN_ADDRESSES], [addresses[0] for addresses in ways]
    rest = [*own[OWN_ADDRESSES:], *(address for addresses in ways for address in addresses[1:])]
    return tuple(dict.fromkeys((*given, *first, *others, *rest)))[:INVITE_BOOTSTRAPS]
