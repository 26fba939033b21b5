"""The ways into a swarm that a home folder holds: the invite's addresses, and the good peers of the last session."""

from __future__ import annotations

import time

from peer.home import Home
from peer.partners import AddressBook
from protocol.addresses import with_peer
from protocol.identity import PeerId
from protocol.invite import Invite


def held_invite(home: Home) -> Invite | None:
    """Return the invite that the home holds, if it holds one. Raises BadInvite when it cannot be read."""
    return Invite.from_text(home.invite.read_text()) if home.invite.exists() else None


def ways_in(home: Home, me: PeerId, invite: Invite | None) -> tuple[str, ...]:
    """Return the multiaddrs, each with its peer's id, at which `me` may find the swarm: the invite's first."""
    book = AddressBook(me)
    book.load(home.peers, time.time())
    known = [with_peer(address, entry.peer_id) for entry in book.live(time.time()) for address in entry.addresses]
    return tuple(dict.fromkeys((*(invite.bootstraps if invite else ()), *known)))
