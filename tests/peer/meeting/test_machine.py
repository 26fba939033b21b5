"""The machine: a completed meeting, failures of the own trainer, timeouts, doubt, stops."""

from __future__ import annotations

import hashlib
import math

import pytest

from gossamer.peer.link.messages import Apply, Check, Checked, Encode, Open, Prepare, Unavailable
from gossamer.peer.meeting.commands import AskDecision, SetTimer
from gossamer.peer.meeting.events import DeadlinePassed, PartnerGone, PartnerSent, Resolved, Stopped
from gossamer.peer.meeting.interface import MeetingOutcome, MeetingState
from gossamer.peer.meeting.machine import AGAIN_S, CONNECT_S, DOUBT_S, DOUBT_TIMEOUTS
from gossamer.peer.swarm.partner_records import Trust
from gossamer.protocol.errors import RefusalCode
from gossamer.protocol.messages.messages import Chunk, Commit, Commitment, Outcome, Part, Refusal, RunPhase
from tests.peer.two_sides import DEADLINE_S, PLAIN, SKETCHED, TERMS, Seat, Table, Trainer, alone


@pytest.mark.parametrize("fragment", [PLAIN, SKETCHED])
def test_a_meeting_counts_once_for_both(fragment: int) -> None:
    initiator, responder = Table(fragment).run()
    assert initiator.over is responder.over is MeetingOutcome.COMPLETED
    assert initiator.trainer.applied == responder.trainer.applied == [initiator.meeting.pairing.meeting_id.hex()]
    assert initiator.journal == responder.journal == {initiator.meeting.pairing.meeting_id: b""}
    assert initiator.num_drops == responder.num_drops == 0


@pytest.mark.parametrize("fragment", [PLAIN, SKETCHED])
def test_each_side_gets_exactly_the_bytes_of_the_other(fragment: int) -> None:
    initiator, responder = Table(fragment).run()
    for one, other in ((initiator, responder), (responder, initiator)):
        assert one.stored[Part.PAYLOAD] == other.trainer.payload(Part.PAYLOAD)
        assert one.stored[Part.SKETCH] == other.trainer.payload(Part.SKETCH)


def test_both_trainers_get_the_same_seed_and_the_partners_tokens() -> None:
    trainers = Trainer(b"a", SKETCHED, tokens=100, global_step=7), Trainer(b"b", SKETCHED, tokens=300, global_step=9)
    Table(SKETCHED, trainers=trainers, trust=(Trust(token_ratio=16.0), Trust(token_ratio=16.0))).run()
    first, second = (next(request for request in t.asked if isinstance(request, Prepare)) for t in trainers)
    assert (first.partner_tokens, second.partner_tokens) == (300, 100)
    assert (first.partner_global_step, second.partner_global_step) == (9, 7)
    assert first.seed == second.seed and 0 <= first.seed < 2**63


def test_each_trainer_is_told_how_far_the_partner_is_trusted() -> None:
    trainers = Trainer(b"a", PLAIN, tokens=100), Trainer(b"b", PLAIN, tokens=300)
    trusts = Trust(True, 0.25, 2.0, most_part=0.5), Trust(False, 1.0, 16.0)
    seats = Table(PLAIN, trainers=trainers, trust=trusts).run()
    for trainer, trust, tokens, seat in zip(trainers, trusts, (200, 100), seats, strict=True):
        prepare, check = (next(asked for asked in trainer.asked if isinstance(asked, kind)) for kind in (Prepare, Check))
        assert isinstance(prepare, Prepare) and prepare.partner_tokens == tokens
        assert isinstance(check, Check) and (check.must_probe, check.share, check.most_part) == (
            trust.must_probe,
            trust.share,
            trust.most_part,
        )
        assert seat.meeting.checked == Checked(seat.meeting.number, True, "", "")


def test_name_and_seed_are_those_of_the_specification() -> None:
    initiator, _ = Table(SKETCHED).run()
    names = b"gossamer-meeting" + TERMS.run_id + (SKETCHED).to_bytes(4, "little") + b"n" * 16 + b"p" * 16
    meeting_id = hashlib.sha256(names).digest()[:16]
    assert initiator.meeting.pairing.meeting_id == meeting_id
    seed = int.from_bytes(hashlib.sha256(meeting_id + b"seed").digest()[:8], "little") & (2**63 - 1)
    assert initiator.meeting.pairing.seed == seed


def test_both_apply_with_the_union_of_failed_blocks() -> None:
    trainers = Trainer(b"a", SKETCHED, failed_blocks="010000"), Trainer(b"b", SKETCHED, failed_blocks="000008")
    table = Table(SKETCHED, trainers=trainers)
    seats = table.run()
    for seat in seats:
        apply = next(request for request in seat.trainer.asked if isinstance(request, Apply))
        assert apply.failed_blocks == "010008"


def test_payloads_cross_only_after_both_commitments() -> None:
    for seat in Table(SKETCHED).run():
        own = next(index for index, message in enumerate(seat.sent) if isinstance(message, Commitment))
        first = next(i for i, m in enumerate(seat.sent) if isinstance(m, Chunk) and m.part is Part.PAYLOAD)
        assert own < first
    seat = alone(MeetingState.COMMITTING)
    assert not [message for message in seat.sent if isinstance(message, Chunk) and message.part is Part.PAYLOAD]


def test_finished_peers_average_and_a_training_one_does_not_join_them() -> None:
    finished = Trainer(b"a", PLAIN, phase=RunPhase.FINISH), Trainer(b"b", PLAIN, phase=RunPhase.FINISH)
    for seat in Table(PLAIN, trainers=finished).run():
        assert seat.over is MeetingOutcome.COMPLETED
        assert any(isinstance(r, Prepare) and r.phase is RunPhase.FINISH for r in seat.trainer.asked)
    initiator, responder = Table(PLAIN, trainers=(finished[0], Trainer(b"b", PLAIN))).run()
    assert responder.over is initiator.over is MeetingOutcome.REFUSED
    assert initiator.finish is not None and initiator.finish.refusal is RefusalCode.WRONG_PHASE


def test_a_finished_peer_still_meets_one_that_trains() -> None:
    trainers = Trainer(b"a", PLAIN), Trainer(b"b", PLAIN, phase=RunPhase.FINISH)
    for seat in Table(PLAIN, trainers=trainers).run():
        assert seat.over is MeetingOutcome.COMPLETED
        assert any(isinstance(r, Prepare) and r.phase is RunPhase.TRAIN for r in seat.trainer.asked)


# --------------------------------------------------------------------------- own trainer


def test_a_busy_trainer_of_the_initiator_ends_the_meeting_without_a_message() -> None:
    table = Table(PLAIN)
    table.trainers[0].replies[Open] = Unavailable(1, "in another meeting")
    seat = table.initiator
    while seat.waiting:
        seat.feed(seat.waiting.popleft())
    assert seat.over is MeetingOutcome.BUSY and seat.sent == []  # a Refusal to a partner that knows of nothing would be out of turn


def test_busy_trainer_of_the_responder_refuses() -> None:
    table = Table(PLAIN)
    table.trainers[1].replies[Open] = Unavailable(2, "in another meeting")
    initiator, responder = table.run()
    assert initiator.over is responder.over is MeetingOutcome.BUSY
    assert initiator.num_drops == responder.num_drops == 1


@pytest.mark.parametrize("request_kind", [Prepare, Encode, Check])
@pytest.mark.parametrize("side", [0, 1])
def test_a_trainer_that_fails_drops_the_meeting_on_both_sides(request_kind: type, side: int) -> None:
    table = Table(SKETCHED)
    table.trainers[side].replies[request_kind] = Unavailable(side + 1, "restarted")
    seats = table.run()
    assert seats[side].over is MeetingOutcome.ABANDONED
    assert seats[1 - side].over is MeetingOutcome.REFUSED
    assert all(seat.num_drops == 1 and not seat.trainer.applied for seat in seats)


@pytest.mark.parametrize("side", [0, 1])
def test_a_rejection_by_the_gate_drops_the_meeting_on_both_sides(side: int) -> None:
    table = Table(PLAIN)
    table.trainers[side].replies[Check] = Checked(side + 1, False, "not finite", "")
    seats = table.run()
    assert seats[side].over is MeetingOutcome.GATED
    other = seats[1 - side].finish
    assert other is not None and other.refusal is RefusalCode.GATE and "not finite" in other.reason
    assert not any(seat.trainer.applied for seat in seats)


# --------------------------------------------------------------------------- time


def last_allowed_s(seat: Seat) -> float:
    return [command.seconds for command in seat.commands if isinstance(command, SetTimer)][-1]


@pytest.mark.parametrize(
    "state",
    [MeetingState.GREETING, MeetingState.SKETCHING, MeetingState.COMMITTING, MeetingState.EXCHANGING, MeetingState.AWAITING_DECISION],
)
def test_a_silent_partner_locks_the_fragment_for_a_third_of_the_deadline(state: MeetingState) -> None:
    assert DEADLINE_S / 3 <= last_allowed_s(alone(state)) < DEADLINE_S / 3 + 0.1  # the payload is of a thousand bytes


@pytest.mark.parametrize("state", [MeetingState.GREETING, MeetingState.EXCHANGING, MeetingState.AWAITING_DECISION])
def test_a_fast_partner_has_a_shorter_timeout_and_a_slow_one_not_a_longer_one(state: MeetingState) -> None:
    assert last_allowed_s(alone(state, timeout_s=1.0)) == 1.0
    assert last_allowed_s(alone(state, timeout_s=1e3)) == last_allowed_s(alone(state))


@pytest.mark.parametrize("state", [MeetingState.PREPARING, MeetingState.ENCODING, MeetingState.CHECKING])
def test_own_trainer_has_the_whole_deadline(state: MeetingState) -> None:
    for timeout_s in (1.0, 1e3):
        assert last_allowed_s(alone(state, timeout_s=timeout_s)) == DEADLINE_S


def test_a_responder_asks_a_silent_partner_for_two_timeouts_and_one_whose_stream_ended_longer() -> None:
    for timeout_s, doubt_s in ((1.0, DOUBT_TIMEOUTS), (1e3, DOUBT_S), (math.inf, DOUBT_S)):
        seat = alone(MeetingState.AWAITING_DECISION, initiates=False, timeout_s=timeout_s)
        seat.feed(DeadlinePassed())
        assert seat.state is MeetingState.IN_DOUBT and last_allowed_s(seat) == doubt_s
        assert last_allowed_s(alone(MeetingState.IN_DOUBT, initiates=False, timeout_s=timeout_s)) == DOUBT_S


def test_a_familiar_partner_must_be_connected_sooner_than_a_stranger() -> None:
    for timeout_s, connect_s in ((5.0, AGAIN_S), (65.0, AGAIN_S), (math.inf, CONNECT_S)):
        assert last_allowed_s(alone(MeetingState.CONNECTING, timeout_s=timeout_s)) == connect_s


# --------------------------------------------------------------------------- doubt


def doubtful() -> Seat:
    seat = alone(MeetingState.AWAITING_DECISION, initiates=False)
    commands = seat.feed(PartnerGone())
    assert seat.state is MeetingState.IN_DOUBT and any(isinstance(command, AskDecision) for command in commands)
    return seat


def test_responder_that_loses_the_stream_asks_and_applies() -> None:
    seat = doubtful()
    seat.feed(Resolved(Outcome(seat.meeting.pairing.meeting_id, True, b"\x01\x00\x00")))
    while seat.waiting:
        seat.feed(seat.waiting.popleft())
    assert seat.over is MeetingOutcome.COMPLETED and len(seat.trainer.applied) == 1
    assert seat.journal == {seat.meeting.pairing.meeting_id: b"\x01\x00\x00"}


def test_responder_that_loses_the_stream_asks_and_drops() -> None:
    seat = doubtful()
    seat.feed(Resolved(Outcome(seat.meeting.pairing.meeting_id, False)))
    assert seat.over is MeetingOutcome.FAILED and seat.num_drops == 1 and not seat.trainer.applied


def test_decision_that_cannot_be_learnt_in_time_did_not_happen() -> None:
    seat = doubtful()
    seat.feed(DeadlinePassed())
    assert seat.over is MeetingOutcome.FAILED and seat.num_drops == 1


def test_deadline_of_a_responder_that_waits_for_the_decision_leads_to_doubt_and_a_late_commit_still_counts() -> None:
    seat = alone(MeetingState.AWAITING_DECISION, initiates=False)
    assert any(isinstance(command, SetTimer) for command in seat.feed(DeadlinePassed()))
    seat.feed(PartnerSent(Commit(seat.meeting.pairing.meeting_id)))
    while seat.waiting:
        seat.feed(seat.waiting.popleft())
    assert seat.over is MeetingOutcome.COMPLETED
    assert seat.feed(Resolved(Outcome(seat.meeting.pairing.meeting_id, True))) == []


def test_refusal_ends_the_doubt() -> None:
    seat = alone(MeetingState.AWAITING_DECISION, initiates=False)
    seat.feed(DeadlinePassed())
    seat.feed(PartnerSent(Refusal(RefusalCode.TOO_SLOW)))
    assert seat.over is MeetingOutcome.REFUSED and seat.num_drops == 1


def test_the_outcome_of_another_meeting_is_misbehaviour() -> None:
    seat = doubtful()
    seat.feed(Resolved(Outcome(b"m" * 16, True)))
    assert seat.over is MeetingOutcome.MISBEHAVED


def test_a_stop_does_not_end_a_meeting_that_may_already_count() -> None:
    for seat in (doubtful(), alone(MeetingState.AWAITING_DECISION, initiates=False)):
        assert seat.feed(Stopped("leaving", RefusalCode.LEAVING)) == []
        assert seat.finish is None


def test_an_initiator_that_stops_drops_an_undecided_meeting() -> None:
    seat = alone(MeetingState.AWAITING_DECISION)
    seat.feed(Stopped("leaving", RefusalCode.LEAVING))
    assert seat.over is MeetingOutcome.ABANDONED
    assert isinstance(seat.sent[-1], Refusal) and seat.sent[-1].code is RefusalCode.LEAVING
