"""The home, its key, its port, its invite: each fault is planted for real, and named."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gossamer.peer.doctor.finding import Finding, Level
from gossamer.peer.machine.home import Home
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.frames import write_unframed
from gossamer.protocol.run.invite import Invite
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.peer.doctor.cases import HOST, HOUR_S, SIGNED, case, examined, invite_text, made_home

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return made_home(tmp_path / "home")


def found(check: str, home: Path, invite: str | None = None, **settings: object) -> Finding:
    return examined(check, case(home, invite, **settings))  # type: ignore[arg-type]


def names(finding: Finding, level: Level, *words: str) -> None:
    assert finding.level is level, finding
    assert all(word in finding.found for word in words), finding
    assert level is Level.OK or finding.way_out, finding


def test_a_missing_home_is_not_created(tmp_path: Path) -> None:
    for check in ("home", "key", "other peer", "port"):
        names(found(check, tmp_path / "a" / "b"), Level.OK)
    assert not list(tmp_path.iterdir())


def test_a_valid_home_is_unchanged(home: Home) -> None:
    before = sorted(path.name for path in home.path.iterdir())
    for check in ("home", "key", "other peer", "port"):
        names(found(check, home.path), Level.OK)
    assert sorted(path.name for path in home.path.iterdir()) == before


@pytest.mark.parametrize(("text", "words"), [("thread = 2", "thread"), ("threads = -1", "threads"), ("threads", "cannot be read")])
def test_invalid_settings_fail(home: Home, text: str, words: str) -> None:
    names(found("settings", home.path), Level.OK)
    home.config.write_text(text)
    names(found("settings", home.path), Level.FAIL, words, str(home.config))


@needs_root
def test_the_home_of_another_user(home: Home) -> None:
    os.chown(home.path, 12345, 12345)
    names(found("home", home.path), Level.FAIL, "belongs to user 12345")


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o710])
def test_a_home_that_is_open_to_others(home: Home, mode: int) -> None:
    home.path.chmod(mode)
    names(found("home", home.path), Level.FAIL, "other users", f"{mode:o}")


def test_a_file_in_place_of_a_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    names(found("home", tmp_path / "file"), Level.FAIL, "not a folder")


def test_a_key_that_others_can_read(home: Home) -> None:
    home.identity.chmod(0o644)
    names(found("key", home.path), Level.FAIL, "can be read by other users")


def test_a_damaged_key(home: Home) -> None:
    home.identity.write_bytes(b"something else")
    names(found("key", home.path), Level.FAIL, "not an identity file")


def test_another_peer_on_the_same_home(home: Home) -> None:
    with home.locked():
        names(found("other peer", home.path), Level.WARN, f"process {os.getpid()} on {socket.gethostname()}, since 20")
        names(found("port", home.path), Level.OK, "listens already")
    names(found("other peer", home.path), Level.OK)


def test_a_port_that_is_taken(tmp_path: Path, busy_port: int) -> None:
    names(found("port", tmp_path / "home", port=busy_port), Level.FAIL, "in use")


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    names(found("port", tmp_path / "home", listen="192.0.2.1"), Level.FAIL, "192.0.2.1")


def test_no_invite(tmp_path: Path) -> None:
    names(found("invite", tmp_path / "home"), Level.WARN, "none was given")


def test_a_good_invite(tmp_path: Path) -> None:
    names(found("invite", tmp_path / "home", invite_text()), Level.OK, SIGNED.run_id.hex()[:12])


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (invite_text(lifetime_s=-HOUR_S), Level.FAIL, "expired"),
        (invite_text(lifetime_s=HOUR_S), Level.WARN, "good until"),
        (invite_text()[:-20], Level.FAIL, "truncated"),
        (invite_text().replace("gossamer1", "gossamer2"), Level.FAIL, "another release"),
        (invite_text(subject=Identity(b"x" * 32).peer_id), Level.FAIL, "it is for"),
        ("hello", Level.FAIL, "not an invite"),
    ],
    ids=["expired", "expires soon", "truncated", "another release", "somebody else's", "no invite"],
)
def test_an_invite_that_does_not_work(tmp_path: Path, text: str, level: Level, words: str) -> None:
    names(found("invite", tmp_path / "home", text), level, words)


def test_an_invite_for_another_run_than_the_home_holds(home: Home) -> None:
    other = Manifest.checked({"run": {"name": "another"}}).with_host(HOST.peer_id)
    home.manifest.write_bytes(SignedManifest.sign(other, HOST).to_bytes())
    names(found("invite", home.path, invite_text()), Level.FAIL, SIGNED.run_id.hex()[:12], other.run_id.hex()[:12])


def test_the_invite_of_the_home_is_checked(home: Home) -> None:
    Home(home.path).invite.write_text(invite_text(lifetime_s=-HOUR_S))
    names(found("invite", home.path), Level.FAIL, "expired")


def test_an_expired_invite_of_a_member_is_in_order(tmp_path: Path) -> None:
    home, text = made_home(tmp_path / "home"), invite_text(lifetime_s=-HOUR_S)
    home.invite.write_text(text)
    me = Identity.load_or_create(home.identity).peer_id
    home.credential.write_bytes(write_unframed(Invite.from_text(text).credential.named(HOST, SIGNED.run_id, me)))
    names(found("invite", home.path), Level.OK, "this peer is a member")


def test_a_staged_run_says_who_can_read_the_text(home: Home) -> None:
    identity = Identity.load_or_create(home.identity)
    staged = Manifest.checked({"stages": {"count": 2}}).with_host(identity.peer_id)
    home.manifest.write_bytes(SignedManifest.sign(staged, identity).to_bytes())
    names(found("run", home.path), Level.WARN, "in 2 stages", "can read the text")
