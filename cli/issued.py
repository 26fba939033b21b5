"""`peer invite --list`: the invites that this peer has issued, as far as its home knows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.cli.figures import fitted, table_text
from gossamer.peer.machine.home import Home
from gossamer.peer.machine.run_view import kept_view
from gossamer.peer.swarm.issued_invites import IssuedInvite, IssuedInvites
from gossamer.peer.swarm.membership import held_revocations
from gossamer.protocol.identity import PeerId, short_id
from gossamer.protocol.messages.revocations import Revocations
from gossamer.protocol.run.invite import closing_of
from gossamer.protocol.run.manifest import SignedManifest

COLUMNS = ("id", "for", "used", "issued", "expires", "state", "members")


def show_issued(folder: Home, me: PeerId, signed: SignedManifest, *, as_json: bool) -> None:
    """Print the invites of this peer."""
    rows = issued_rows(folder, me, time.time())
    if as_json:
        print(json.dumps({"run_id": signed.run_id.hex(), "invites": rows}))
    else:
        print(fitted(described(rows, signed.manifest().run.access), 8))


def issued_rows(folder: Home, me: PeerId, now_s: float) -> list[dict[str, Any]]:
    """Return the invites that a home knows of, the oldest first, each as a JSON-able object."""
    issued, revoked, seen = IssuedInvites(folder), held_revocations(folder), kept_view(folder).members
    rows, admitted = [], issued.admitted()
    for name, invite in issued.noted().items():
        is_for_one = invite.uses is None
        members = [name] * (str(name) in seen) if is_for_one else [peer for peer in admitted if admitted[peer] == name]
        gone = members if revoked.has_revoked(me, name) else [peer for peer in members if revoked.has_revoked(me, peer)]
        rows.append(
            {
                "id": str(name),
                "for": str(name) if is_for_one else None,
                "uses": 1 if is_for_one else invite.uses,
                "members": [{"peer_id": str(peer), "is_revoked": peer in gone} for peer in members],
                "issued": invite.issued_s,
                "expires": invite.expires_s,
                "state": _state(me, name, invite, revoked, len(members), now_s),
            }
        )
    return rows


def _state(me: PeerId, name: PeerId, invite: IssuedInvite, revoked: Revocations, num_members: int, now_s: float) -> str:
    """Return whether an invite still admits a peer, and if not, why; one for a single peer admits that peer again and again."""
    if revoked.has_revoked(me, name):
        return "revoked"
    if invite.uses is not None and num_members >= invite.uses:
        return "used up"
    if revoked.has_revoked(me, closing_of(name)):
        return "closed"
    return "expired" if invite.expires_s is not None and invite.expires_s <= now_s else "open"


def described(rows: Sequence[Mapping[str, Any]], access: str) -> str:
    """Return the invites as a table, and below it what can be done about one, where members need one."""
    if not rows:
        return "this home has issued no invite; `peer invite` writes one"
    how = "`peer revoke ID` revokes an invite with all memberships that came from it; with --keep-members, nobody else joins by it"
    return "\n".join([table_text([COLUMNS, *map(_cells, rows)], str.ljust), *(["", how] if access == "invite" else [])])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    members = (short_id(one["peer_id"]) + " (revoked)" * one["is_revoked"] for one in row["members"])
    return (
        short_id(row["id"]),
        "one peer" if row["for"] else "anybody",
        f"{len(row['members'])} of {row['uses']}",
        _date(row["issued"]),
        _date(row["expires"]),
        row["state"],
        ", ".join(members),
    )


def _date(unix_s: int | None) -> str:
    return "-" if unix_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
