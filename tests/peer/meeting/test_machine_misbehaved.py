"""Every violation of the protocol by a partner: the meeting is dropped, the partner refused and blamed, nothing applied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.peer.meeting.events import PartnerMalformed, PartnerSent
from gossamer.peer.meeting.interface import MeetingOutcome, MeetingState
from gossamer.protocol.errors import BadMessage, RefusalCode
from gossamer.protocol.messages.messages import (
    Chunk,
    Commit,
    Commitment,
    Committed,
    Contents,
    ContentsKind,
    Hello,
    Message,
    Outcome,
    Part,
    Refusal,
    RunPhase,
    Verdict,
)
from tests.peer.two_sides import PLAIN, SKETCHED, Seat, Table, Trainer, alone


def broke(seat: Seat, *messages: Message) -> None:
    """Feed messages, the last of which violates the protocol: the meeting is dropped, the partner refused and blamed."""
    for message in messages:
        assert seat.finish is None
        seat.feed(PartnerSent(message))
    assert seat.over is MeetingOutcome.MISBEHAVED, seat.finish
    assert isinstance(seat.sent[-1], Refusal) and seat.sent[-1].code is RefusalCode.BAD_MESSAGE
    assert seat.num_drops == 1 and not seat.trainer.applied and not seat.journal


def partners_hello() -> Hello:
    table = Table(SKETCHED)
    _, responder = table.run()
    return next(message for message in responder.sent if isinstance(message, Hello))


def test_second_hello() -> None:
    broke(alone(MeetingState.GREETING), partners_hello(), partners_hello())
    broke(alone(MeetingState.PREPARING, initiates=False), partners_hello())


def test_hello_that_answers_another() -> None:
    table = Table(SKETCHED)
    hello = replace(partners_hello(), partner_nonce=b"x" * 16, signature=b"").signed(table.identities[1])
    broke(alone(MeetingState.GREETING), hello)


def test_hello_with_a_forged_signature() -> None:
    broke(alone(MeetingState.GREETING), replace(partners_hello(), tokens=1))


def test_hello_of_other_sizes_is_refused_without_blame() -> None:
    table = Table(SKETCHED)
    seat = alone(MeetingState.GREETING)
    seat.feed(PartnerSent(replace(partners_hello(), payload_bytes=901, signature=b"").signed(table.identities[1])))
    assert seat.over is MeetingOutcome.REFUSED
    assert isinstance(seat.sent[-1], Refusal) and seat.sent[-1].code is RefusalCode.WRONG_TERMS


def test_hello_of_another_phase_is_refused_without_blame() -> None:
    table = Table(SKETCHED)
    seat = alone(MeetingState.GREETING)
    seat.feed(PartnerSent(replace(partners_hello(), phase=RunPhase.FINISH, signature=b"").signed(table.identities[1])))
    assert seat.over is MeetingOutcome.REFUSED


def test_clock_too_far_is_refused_without_blame() -> None:
    trainers = Trainer(b"a", PLAIN, global_step=500), Trainer(b"b", PLAIN, global_step=100)
    initiator, responder = Table(PLAIN, trainers=trainers).run()
    assert initiator.over is responder.over is MeetingOutcome.REFUSED
    assert responder.finish is not None and responder.finish.refusal is RefusalCode.STEP_TOO_FAR


def test_chunk_before_hello() -> None:
    broke(alone(MeetingState.GREETING), Chunk(Part.SKETCH, 0, b"x"))


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(Part.SKETCH, 1, b"x"),
        Chunk(Part.SKETCH, 0, b"x" * 65),
        Chunk(Part.PAYLOAD, 0, b"x"),
        Chunk(Part.CONTENTS, 0, b"x"),
    ],
    ids=["gap", "too many", "payload before commitment", "wrong part"],
)
def test_chunk_of_the_sketch_out_of_turn(chunk: Chunk) -> None:
    broke(alone(MeetingState.SKETCHING), chunk)


def test_chunk_twice() -> None:
    broke(alone(MeetingState.SKETCHING), Chunk(Part.SKETCH, 0, b"x" * 32), Chunk(Part.SKETCH, 0, b"x" * 32))


@pytest.mark.parametrize(
    "chunk",
    [Chunk(Part.PAYLOAD, 400, b"x"), Chunk(Part.PAYLOAD, 0, b"x" * 901), Chunk(Part.SKETCH, 64, b"x")],
    ids=["gap", "too many", "sketch"],
)
def test_chunk_of_the_payload_out_of_turn(chunk: Chunk) -> None:
    broke(alone(MeetingState.EXCHANGING), chunk)


def test_payload_of_another_hash() -> None:
    broke(alone(MeetingState.EXCHANGING), Chunk(Part.PAYLOAD, 0, b"z" * 900))


def test_commitment_of_another_meeting() -> None:
    seat, partner = alone(MeetingState.COMMITTING), Table(SKETCHED).identities[1]
    broke(seat, Commitment(b"m" * 16, b"d" * 32).signed(partner))


def test_commitment_signed_by_another_peer() -> None:
    seat, other = alone(MeetingState.COMMITTING), Table(SKETCHED).identities[0]
    broke(seat, Commitment(seat.meeting.pairing.meeting_id, b"d" * 32).signed(other))


def test_commitment_before_the_sketch_is_whole() -> None:
    seat, partner = alone(MeetingState.SKETCHING), Table(SKETCHED).identities[1]
    broke(seat, Commitment(seat.meeting.pairing.meeting_id, b"d" * 32).signed(partner))


def test_second_commitment() -> None:
    seat, partner = alone(MeetingState.COMMITTING), Table(SKETCHED).identities[1]
    commitment = Commitment(seat.meeting.pairing.meeting_id, b"d" * 32).signed(partner)
    broke(seat, commitment, commitment)


def test_verdict_of_wrong_size() -> None:
    seat = alone(MeetingState.AWAITING_DECISION)
    broke(seat, Verdict(seat.meeting.pairing.meeting_id, b"\x00" * 4))


def test_verdict_of_another_meeting() -> None:
    broke(alone(MeetingState.AWAITING_DECISION), Verdict(b"m" * 16))


def test_verdict_before_the_payload() -> None:
    seat = alone(MeetingState.EXCHANGING)
    broke(seat, Verdict(seat.meeting.pairing.meeting_id))


def test_verdict_from_the_side_that_decides() -> None:
    seat = alone(MeetingState.AWAITING_DECISION, initiates=False)
    broke(seat, Verdict(seat.meeting.pairing.meeting_id))


def test_commit_before_the_verdict() -> None:
    seat = alone(MeetingState.CHECKING, initiates=False)
    broke(seat, Commit(seat.meeting.pairing.meeting_id))


def test_commit_from_the_responder() -> None:
    seat = alone(MeetingState.AWAITING_DECISION)
    broke(seat, Commit(seat.meeting.pairing.meeting_id))


def test_commit_of_another_meeting() -> None:
    broke(alone(MeetingState.AWAITING_DECISION, initiates=False), Commit(b"m" * 16))


def test_commit_that_leaves_out_what_failed_here() -> None:
    table = Table(SKETCHED, trainers=(Trainer(b"a", SKETCHED), Trainer(b"b", SKETCHED, failed_blocks="010000")))
    table.greet()
    _, responder = table.run(until=MeetingState.AWAITING_DECISION)
    assert responder.state is MeetingState.AWAITING_DECISION
    broke(responder, Commit(responder.meeting.pairing.meeting_id, b"\x02\x00\x00"))


@pytest.mark.parametrize("initiates", [True, False])
def test_committed_out_of_turn(initiates: bool) -> None:
    seat = alone(MeetingState.AWAITING_DECISION, initiates=initiates)
    broke(seat, Committed(seat.meeting.pairing.meeting_id))


def test_messages_that_do_not_belong_to_a_meeting() -> None:
    contents = Contents(ContentsKind.STATE, 800, b"d" * 32, 1, signature=b"s" * 64)
    for message in (Outcome(b"m" * 16, True), contents):
        broke(alone(MeetingState.AWAITING_DECISION), message)


@pytest.mark.parametrize("state", [MeetingState.GREETING, MeetingState.PREPARING, MeetingState.EXCHANGING, MeetingState.AWAITING_DECISION])
def test_garbage(state: MeetingState) -> None:
    seat = alone(state)
    seat.feed(PartnerMalformed(BadMessage("not a frame")))
    assert seat.over is MeetingOutcome.MISBEHAVED and seat.num_drops == 1
