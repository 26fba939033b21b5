"""Messages of a partner whose contents break the protocol: the meeting is dropped, the partner refused and blamed, nothing applied.

test_machine_events.py tests every message out of turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gossamer.peer.meeting.events import PartnerSent
from gossamer.peer.meeting.interface import MeetingOutcome, MeetingState
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.messages import Chunk, Commit, Commitment, Hello, Message, Part, Refusal, RunPhase, Verdict
from tests.peer.two_sides import PLAIN, SKETCHED, Seat, Table, Trainer, alone
from tests.protocol.samples import changed

OWN, PARTNER = Table(SKETCHED).identities
HELLO = next(message for message in Table(SKETCHED).run()[1].sent if isinstance(message, Hello))  # of the responder
MEETING_ID = alone(MeetingState.RECORDING).meeting.pairing.meeting_id  # the nonces of these tests are fixed: always the same


def changed_hello(**fields: Any) -> Hello:
    return changed(HELLO, signature=b"", **fields).signed(PARTNER)


def broke(seat: Seat, *messages: Message) -> None:
    """Feed messages, the last of which violates the protocol: the meeting is dropped, the partner refused and blamed."""
    for message in messages:
        assert seat.finish is None
        seat.feed(PartnerSent(message))
    assert seat.over is MeetingOutcome.MISBEHAVED, seat.finish
    assert isinstance(seat.sent[-1], Refusal) and seat.sent[-1].code is RefusalCode.BAD_MESSAGE
    assert seat.num_drops == 1 and not seat.trainer.applied and not seat.journal


@pytest.mark.parametrize(
    ("state", "messages"),
    [
        pytest.param(MeetingState.GREETING, [changed_hello(partner_nonce=b"x" * 16)], id="a Hello that answers another"),
        pytest.param(MeetingState.GREETING, [replace(HELLO, tokens=1)], id="a forged Hello"),
        pytest.param(MeetingState.SKETCHING, [Chunk(Part.SKETCH, 1, b"x")], id="a gap in the sketch"),
        pytest.param(MeetingState.SKETCHING, [Chunk(Part.SKETCH, 0, b"x" * 65)], id="a sketch that is too long"),
        pytest.param(MeetingState.SKETCHING, [Chunk(Part.SKETCH, 0, b"x" * 32)] * 2, id="a chunk twice"),
        pytest.param(MeetingState.SKETCHING, [Chunk(Part.PAYLOAD, 0, b"x")], id="the payload before the commitment"),
        pytest.param(MeetingState.SKETCHING, [Chunk(Part.CONTENTS, 0, b"x")], id="a part of no meeting"),
        pytest.param(MeetingState.COMMITTING, [Commitment(b"m" * 16, b"d" * 32).signed(PARTNER)], id="a commitment of another meeting"),
        pytest.param(MeetingState.COMMITTING, [Commitment(MEETING_ID, b"d" * 32).signed(OWN)], id="a commitment of another peer"),
        pytest.param(MeetingState.EXCHANGING, [Chunk(Part.PAYLOAD, 400, b"x")], id="a gap in the payload"),
        pytest.param(MeetingState.EXCHANGING, [Chunk(Part.PAYLOAD, 0, b"x" * 901)], id="a payload that is too long"),
        pytest.param(MeetingState.EXCHANGING, [Chunk(Part.PAYLOAD, 0, b"z" * 900)], id="a payload of another hash"),
        pytest.param(MeetingState.EXCHANGING, [Chunk(Part.SKETCH, 64, b"x")], id="the sketch after the commitment"),
        pytest.param(MeetingState.AWAITING_DECISION, [Verdict(MEETING_ID, bytes(4))], id="a verdict of another size"),
        pytest.param(MeetingState.AWAITING_DECISION, [Verdict(b"m" * 16)], id="a verdict of another meeting"),
    ],
)
def test_a_partner_that_breaks_the_protocol_is_blamed(state: MeetingState, messages: list[Message]) -> None:
    broke(alone(state), *messages)


def test_a_decision_of_another_meeting_is_misbehaviour() -> None:
    broke(alone(MeetingState.AWAITING_DECISION, initiates=False), Commit(b"m" * 16))


def test_a_decision_that_leaves_out_what_failed_here_is_misbehaviour() -> None:
    table = Table(SKETCHED, trainers=(Trainer(b"a", SKETCHED), Trainer(b"b", SKETCHED, failed_blocks="010000")))
    table.greet()
    _, responder = table.run(until=MeetingState.AWAITING_DECISION)
    assert responder.state is MeetingState.AWAITING_DECISION
    broke(responder, Commit(responder.meeting.pairing.meeting_id, b"\x02\x00\x00"))


@pytest.mark.parametrize(
    ("fields", "code"), [({"payload_bytes": 901}, RefusalCode.WRONG_TERMS), ({"phase": RunPhase.FINISH}, RefusalCode.WRONG_PHASE)]
)
def test_a_hello_with_other_terms_is_refused_without_blame(fields: dict[str, Any], code: RefusalCode) -> None:
    seat = alone(MeetingState.GREETING)
    seat.feed(PartnerSent(changed_hello(**fields)))
    assert seat.over is MeetingOutcome.REFUSED
    assert isinstance(seat.sent[-1], Refusal) and seat.sent[-1].code is code


def test_a_clock_that_is_too_far_away_is_refused_without_blame() -> None:
    trainers = Trainer(b"a", PLAIN, global_step=500), Trainer(b"b", PLAIN, global_step=100)
    initiator, responder = Table(PLAIN, trainers=trainers).run()
    assert initiator.over is responder.over is MeetingOutcome.REFUSED
    assert responder.finish is not None and responder.finish.refusal is RefusalCode.STEP_TOO_FAR
