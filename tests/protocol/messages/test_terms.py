from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gossamer.protocol import limits
from gossamer.protocol.errors import BadMessage, BadSignature, PeerMisbehaved, RefusalCode, Refused
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.messages import ContentsKind, FetchRequest, Hello, Lane, RunPhase, refusal_of
from gossamer.protocol.messages.revocations import Revocation, Revocations, read_revocations
from gossamer.protocol.messages.terms import (
    FragmentTerms,
    ModelPlan,
    RunTerms,
    StageTerms,
    check_fetch,
    check_global_step,
    check_hello,
    check_lane,
    check_member,
    check_phase,
    check_record,
    check_stage,
)
from gossamer.protocol.run.invite import Credential
from gossamer.protocol.run.manifest import Manifest
from tests.protocol.samples import (
    ALICE,
    BEARER,
    BOB,
    CREDENTIAL,
    DIGEST,
    FETCH,
    HELLO,
    ISSUED,
    ISSUER,
    LANE,
    MALLORY,
    NONCE,
    NOW_S,
    OTHER_RUN_ID,
    PARTNER_NONCE,
    RECORD,
    RUN_ID,
    STAGE_TERMS,
    TERMS,
    UNSIGNED_HELLO,
    UNSIGNED_LANE,
    changed,
)

ANSWER = changed(
    UNSIGNED_HELLO,
    sender=BOB.peer_id,
    receiver=ALICE.peer_id,
    nonce=PARTNER_NONCE,
    partner_nonce=NONCE,
    global_step=130,
    credential=ISSUED.bound(BEARER, RUN_ID, BOB.peer_id),
)


def check(hello: Hello, terms: RunTerms = TERMS) -> None:
    """Check a Hello from Alice to Bob."""
    check_hello(hello, terms, BOB.peer_id, ALICE.peer_id, NOW_S)
    check_global_step(hello.global_step, 100, terms)


def check_answer(hello: Hello) -> None:
    """Check Bob's answer to Alice's HELLO."""
    check_hello(hello, TERMS, ALICE.peer_id, BOB.peer_id, NOW_S, own_hello=HELLO)


def code_of(call: Callable[[], None]) -> RefusalCode | None:
    with pytest.raises((Refused, PeerMisbehaved)) as caught:
        call()
    return refusal_of(caught.value).code


def test_valid_hellos_pass() -> None:
    check(HELLO)
    check_answer(ANSWER.signed(BOB))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"fragment": 2}, RefusalCode.WRONG_TERMS),
        ({"stage": 1}, RefusalCode.WRONG_TERMS),
        ({"fragment": 0}, RefusalCode.WRONG_TERMS),
        ({"codec": 0}, RefusalCode.WRONG_TERMS),
        ({"sketch_bytes": 0}, RefusalCode.WRONG_TERMS),
        ({"payload_bytes": 1999}, RefusalCode.WRONG_TERMS),
        ({"global_step": 301}, RefusalCode.STEP_TOO_FAR),
        ({"partner_nonce": PARTNER_NONCE}, RefusalCode.BAD_MESSAGE),
    ],
    ids=str,
)
def test_each_fault_of_an_opening_has_its_code(change: dict[str, Any], code: RefusalCode) -> None:
    assert code_of(lambda: check(changed(UNSIGNED_HELLO, **change).signed(ALICE))) is code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"partner_nonce": b""}, RefusalCode.BAD_MESSAGE),
        ({"partner_nonce": b"x" * 16}, RefusalCode.BAD_MESSAGE),
        ({"nonce": NONCE}, RefusalCode.BAD_MESSAGE),
        ({"fragment": 0, "sketch_bytes": 0, "payload_bytes": 1000}, RefusalCode.BAD_MESSAGE),
        ({"phase": RunPhase.FINISH}, RefusalCode.WRONG_PHASE),
        ({"global_step": 321}, RefusalCode.STEP_TOO_FAR),
    ],
    ids=str,
)
def test_each_fault_of_an_answer_has_its_code(change: dict[str, Any], code: RefusalCode) -> None:
    assert code_of(lambda: check_answer(changed(ANSWER, **change).signed(BOB))) is code


def test_a_refusal_is_no_misbehaviour_of_the_partner() -> None:
    with pytest.raises(Refused):
        check(changed(UNSIGNED_HELLO, run_id=OTHER_RUN_ID).signed(ALICE))
    with pytest.raises(BadMessage, match="addressed to another peer"):
        check(changed(UNSIGNED_HELLO, receiver=MALLORY.peer_id).signed(ALICE))
    with pytest.raises(BadMessage, match="in the name of another peer"):
        check_hello(HELLO, TERMS, BOB.peer_id, MALLORY.peer_id, NOW_S)


def test_a_forwarded_or_reflected_hello_is_rejected() -> None:
    with pytest.raises(BadMessage):
        check_hello(HELLO, TERMS, MALLORY.peer_id, ALICE.peer_id, NOW_S)  # Bob forwards Alice's Hello
    with pytest.raises(BadMessage):
        check_hello(HELLO, TERMS, ALICE.peer_id, BOB.peer_id, NOW_S, own_hello=HELLO)  # Bob sends it back


def test_a_forged_hello_is_misbehaviour_of_the_partner() -> None:
    with pytest.raises(BadSignature):
        check(changed(HELLO, tokens=1))
    with pytest.raises(BadSignature):
        check(UNSIGNED_HELLO.signed(MALLORY))


def test_the_version_is_checked_before_the_signature() -> None:
    with pytest.raises(Refused) as caught:
        check(changed(HELLO, protocol_version=2))
    assert caught.value.code is RefusalCode.WRONG_VERSION


def named(issuer: Identity = ISSUER, subject: PeerId = ALICE.peer_id, not_after_s: int = NOW_S + 1, run_id: bytes = RUN_ID) -> Credential:
    return Credential(issuer.peer_id, subject, None, not_after_s, DIGEST).signed(issuer, run_id)


def test_an_invite_run_admits_holders_of_an_invite_and_issuers() -> None:
    check_member(ALICE.peer_id, named(), TERMS, NOW_S)
    check_member(ALICE.peer_id, CREDENTIAL, TERMS, NOW_S)
    check_member(BOB.peer_id, ISSUED.bound(BEARER, RUN_ID, BOB.peer_id), TERMS, NOW_S)
    check_member(ISSUER.peer_id, None, TERMS, NOW_S)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (None, "no invite"),
        (named(issuer=MALLORY), "may not invite"),
        (named(subject=BOB.peer_id), "another peer"),
        (named(not_after_s=NOW_S), "expired"),
        (named(run_id=OTHER_RUN_ID), "forged"),
        (replace(named(), not_after_s=NOW_S + 9), "forged"),
        (replace(named(issuer=MALLORY), issuer=ISSUER.peer_id), "forged"),
        (ISSUED, "forged"),
        (ISSUED.bound(BEARER, RUN_ID, BOB.peer_id), "forged"),
        (ISSUED.bound(BEARER, OTHER_RUN_ID, ALICE.peer_id), "forged"),
        (ISSUED.bound(MALLORY, RUN_ID, ALICE.peer_id), "forged"),
        (replace(ISSUED, bearer=MALLORY.peer_id).bound(MALLORY, RUN_ID, ALICE.peer_id), "forged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invite_run_rejects_all_other_peers(shown: Credential | None, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as caught:
        check_member(ALICE.peer_id, shown, TERMS, NOW_S)
    assert caught.value.code is RefusalCode.NOT_INVITED


def test_a_copied_credential_is_useless() -> None:
    copied = RECORD.credential
    assert copied == CREDENTIAL
    stolen = changed(UNSIGNED_HELLO, sender=MALLORY.peer_id, credential=copied).signed(MALLORY)
    with pytest.raises(Refused, match="forged"):
        check_hello(stolen, TERMS, BOB.peer_id, MALLORY.peer_id, NOW_S)


def test_an_allow_list_admits_only_its_members() -> None:
    terms = replace(TERMS, access="allowlist", members=frozenset({ALICE.peer_id}))
    check_member(ALICE.peer_id, None, terms, NOW_S)
    for peer, shown in [(BOB.peer_id, None), (BOB.peer_id, named()), (ISSUER.peer_id, None)]:
        with pytest.raises(Refused, match="not on the run's list"):
            check_member(peer, shown, terms, NOW_S)


def test_an_open_run_admits_every_peer() -> None:
    check_member(MALLORY.peer_id, None, replace(TERMS, access="open"), NOW_S)
    check(changed(UNSIGNED_HELLO, credential=None).signed(ALICE), replace(TERMS, access="open"))


@pytest.mark.parametrize(("own_steps", "far"), [(0, False), (199, False), (320, False), (321, True)])
def test_global_steps_may_differ_up_to_the_limit_of_the_manifest(own_steps: int, far: bool) -> None:
    if not far:
        return check_global_step(120, own_steps, TERMS)
    with pytest.raises(Refused, match="201 steps apart; the limit is 200"):
        check_global_step(120, own_steps, TERMS)


def test_without_an_own_hello_global_steps_are_not_compared() -> None:
    check_hello(changed(UNSIGNED_HELLO, global_step=10**9).signed(ALICE), TERMS, BOB.peer_id, ALICE.peer_id, NOW_S)


def test_phases_must_agree() -> None:
    check_phase(RunPhase.FINISH, RunPhase.FINISH)
    with pytest.raises(Refused, match="theirs is FINISH, ours TRAIN") as caught:
        check_phase(RunPhase.FINISH, RunPhase.TRAIN)
    assert caught.value.code is RefusalCode.WRONG_PHASE


def test_a_revoked_peer_may_request_only_the_revocations() -> None:
    assert CREDENTIAL.bearer is not None
    held = Revocations()
    for name in (CREDENTIAL.bearer, BOB.peer_id):
        held.add(Revocation(TERMS.run_id, ISSUER.peer_id, name, 1_700_000_000).signed(ISSUER))
    terms = replace(TERMS, revocations=held)
    for kind in ContentsKind:
        request = changed(FETCH, kind=kind).signed(ALICE)
        if kind is ContentsKind.REVOCATIONS:
            check_fetch(request, terms, BOB.peer_id, ALICE.peer_id, NOW_S)
        else:
            with pytest.raises(Refused, match="a revoked invite"):
                check_fetch(request, terms, BOB.peer_id, ALICE.peer_id, NOW_S)
    assert [one.revoked for one in held.shown_to(ALICE.peer_id, CREDENTIAL)] == [CREDENTIAL.bearer]
    assert held.shown_to(MALLORY.peer_id, None) is held


def test_revocations_are_bounded_and_complete_in_memory_and_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    unsigned = [Revocation(TERMS.run_id, ISSUER.peer_id, one.peer_id, 1) for one in (ALICE, BOB, MALLORY)]
    made, held = [one.signed(ISSUER) for one in unsigned], Revocations()
    monkeypatch.setattr(limits, "REVOCATIONS", 2)
    assert [held.add(one) for one in (made[0], *made)] == [True, False, True, False]
    assert {*read_revocations(held.to_bytes())} == {*made[:2]}
    for few, words in ((unsigned[:1], "without a signature"), (made, "number of revocations is 3")):
        monkeypatch.setattr(limits, "REVOCATIONS", 3)
        sent = Revocations()
        for one in few:
            sent.add(one)
        monkeypatch.setattr(limits, "REVOCATIONS", 2)
        with pytest.raises(BadMessage, match=words):
            read_revocations(sent.to_bytes())


def test_a_record_of_a_nonmember_is_rejected() -> None:
    check_record(RECORD, TERMS, NOW_S)
    with pytest.raises(Refused, match="no invite"):
        check_record(replace(RECORD, credential=None).signed(ALICE), TERMS, NOW_S)
    with pytest.raises(BadSignature):
        check_record(replace(RECORD, credential=CREDENTIAL, sequence=9), TERMS, NOW_S)


def test_terms_follow_from_the_manifest() -> None:
    manifest = Manifest().with_host(ISSUER.peer_id)
    fragments = (FragmentTerms(0, 10, 0),)
    terms = RunTerms.from_manifest(manifest).with_plan(ModelPlan(2, fragments, 80))
    assert terms == RunTerms(manifest.run_id, 2, fragments, 80, "invite", frozenset({ISSUER.peer_id}), frozenset(), 200)
    assert RunTerms.from_manifest(manifest) == replace(terms, codec_id=0, fragments=(), state_bytes=0)


def check_first(lane: Lane) -> None:
    """Check a Lane from Alice, a holder of the stage below, to Bob."""
    check_lane(lane, STAGE_TERMS, BOB.peer_id, ALICE.peer_id, NOW_S)


LANE_ANSWER = changed(
    UNSIGNED_LANE,
    sender=BOB.peer_id,
    receiver=ALICE.peer_id,
    nonce=PARTNER_NONCE,
    partner_nonce=NONCE,
    stage=2,
    window=4,
    credential=ISSUED.bound(BEARER, RUN_ID, BOB.peer_id),
)
BELOW = replace(STAGE_TERMS, stage=StageTerms(0, 3, 516, 2112, 4))


def test_valid_lanes_pass() -> None:
    check_first(LANE)
    check_lane(LANE_ANSWER.signed(BOB), BELOW, ALICE.peer_id, BOB.peer_id, NOW_S, own_lane=LANE)
    check_first(changed(UNSIGNED_LANE, stage=3, window=1).signed(ALICE))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"stage": 0}, RefusalCode.WRONG_TERMS),
        ({"stage": 2}, RefusalCode.WRONG_TERMS),
        ({"stage": 4}, RefusalCode.WRONG_TERMS),
        ({"window": 1}, RefusalCode.WRONG_TERMS),  # the opener knows our stage from an old record
        ({"stage": 3}, RefusalCode.WRONG_TERMS),
        ({"partner_nonce": PARTNER_NONCE}, RefusalCode.BAD_MESSAGE),
    ],
    ids=str,
)
def test_each_fault_of_a_lane_has_its_code(change: dict[str, Any], code: RefusalCode) -> None:
    assert code_of(lambda: check_first(changed(UNSIGNED_LANE, **change).signed(ALICE))) is code


def check_request(request: FetchRequest) -> None:
    """Check a request from Alice to Bob."""
    check_fetch(request, TERMS, BOB.peer_id, ALICE.peer_id, NOW_S)


@pytest.mark.parametrize(
    ("first", "checked"),
    [(UNSIGNED_HELLO, check), (FETCH, check_request), (UNSIGNED_LANE, check_first)],
    ids=["hello", "request", "lane"],
)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"protocol_version": 3}, RefusalCode.WRONG_VERSION),
        ({"run_id": OTHER_RUN_ID}, RefusalCode.WRONG_RUN),
        ({"receiver": MALLORY.peer_id}, RefusalCode.BAD_MESSAGE),
        ({"sender": MALLORY.peer_id}, RefusalCode.BAD_MESSAGE),
        ({"credential": None}, RefusalCode.NOT_INVITED),
    ],
    ids=str,
)
def test_each_fault_of_any_first_message_has_its_code(
    first: Hello | FetchRequest | Lane, checked: Callable[[Any], None], change: dict[str, Any], code: RefusalCode
) -> None:
    checked(first.signed(ALICE))
    assert code_of(lambda: checked(changed(first, **change).signed(ALICE))) is code


@pytest.mark.parametrize("change", [{"partner_nonce": b"x" * 16}, {"nonce": NONCE}, {"window": 0}], ids=str)
def test_an_answer_to_another_lane_is_misbehaviour(change: dict[str, Any]) -> None:
    answer = changed(LANE_ANSWER, **change).signed(BOB)
    with pytest.raises(BadMessage):
        check_lane(answer, BELOW, ALICE.peer_id, BOB.peer_id, NOW_S, own_lane=LANE)


def test_a_request_for_the_weights_of_another_stage_is_refused() -> None:
    check_stage(changed(FETCH, stage=2), STAGE_TERMS)
    for stage in (0, 1, 3):
        assert code_of(lambda stage=stage: check_stage(changed(FETCH, stage=stage), STAGE_TERMS)) is RefusalCode.WRONG_TERMS  # type: ignore[misc]
