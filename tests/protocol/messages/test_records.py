from __future__ import annotations

import hashlib
import math
import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, BadSignature, PeerMisbehaved
from gossamer.protocol.messages.figures import MemberFigures, loss_milli
from gossamer.protocol.messages.records import MemberRecord, announceable
from gossamer.protocol.wire import peer_pb2
from tests.mutations import mutated_bytes
from tests.protocol.samples import ALICE, BOB, CREDENTIAL, ISSUED, ISSUER, NOW_S, OTHER_RUN_ID, RECORD, RUN_ID

PLAIN = "/ip4/203.0.113.5/tcp/4001"
FIGURES = MemberFigures(own_steps=100, loss_milli=2301, joined_s=NOW_S - 3600, carried_mb=1000)
SHOWN = replace(RECORD, figures=FIGURES).signed(ALICE)
LARGEST = MemberFigures(limits.FIGURE, limits.LOSS_MILLI, limits.FIGURE, limits.FIGURE)
LONGEST = [f"/ip6/2001:db8:1111:1111:1111:1111:1111:111{n}/tcp/65535/p2p/{BOB.peer_id}/p2p-circuit/p2p/{ALICE.peer_id}" for n in range(5)]


def test_a_record_survives_a_round_trip() -> None:
    assert MemberRecord.from_bytes(RECORD.to_bytes()) == RECORD
    RECORD.check(RUN_ID, NOW_S)


CHANGES: dict[str, Any] = {
    "run_id": OTHER_RUN_ID,
    "peer_id": BOB.peer_id,
    "addresses": (PLAIN, "/ip4/203.0.113.6/tcp/4001"),
    "global_step": 121,
    "finished": True,
    "sequence": 8,
    "expires_s": RECORD.expires_s - 1,
    "credential": None,
    "paused": True,
    "tokens": 1,
    "release": 1,
    "stage": 1,
    "figures": FIGURES,
}


def test_the_signature_covers_every_field() -> None:
    assert set(CHANGES) == {field.name for field in fields(MemberRecord)} - {"signature"}
    for field, value in CHANGES.items():
        changed = replace(RECORD, **{field: value})
        with pytest.raises(BadSignature):
            changed.check(changed.run_id, NOW_S)


@pytest.mark.parametrize("name", [field.name for field in fields(MemberFigures)])
def test_the_signature_covers_every_figure(name: str) -> None:
    assert MemberRecord.from_bytes(SHOWN.to_bytes()) == SHOWN
    SHOWN.check(RUN_ID, NOW_S)
    with pytest.raises(BadSignature):
        replace(SHOWN, figures=replace(FIGURES, **{name: 1})).check(RUN_ID, NOW_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"loss_milli": limits.LOSS_MILLI + 1}, {"own_steps": limits.FIGURE + 1}, {"joined_s": limits.FIGURE + 1},
               {"carried_mb": limits.FIGURE + 1}], ids=str
)  # fmt: skip
def test_figures_out_of_range_are_rejected(change: dict[str, Any]) -> None:
    wire = peer_pb2.MemberRecord.FromString(SHOWN.to_bytes())
    for name, value in change.items():
        setattr(wire.figures, name, value)
    with pytest.raises(BadMessage):
        MemberRecord.from_bytes(wire.SerializeToString())


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, -1.0, 1000.1])
def test_a_loss_that_cannot_be_published_is_left_out(loss: float | None) -> None:
    assert MemberFigures(1, loss_milli(loss), 1, 1).loss is None


def test_a_loss_is_published_in_thousandths() -> None:
    assert [MemberFigures(1, loss_milli(loss), 1, 1).loss for loss in (0.0, 2.3456, 1000.0)] == [0.0, 2.346, 1000.0]


def test_a_record_is_valid_only_for_its_run_and_time() -> None:
    with pytest.raises(BadMessage, match="another run"):
        RECORD.check(OTHER_RUN_ID, NOW_S)
    RECORD.check(RUN_ID, RECORD.expires_s - 0.1)
    with pytest.raises(BadMessage, match="expired 0 s ago"):
        RECORD.check(RUN_ID, RECORD.expires_s)
    earliest_s = RECORD.expires_s - limits.RECORD_LIFETIME_S - limits.CLOCK_SKEW_S
    RECORD.check(RUN_ID, earliest_s)
    with pytest.raises(BadMessage, match="valid for too long"):
        RECORD.check(RUN_ID, earliest_s - 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", b""),
        ("addresses", (PLAIN,) * 5),
        ("addresses", ("nonsense",)),
        ("addresses", (f"{PLAIN}\n; rm",)),
        ("addresses", (f"{PLAIN}/p2p/{BOB.peer_id}",)),
        ("global_step", -1),
        ("sequence", limits.STEPS + 1),
        ("expires_s", limits.UNIX_SECONDS + 1),
        ("signature", b"s"),
    ],
    ids=str,
)
def test_no_record_accepts_an_invalid_value(field: str, value: object) -> None:
    with pytest.raises(BadMessage):
        replace(RECORD, **{field: value})  # type: ignore[arg-type]


def test_only_a_later_record_of_the_same_peer_supersedes() -> None:
    later = replace(RECORD, sequence=8)
    assert later.supersedes(RECORD)
    assert not RECORD.supersedes(later)
    assert not RECORD.supersedes(RECORD)
    assert not replace(later, peer_id=BOB.peer_id).supersedes(RECORD)


def test_a_paused_record_without_figures_is_of_a_peer_that_starts_and_has_another_gist() -> None:
    starting = replace(RECORD, paused=True)
    paused = replace(starting, figures=FIGURES)
    assert (RECORD.is_starting, starting.is_starting, paused.is_starting) == (False, True, False)
    assert len({RECORD.gist, starting.gist, paused.gist}) == 3


def test_the_gist_covers_the_relevant_fields_and_is_stable() -> None:
    later = replace(RECORD, global_step=121, sequence=8, expires_s=RECORD.expires_s + 20, tokens=9, signature=b"").signed(ALICE)
    assert later.gist == RECORD.gist == hashlib.sha256(f"{ALICE.peer_id}\n0\n0\n/ip4/203.0.113.5/tcp/4001".encode()).digest()[:8]
    news = ({"finished": True}, {"paused": True}, {"addresses": ()}, {"peer_id": BOB.peer_id})
    assert len({RECORD.gist, *(replace(RECORD, **one).gist for one in news)}) == 5  # type: ignore[arg-type]


def test_announced_addresses_always_fit() -> None:
    credential = replace(CREDENTIAL, not_after_s=limits.UNIX_SECONDS).signed(ISSUER, RUN_ID)
    addresses = announceable(LONGEST, ALICE.peer_id)
    assert len(addresses) == limits.RECORD_ADDRESSES
    largest = MemberRecord(
        RUN_ID, ALICE.peer_id, addresses, limits.STEPS, True, limits.STEPS, limits.UNIX_SECONDS, credential,
        paused=True, tokens=limits.TOKENS, release=limits.RELEASES, figures=LARGEST, stage=limits.STAGES,
    ).signed(ALICE)  # fmt: skip
    assert len(largest.to_bytes()) <= limits.RECORD_BYTES
    assert MemberRecord.from_bytes(largest.to_bytes()) == largest


def test_own_id_duplicates_and_invalid_addresses_are_not_announced() -> None:
    given = [f"{PLAIN}/p2p/{ALICE.peer_id}", PLAIN, "nonsense", f"{PLAIN}/p2p/{BOB.peer_id}", "/ip4/203.0.113.6/udp/1/quic-v1"]
    assert announceable(given, ALICE.peer_id) == (PLAIN,)


def test_unsigned_and_oversize_records_are_not_encoded() -> None:
    for changed in (replace(RECORD, signature=b""), replace(RECORD, credential=ISSUED)):
        with pytest.raises(BadMessage, match="without a signature"):
            changed.to_bytes()
    with pytest.raises(BadMessage, match="size of a record"):
        replace(RECORD, addresses=tuple(LONGEST[:4])).signed(ALICE).to_bytes()
    with pytest.raises(BadMessage, match="size of a record"):
        MemberRecord.from_bytes(bytes(limits.RECORD_BYTES + 1))


def test_unsigned_records_and_credentials_are_rejected() -> None:
    for num_record, num_issuer, num_bearer in ((0, 64, 64), (64, 0, 64), (64, 64, 0), (64, 0, 0)):
        wire = peer_pb2.MemberRecord.FromString(RECORD.to_bytes())
        wire.signature = wire.signature[:num_record]
        wire.credential.signature = wire.credential.signature[:num_issuer]
        wire.credential.bearer_signature = wire.credential.bearer_signature[:num_bearer]
        with pytest.raises(BadMessage, match="without a signature"):
            MemberRecord.from_bytes(wire.SerializeToString())


def test_mutated_records_are_rejected_or_fail_verification() -> None:
    generator = random.Random(1)
    for _ in range(5000):
        try:
            record = MemberRecord.from_bytes(mutated_bytes(RECORD.to_bytes(), generator))
            record.check(RUN_ID, NOW_S)
        except PeerMisbehaved:
            continue
        assert record == RECORD, "a changed record passed"


ODD = st.text(st.one_of(st.sampled_from("aZ09.-_:%/\u017f\u212a\u0130\u0665"), st.characters(exclude_categories=["Cs"])), max_size=30)


@given(ODD | st.builds("/{}/{}/tcp/{}".format, st.sampled_from(["ip4", "ip6", "dns", "dns4"]), ODD, st.just("1") | ODD))
@example("/dns4/\u017f.x/tcp/1")
@example("/dns4/\u212a/tcp/1")
def test_any_address_text_is_rejected_or_can_be_verified(text: str) -> None:
    wire = peer_pb2.MemberRecord.FromString(RECORD.to_bytes())
    wire.addresses[0] = text
    try:
        MemberRecord.from_bytes(wire.SerializeToString()).check(RUN_ID, NOW_S)
    except PeerMisbehaved:
        return
    assert text == RECORD.addresses[0], "a changed record passed"


def test_a_record_without_a_stage_is_signed_as_older_releases_sign_it() -> None:
    """They drop the field: a record of a staged run, which they cannot join, has another signature."""
    staged = replace(RECORD, stage=2, signature=b"").signed(ALICE)
    staged.check(RUN_ID, NOW_S)
    assert MemberRecord.from_bytes(staged.to_bytes()) == staged
    assert staged.signature != RECORD.signature and staged.gist != RECORD.gist
    with pytest.raises(BadSignature):
        replace(staged, stage=0).check(RUN_ID, NOW_S)
    with pytest.raises(BadMessage, match="stage"):
        replace(RECORD, stage=limits.STAGES + 1)
