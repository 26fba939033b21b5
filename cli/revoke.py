"""`peer revoke`: revoke an invite, or the membership of one peer."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from gossamer.cli.options import DEFAULT_HOME, HomeFolder, Json
from gossamer.cli.peers import named, records_in
from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.swarm.issued_invites import IssuedInvites
from gossamer.peer.swarm.membership import keep_revocations
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.revocations import Revocation
from gossamer.protocol.run.invite import PREFIX, Credential, Invite, closing_of
from gossamer.protocol.run.manifest import SignedManifest

SHORT_ID = 6  # characters of an id, as other commands show it

What = Annotated[
    str,
    typer.Argument(
        metavar="INVITE|ID",
        help="An invite that this peer wrote (revokes every member that joined with it): its text, or its id (`peer invite --list`). "
        "Or the id of one member. Of an id, the last six characters will do.",
    ),
]


KeepMembers = Annotated[
    bool,
    typer.Option("--keep-members", help="Only close the invite: nobody else joins by it, and its members stay."),
]


def revoke(what: What, home: HomeFolder = DEFAULT_HOME, keep_members: KeepMembers = False, as_json: Json = False) -> None:
    """Revoke an invite that this peer wrote, or the membership of one peer that joined with it.

    Revoking a peer also closes its invite for anybody, so that it cannot return under another key. The other members of that invite stay.
    Other peers learn of it within minutes while this peer runs. A revocation is permanent.
    """
    folder = Home(home)
    signed, identity = need_manifest(folder), Identity.load_or_create(folder.identity)
    need_issuer(signed, identity.peer_id)
    issued = IssuedInvites(folder)
    if len(what) == SHORT_ID:
        known = {*issued.noted(), *issued.admitted(), *records_in(folder).peers()}
        what = str(named(what, known, "invites or members", "`peer invite --list` and `peer run` show their ids"))
    names, words = names_to_revoke(what, signed.run_id, identity.peer_id, issued, keep_members=keep_members)
    signed_now = [Revocation(signed.run_id, identity.peer_id, name, int(time.time())).signed(identity) for name in names]
    are_new = keep_revocations(folder, signed_now)
    if as_json:
        print(json.dumps({"revoked": [str(name) for name in names], "is_new": any(are_new), "run_id": signed.run_id.hex()}))
    else:
        print(f"{words}; this peer notifies the others while it runs" if any(are_new) else "it was already revoked")


def need_issuer(signed: SignedManifest, me: PeerId) -> None:
    """Raise BadSettings unless this peer may write, and so revoke, invites for its run."""
    run = signed.manifest().run
    if run.access != "invite":
        raise BadSettings(
            f'the run has access = "{run.access}": no member joined with an invite', hint="host a new run whose manifest says who may join"
        )
    if str(me) not in run.issuers:
        raise BadSettings(
            "this peer has written no invites for its run", hint="ask the peer that wrote the invite: only it can take it back"
        )


def names_to_revoke(what: str, run_id: bytes, me: PeerId, issued: IssuedInvites, *, keep_members: bool = False) -> tuple[list[PeerId], str]:
    """Return the names to revoke and the sentence that says what that means. Raises BadInvite and BadSettings."""
    if what.strip().lower().startswith(PREFIX):
        credential = _own_credential(what, run_id, me)
        bearer, peer = credential.bearer, credential.subject
    else:
        name = PeerId.from_text(what)
        bearer, peer = (name, None) if name in {*issued.uses(), *issued.admitted().values()} else (None, name)
    if bearer is not None:
        if keep_members:
            return [closing_of(bearer)], "the invite is closed; its members stay"
        return [bearer], "the invite is revoked, and so is every membership that came from it"
    assert peer is not None
    if keep_members:
        words = f"--keep-members closes an invite for anybody, and {peer.short()} is one peer"
        raise BadSettings(words, hint="name an invite (`peer invite --list`), or leave out --keep-members to end this membership")
    return _peer(peer, issued)


def _own_credential(text: str, run_id: bytes, me: PeerId) -> Credential:
    """Return the credential in an invite to this run that this peer wrote. Raises BadInvite and BadSettings."""
    invite = Invite.from_text(text)
    if invite.run_id != run_id:
        raise BadSettings("the invite is for another run than this home's", hint="--home DIR names another folder")
    if invite.credential.issuer != me:
        raise BadSettings(f"the invite was written by {invite.credential.issuer}", hint="only that peer can take it back")
    return invite.credential


def _peer(peer: PeerId, issued: IssuedInvites) -> tuple[list[PeerId], str]:
    admitted = issued.admitted()  # by the bearer key of the invite by which each came
    if (bearer := admitted.get(peer)) is not None:
        num_others = list(admitted.values()).count(bearer) - 1
        stay = f"other peers that came by it and stay: {num_others}"
        return [peer, closing_of(bearer)], f"{peer.short()} is no longer a member, and its invite is closed ({stay})"
    if peer in issued.noted():
        return [peer], f"the invite for {peer.short()} and its membership are revoked: no other invite admits this key"
    advice = "if it has an invite for anybody, revoke that too, or it returns under another key"
    return [peer], f"{peer.short()} is no longer a member; {advice}"
