from __future__ import annotations

from pathlib import Path

from peer.machine.home import Home
from peer.swarm.address_book import AddressBook, held_invite, ways_in
from protocol.run.invite import Invite
from tests.peer.neighbours import ME, NOW_S, record, somebody
from tests.peer.two_sides import RUN_ID

A, B = somebody(1), somebody(2)
ADDRESS = f"/ip4/203.0.113.5/tcp/4001/p2p/{A.peer_id}"


def test_an_empty_home_holds_none(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert held_invite(home) is None
    assert ways_in(home, ME.peer_id, None) == ()


def test_the_invites_come_first_then_the_last_sessions_each_with_its_peer(tmp_path: Path) -> None:
    home, invite = Home(tmp_path), Invite.issue(A, RUN_ID, (ADDRESS,), None, NOW_S)
    home.invite.write_text(invite.to_text() + "\n")
    book = AddressBook(ME.peer_id)
    book.hint(A.peer_id, ADDRESS, 0.0)
    book.learn(record(B), 0.0)
    book.save(home.peers, 0.0)
    assert held_invite(home) == invite
    assert ways_in(home, ME.peer_id, invite) == (ADDRESS, f"/ip4/192.0.2.7/tcp/4001/p2p/{B.peer_id}")
