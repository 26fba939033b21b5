"""The issuer's count of the peers that an invite for anybody has admitted."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gossamer.peer.machine.home import Home
from gossamer.peer.swarm.issued_invites import LAST_ROUNDS, MAX_ADMITTED, IssuedInvite, IssuedInvites
from gossamer.protocol.identity import Identity, PeerId
from tests.protocol.peers import seeded

FIRST, SECOND = (Identity(letter * 32).peer_id for letter in (b"f", b"s"))


def peer(number: int) -> PeerId:
    return seeded(number).peer_id


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_limited_invite_admits_each_peer_once_and_so_many(home: Home) -> None:
    issued = IssuedInvites(home)
    issued.note(FIRST, IssuedInvite(2))
    issued.note(SECOND, IssuedInvite(1))
    assert [issued.admit(peer(number), FIRST) for number in (1, 2, 3, 1)] == [True, True, False, True]
    assert IssuedInvites(home).admitted() == {peer(1): FIRST, peer(2): FIRST}
    assert IssuedInvites(home).uses() == {FIRST: 2, SECOND: 1}


def test_a_member_that_comes_again_by_another_invite_takes_a_use_of_that(home: Home) -> None:
    issued = IssuedInvites(home)
    issued.note(SECOND, IssuedInvite(1))
    assert issued.admit(peer(1), FIRST) and issued.admit(peer(1), SECOND)
    assert issued.admitted() == {peer(1): SECOND} and not issued.admit(peer(2), SECOND)


def test_invites_that_are_issued_at_once_all_keep_their_limits(home: Home) -> None:
    bearers = [Identity(bytes([number]) * 32).peer_id for number in range(16)]
    with ThreadPoolExecutor(len(bearers)) as threads:
        assert all(threads.map(lambda bearer: IssuedInvites(home).note(bearer, IssuedInvite(1)), bearers))
    assert IssuedInvites(home).uses() == dict.fromkeys(bearers, 1)
    assert not IssuedInvites(home).note(bearers[0], IssuedInvite(9))


def test_of_several_invites_for_one_peer_the_last_date_counts(home: Home) -> None:
    for issued_s, expires_s in ((100, 2000), (200, 1000)):
        assert IssuedInvites(home).note(FIRST, IssuedInvite(None, issued_s, expires_s))
    assert IssuedInvites(home).noted() == {FIRST: IssuedInvite(None, 200, 2000)}
    assert IssuedInvites(home).uses() == {} and IssuedInvites(home).to_close([]) == []


def test_what_expired_long_ago_and_was_not_used_is_forgotten(home: Home) -> None:
    issued, now_s = IssuedInvites(home), int(time.time())
    old, recent, undated = IssuedInvite(2, 100, 1000), IssuedInvite(2, 100, now_s - 1000), IssuedInvite(2)
    for number, invite in enumerate((old, recent, undated, old)):
        assert issued.admit(peer(9), peer(3)) and issued.note(peer(number), invite)
    issued.note(FIRST, IssuedInvite(None, now_s, now_s + 9))
    assert {*issued.noted()} == {peer(1), peer(2), peer(3), FIRST}


def test_an_invite_without_a_limit_admits_everybody_and_stays_open(home: Home) -> None:
    issued = IssuedInvites(home)
    assert all(issued.admit(peer(number), FIRST) for number in range(1, 40))
    assert issued.to_close([]) == []


def test_an_invite_closes_when_its_uses_are_taken(home: Home) -> None:
    issued = IssuedInvites(home)
    issued.note(FIRST, IssuedInvite(2))
    issued.admit(peer(1), FIRST)
    assert issued.to_close([(peer(1), FIRST)]) == []
    issued.admit(peer(2), FIRST)
    assert issued.to_close([]) == [FIRST]


def test_keys_that_never_come_for_a_credential_count_after_some_rounds(home: Home) -> None:
    issued = IssuedInvites(home)
    issued.note(FIRST, IssuedInvite(3))
    seen = [(peer(number), FIRST) for number in range(1, 9)]
    for shown in (seen, seen[:2], seen):  # two are no more than it admits: the rounds begin anew
        assert not any(issued.to_close(shown) for _ in range(LAST_ROUNDS))
    assert issued.to_close(seen) == [FIRST]


def test_damaged_files_count_as_none_with_one_warning_each(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    issued = IssuedInvites(home)
    for damage in (b"", b"[]", b'{"x": 1}', b"\xff", f'{{"{FIRST}": {{}}}}'.encode()):
        home.invites.write_bytes(damage)
        home.members.write_bytes(damage)
        caplog.clear()
        for _ in range(3):
            assert not issued.uses() and not issued.admitted()
        assert [str(home.invites) in caplog.text, str(home.members) in caplog.text, len(caplog.records)] == [True, True, 2]
    assert issued.admit(peer(1), FIRST)


def test_the_record_is_bounded(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.peer.swarm.issued_invites.MAX_ADMITTED", 5)
    assert MAX_ADMITTED > 5
    issued = IssuedInvites(home)
    for number in range(1, 9):
        issued.note(FIRST, IssuedInvite(100))
        issued.admit(peer(number), FIRST)
    assert list(issued.admitted()) == [peer(number) for number in range(4, 9)]


def test_a_file_that_cannot_be_read_for_a_moment_loses_no_count(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = IssuedInvites(home)
    issued.note(FIRST, IssuedInvite(2))
    assert issued.admit(peer(1), FIRST) and issued.admitted()
    IssuedInvites(home).admit(peer(2), FIRST)

    def fails(self: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fails)
        assert issued.admitted() == {peer(1): FIRST}, "as it was read last"
    assert issued.admitted() == {peer(1): FIRST, peer(2): FIRST}
    assert not issued.admit(peer(3), FIRST)
