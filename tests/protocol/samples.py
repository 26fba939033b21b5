"""Shared samples: two peers, an issuer, a run, and one signed instance of every message. All are deterministic."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any, TypeVar

from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.identity import Identity
from gossamer.protocol.messages.messages import (
    Chunk,
    ChunkBeside,
    Commit,
    Commitment,
    Committed,
    Contents,
    ContentsKind,
    FetchRequest,
    Hello,
    HopAnswer,
    HopForward,
    HopNotice,
    Lane,
    Message,
    NoticeKind,
    Opening,
    Outcome,
    Part,
    Refusal,
    Resolve,
    RunPhase,
    Verdict,
)
from gossamer.protocol.messages.records import MemberRecord
from gossamer.protocol.messages.terms import FragmentTerms, RunTerms, StageTerms
from gossamer.protocol.run.invite import Credential

ALICE, BOB, ISSUER, MALLORY = (Identity(bytes([number]) * 32) for number in range(1, 5))
RUN_ID = hashlib.sha256(b"the run").digest()
OTHER_RUN_ID = hashlib.sha256(b"another run").digest()
NONCE, PARTNER_NONCE = b"n" * 16, b"p" * 16
MEETING_ID = b"m" * 16
DIGEST = hashlib.sha256(b"payload").digest()
NOW_S = 1_800_000_000
ADDRESS = f"/ip4/203.0.113.5/tcp/4001/p2p/{ALICE.peer_id}"

BEARER = Identity(bytes([9]) * 32)
ISSUED = Credential(ISSUER.peer_id, None, BEARER.peer_id, NOW_S + 3600, DIGEST).signed(ISSUER, RUN_ID)
CREDENTIAL = ISSUED.bound(BEARER, RUN_ID, ALICE.peer_id)
RECORD = MemberRecord(
    run_id=RUN_ID,
    peer_id=ALICE.peer_id,
    addresses=("/ip4/203.0.113.5/tcp/4001",),
    global_step=120,
    finished=False,
    sequence=7,
    expires_s=NOW_S + 300,
    credential=CREDENTIAL,
).signed(ALICE)
TERMS = RunTerms(
    run_id=RUN_ID,
    codec_id=2,
    fragments=(FragmentTerms(0, 1000, 0), FragmentTerms(64, 2000, 10)),
    state_bytes=8000,
    access="invite",
    issuers=frozenset({ISSUER.peer_id}),
    members=frozenset(),
    max_clock_gap_steps=200,
)
OPENING = Opening(1, RUN_ID, ALICE.peer_id, BOB.peer_id, NONCE, credential=CREDENTIAL, records=(RECORD.to_bytes(),))
UNSIGNED_HELLO = Hello(
    opening=OPENING,
    fragment=1,
    codec=2,
    tokens=25_600,
    global_step=120,
    sketch_bytes=64,
    payload_bytes=2000,
    phase=RunPhase.TRAIN,
)
HELLO = UNSIGNED_HELLO.signed(ALICE)
FETCH = FetchRequest(OPENING, ContentsKind.STATE, 65536, 4000).signed(ALICE)
UNSIGNED_LANE = Lane(replace(OPENING, stage=1), 120, RunPhase.TRAIN, 0)
LANE = UNSIGNED_LANE.signed(ALICE)
STAGE = StageTerms(stage=1, count=3, token_bytes=516, value_bytes=2112, in_batch=4)  # Bob's, above Alice's
STAGE_TERMS = replace(TERMS, stage=STAGE)

M = TypeVar("M", bound=Hello | Lane | FetchRequest)


def changed(message: M, **changes: Any) -> M:
    """Return a copy of a message with other values of its fields, or of those of its Opening."""
    opening = {field.name: changes.pop(field.name) for field in fields(Opening) if field.name in changes}
    return replace(message, opening=replace(message.opening, **opening), **changes)


MESSAGES: dict[str, Message] = {
    "hello": HELLO,
    "refusal": Refusal(RefusalCode.STEP_TOO_FAR, "300 steps apart"),
    "chunk": Chunk(Part.PAYLOAD, 262144, b"some bytes"),
    "commitment": Commitment(MEETING_ID, DIGEST).signed(ALICE),
    "verdict": Verdict(MEETING_ID, b"\x05"),
    "commit": Commit(MEETING_ID, b"\x07"),
    "committed": Committed(MEETING_ID),
    "resolve": Resolve(RUN_ID, MEETING_ID),
    "outcome": Outcome(MEETING_ID, True, b"\x07"),
    "fetch_request": FETCH,
    "lane": LANE,
    "hop_forward": HopForward(7, b"b" * 16, False, 120),
    "hop_answer": HopAnswer(7, 2.5, 4, 121),
    "hop_notice": HopNotice(7, NoticeKind.DELAYED),
    "chunk_beside": ChunkBeside(Part.GRADIENT, 4096, 65536),
    "contents": Contents(ContentsKind.STATE, 80000, DIGEST, 120).signed(BOB, *FETCH.asked),
}
