"""The signed manifest of the run that a home holds, and the invite with which a peer comes to it."""

from __future__ import annotations

import time
from typing import Final

from gossamer.peer.machine.home import Home
from gossamer.protocol.errors import BadInvite, BadSettings
from gossamer.protocol.identity import Identity
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import SignedManifest

NO_RUN: Final = "`peer host` or `peer join` starts one; --home DIR names another folder"


def held_manifest(home: Home) -> SignedManifest | None:
    """Read a home's manifest; None if the home holds no run. Raises BadManifest, or BadSettings if it cannot be read."""
    try:
        return SignedManifest.from_bytes(home.manifest.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadSettings(f"{home.manifest} cannot be read: {error.strerror}", hint=NO_RUN) from error


def need_manifest(home: Home) -> SignedManifest:
    """Read a home's manifest. Raises BadManifest, or BadSettings if the home holds no run or it cannot be read."""
    if (held := held_manifest(home)) is None:
        raise BadSettings(f"{home.path} holds no run", hint=NO_RUN)
    return held


def checked_invite(home: Home, text: str | None, ask: str, move: str) -> tuple[Identity, Invite | None]:
    """Return this peer's identity and the checked invite, None to go on with the run of the home, which is created if it is missing.

    A peer that starts again with its own invite may do so after the invite has expired: its membership lasts longer. `ask` and `move` are
    the hints where there is no invite, and where the home holds another run. Raises BadInvite or BadSettings.
    """
    invite, held = None if text is None else Invite.from_text(text), held_manifest(home)
    if invite is None and held is None and not home.invite.exists():
        raise BadInvite(f"no invite was given, and {home.path} holds no run", hint=ask)
    if invite is not None and held is not None and held.run_id != invite.run_id:
        raise BadSettings(
            f"{home.path} already holds another run, {held.run_id.hex()[:12]}; the invite is for {invite.run_id.hex()[:12]}", hint=move
        )
    home.create()
    identity = Identity.load_or_create(home.identity)
    if invite is not None and (held is None or not home.invite.exists() or home.invite.read_bytes().strip() != invite.to_text().encode()):
        invite.check(identity.peer_id, time.time())
    return identity, invite
