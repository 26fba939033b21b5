"""`peer revoke`: take back an invite, or a member's right to take part."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.peer.machine.home import Home, write_whole
from gossamer.protocol.errors import BadSettings, PeerMisbehaved
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.revocations import Revocation, Revocations, read_revocations
from gossamer.protocol.run.invite import PREFIX, Invite
from gossamer.protocol.run.manifest import SignedManifest

What = Annotated[
    str, typer.Argument(metavar="INVITE|PEERID", help="An invite that this peer wrote, for all who came by it; or the id of one member.")
]


def revoke(what: What, home: HomeFolder = DEFAULT_HOME, as_json: Json = False) -> None:
    """Take back an invite of this peer's, or let one of its guests take part no more.

    The others hear of it within minutes while this peer runs, and for good.
    """
    folder = Home(home)
    if not folder.manifest.exists():
        raise BadSettings(f"{folder.path} holds no run", hint="--home DIR names another folder")
    signed, identity = SignedManifest.from_bytes(folder.manifest.read_bytes()), Identity.load_or_create(folder.identity)
    need_issuer(signed, identity.peer_id)
    revoked, words = named(what, signed.run_id, identity.peer_id)
    held = kept(folder)
    is_new = held.add(Revocation(signed.run_id, identity.peer_id, revoked, int(time.time())).signed(identity))
    write_whole(folder.revocations, held.to_bytes(), private=True)
    if as_json:
        print(json.dumps({"revoked": str(revoked), "is_new": is_new, "run_id": signed.run_id.hex()}))
    else:
        print(f"{words}; the other peers hear of it from this one while it runs" if is_new else "that was revoked before")


def need_issuer(signed: SignedManifest, me: PeerId) -> None:
    """Raise BadSettings unless this peer may write invites for its run, and so take them back."""
    run = signed.manifest().run
    if run.access != "invite":
        raise BadSettings(
            f'the run has access = "{run.access}": nobody came by an invite', hint="host a new run; its manifest says who may take part"
        )
    if str(me) not in run.issuers:
        raise BadSettings(
            "this peer has written no invites for its run", hint="ask the peer that wrote the invite: only it can take it back"
        )


def named(what: str, run_id: bytes, me: PeerId) -> tuple[PeerId, str]:
    """Return the name that is to be revoked, and what that means. Raises BadInvite and BadSettings."""
    if not what.strip().lower().startswith(PREFIX):
        peer = PeerId.from_text(what)
        return (
            peer,
            f"{peer.short()} takes part no more; but with an invite for anybody it can come back under another key",
        )
    invite = Invite.from_text(what)
    if invite.run_id != run_id:
        raise BadSettings("the invite is for another run than this home's", hint="--home DIR names another folder")
    credential = invite.credential
    if credential.issuer != me:
        raise BadSettings(f"the invite was written by {credential.issuer}", hint="only that peer can take it back")
    if credential.subject is not None:
        return credential.subject, f"the invite for {credential.subject.short()} is good no more"
    assert credential.bearer is not None
    return credential.bearer, "the invite is good no more, for nobody who came by it either"


def kept(folder: Home) -> Revocations:
    """Return what is revoked already, as far as this home knows."""
    held = Revocations()
    with contextlib.suppress(OSError, PeerMisbehaved):
        for revocation in read_revocations(folder.revocations.read_bytes()):
            held.add(revocation)
    return held
