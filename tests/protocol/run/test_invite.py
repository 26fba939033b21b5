from __future__ import annotations

import base64
import hashlib
import random
import textwrap
from collections.abc import Callable
from dataclasses import replace

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadInvite, BadSignature, OperatorError, WrongVersion
from gossamer.protocol.identity import PeerId
from gossamer.protocol.messages.frames import write_unframed
from gossamer.protocol.run.invite import PREFIX, Invite
from gossamer.protocol.wire import peer_pb2
from tests.protocol.samples import ADDRESS, ALICE, BOB, ISSUER, MALLORY, NOW_S, RUN_ID

LONGEST = f"/ip6/2001:db8:1111:1111:1111:1111:1111:1111/tcp/65535/p2p/{BOB.peer_id}/p2p-circuit/p2p/{ALICE.peer_id}"


def issue(subject: PeerId | None = None, not_after_s: int = NOW_S + 3600, bootstraps: tuple[str, ...] = (ADDRESS,)) -> Invite:
    return Invite.issue(ISSUER, RUN_ID, bootstraps, subject, not_after_s)


INVITE = issue()
TEXT = INVITE.to_text()


@pytest.mark.parametrize("invite", [INVITE, issue(ALICE.peer_id), issue(bootstraps=(LONGEST,) * 8)], ids=["any", "named", "longest"])
def test_an_invite_survives_a_round_trip(invite: Invite) -> None:
    text = invite.to_text()
    assert text.startswith("gossamer1")
    assert text == text.lower()
    assert text.isalnum()
    assert Invite.from_text(text) == invite
    invite.credential_for(ALICE.peer_id).check(RUN_ID, ALICE.peer_id)
    assert len(text) < 2 * limits.INVITE_CHARS / 3


def test_a_typical_invite_is_short() -> None:
    assert len(TEXT) < 450


def test_a_bearer_invite_yields_a_credential_for_its_holder_alone() -> None:
    credential = INVITE.credential_for(ALICE.peer_id)
    credential.check(RUN_ID, ALICE.peer_id)
    with pytest.raises(BadSignature):
        credential.check(RUN_ID, BOB.peer_id)
    assert INVITE.bearer_seed not in write_unframed(credential)
    assert INVITE.bearer_seed.hex() not in repr(INVITE) and repr(INVITE.bearer_seed) not in repr(INVITE)


def test_an_invite_for_a_named_peer_contains_no_secret() -> None:
    invite = issue(ALICE.peer_id)
    assert invite.bearer_seed == b""
    assert invite.credential_for(ALICE.peer_id) == invite.credential


def test_bearer_keys_differ_between_invites_and_issuers() -> None:
    others = [
        INVITE,
        issue(not_after_s=NOW_S + 1),
        issue(bootstraps=(LONGEST,)),
        Invite.issue(ISSUER, bytes(32), (ADDRESS,), None, NOW_S + 3600),
    ]
    others.append(Invite.issue(MALLORY, RUN_ID, (ADDRESS,), None, NOW_S + 3600))
    assert len({invite.bearer_seed for invite in others}) == len(others)


@pytest.mark.parametrize(
    "pasted",
    [
        lambda text: f"  {text}\n",
        lambda text: text.upper(),
        lambda text: "\r\n".join(textwrap.wrap(text, 72)),
        lambda text: "\n> ".join(textwrap.wrap("> " + text, 60)),
        lambda text: f'"{text}"',
        lambda text: f"`{text}`",
        lambda text: f"<{text}>",
        lambda text: "\u00a0\u200b".join(textwrap.wrap(text, 50)),
    ],
)
def test_characters_added_by_pasting_are_ignored(pasted: Callable[[str], str]) -> None:
    assert Invite.from_text(pasted(TEXT)) == INVITE


@pytest.mark.parametrize("text", ["", "hello", "12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8", "gossamer", TEXT[3:], "x" * 100_000])
def test_other_text_is_not_an_invite(text: str) -> None:
    with pytest.raises(BadInvite, match="this is not an invite") as caught:
        Invite.from_text(text)
    assert "peer host" in caught.value.hint


def test_a_link_is_an_invite_too_in_small_letters_and_in_the_capitals_of_a_qr_code() -> None:
    assert INVITE.to_link() == f"gossamer:{TEXT}"
    for link in (INVITE.to_link(), INVITE.to_link().upper(), f" <{INVITE.to_link()}>\n"):
        assert Invite.from_text(link) == INVITE


@pytest.mark.parametrize("end", [9, 10, 12, 100, 200, -9, -2, -1])
def test_a_truncated_invite_is_reported_as_truncated(end: int) -> None:
    with pytest.raises(BadInvite, match="the invite is truncated") as caught:
        Invite.from_text(TEXT[:end])
    assert "copy the whole line" in caught.value.hint


def test_every_typing_error_is_detected() -> None:
    generator = random.Random(4)
    for at in range(len(PREFIX), len(TEXT) - 1):
        typed = generator.choice([char for char in "abcdefghijklmnopqrstuvwxyz234567" if char != TEXT[at]])
        with pytest.raises(BadInvite, match="truncated or mistyped"):
            Invite.from_text(TEXT[:at] + typed + TEXT[at + 1 :])


def test_an_invalid_character_is_reported() -> None:
    with pytest.raises(BadInvite, match="an invite cannot contain '0'"):
        Invite.from_text(TEXT[:50] + "0" + TEXT[51:])
    with pytest.raises(BadInvite, match="cannot contain"):
        Invite.from_text(TEXT + TEXT)


def test_an_invite_of_another_release_raises_wrong_version() -> None:
    with pytest.raises(WrongVersion, match="another release"):
        Invite.from_text("gossamer2" + TEXT[9:])


def test_an_overlong_text_is_not_decoded() -> None:
    with pytest.raises(BadInvite, match="longer than 4096"):
        Invite.from_text(PREFIX + "a" * 5000)


def retyped(change: Callable[[peer_pb2.Invite], None]) -> str:
    """Return the text of a changed invite with a correct checksum and the old signature."""
    body = TEXT.removeprefix(PREFIX).upper()
    wire = peer_pb2.Invite.FromString(base64.b32decode(body + "=" * (-len(body) % 8))[:-4])
    change(wire)
    payload = wire.SerializeToString()
    checksum = hashlib.sha256(payload).digest()[:4]
    return PREFIX + base64.b32encode(payload + checksum).decode().rstrip("=").lower()


def set_field(name: str, value: object) -> Callable[[peer_pb2.Invite], None]:
    return lambda wire: setattr(wire, name, value)


@pytest.mark.parametrize(
    "change",
    [
        set_field("run_id", bytes(32)),
        set_field("issuer", MALLORY.peer_id.raw),
        set_field("bearer_seed", bytes(32)),
        set_field("not_after_s", NOW_S + 10**6),
        set_field("signature", bytes(64)),
        lambda wire: wire.bootstraps.append(f"/ip4/198.51.100.1/tcp/1/p2p/{MALLORY.peer_id}"),
    ],
    ids=["run", "issuer", "bearer", "date", "signature", "addresses"],
)
def test_a_forged_invite_is_rejected(change: Callable[[peer_pb2.Invite], None]) -> None:
    with pytest.raises(BadInvite, match="not by its issuer"):
        Invite.from_text(retyped(change))


@pytest.mark.parametrize(
    "change",
    [
        set_field("run_id", b""),
        set_field("issuer", b"x"),
        set_field("signature", b"s"),
        set_field("not_after_s", 2**60),
        set_field("bearer_seed", b""),
        set_field("bearer_seed", b"s"),
        set_field("subject", ALICE.peer_id.raw),
    ],
)
def test_an_invite_with_invalid_content_is_rejected(change: Callable[[peer_pb2.Invite], None]) -> None:
    with pytest.raises(BadInvite, match="invalid content"):
        Invite.from_text(retyped(change))


def test_an_expired_invite_is_reported_with_its_date() -> None:
    INVITE.check(ALICE.peer_id, NOW_S)
    with pytest.raises(BadInvite, match="expired on 2027-01-15 at 09:00 UTC") as caught:
        INVITE.check(ALICE.peer_id, NOW_S + 3600)
    assert "peer invite" in caught.value.hint


def test_an_invite_for_another_peer_names_that_peer() -> None:
    issue(ALICE.peer_id).check(ALICE.peer_id, NOW_S)
    with pytest.raises(BadInvite, match=f"is for {ALICE.peer_id}, but this peer is {BOB.peer_id}") as caught:
        issue(ALICE.peer_id).check(BOB.peer_id, NOW_S)
    assert "--home" in caught.value.hint


@pytest.mark.parametrize(
    ("bootstraps", "reason"),
    [
        ((), "0 addresses; it must have 1 to 8"),
        ((ADDRESS,) * 9, "9 addresses; it must have 1 to 8"),
        (("/ip4/203.0.113.5/tcp/4001",), "does not end in /p2p/"),
        (("localhost:4001",), "is not an address like"),
    ],
)
def test_invalid_addresses_are_rejected_when_issued_and_when_parsed(bootstraps: tuple[str, ...], reason: str) -> None:
    with pytest.raises(BadInvite, match=reason):
        issue(bootstraps=bootstraps)
    with pytest.raises(BadInvite, match=reason):
        replace(INVITE, bootstraps=bootstraps)


def test_random_and_mutated_text_raises_operator_errors_only() -> None:
    generator = random.Random(6)
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    for _ in range(3000):
        body = "".join(generator.choices(alphabet, k=generator.randrange(60)))
        with pytest.raises(OperatorError):
            Invite.from_text(PREFIX + body + TEXT[generator.randrange(len(TEXT)) :])
