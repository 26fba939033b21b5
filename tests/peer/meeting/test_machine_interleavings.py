"""Random interleavings of two machines, with cuts, deadlines, lost trainers, full disks: each side ends before the meeting or after."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.peer.meeting.events import DeadlinePassed, PartnerGone, Resolved, Stopped, TrainerAnswered, TrainerGone
from gossamer.peer.meeting.interface import MeetingOutcome, MeetingState
from gossamer.protocol.errors import RefusalCode
from tests.peer.two_sides import PLAIN, SKETCHED, Seat, Table

Draw = Callable[[int], int]
"""Choose a number below this one."""
Trouble = tuple[str, int, int]
"""What happens, at which side, at which step."""


class Chance:
    """Runs both machines in a random order, with failures at given steps."""

    def __init__(self, table: Table, draw: Draw) -> None:
        self.seats = table.seats()
        self._draw = draw
        self.is_unannounced = False  # a responder has given up Resolve
        self._is_cut = False

    def run(self, troubles: list[Trouble]) -> None:
        for step in range(2000):
            for name, side, at_step in troubles:
                if at_step == step:
                    getattr(self, name)(self.seats[side])
            if all(seat.finish for seat in self.seats):
                return
            self.one_step()
        raise AssertionError([(seat.state, seat.finish) for seat in self.seats])

    def one_step(self) -> None:
        steps: list[Callable[[], object]] = []
        for seat in self.seats:
            if seat.waiting:
                steps.append(lambda seat=seat: seat.feed(seat.waiting.popleft()))
            if seat.incoming:
                steps.append(seat.deliver)
            if seat.asks_again and seat.state is MeetingState.IN_DOUBT:
                steps.append(lambda seat=seat: self._resolve(seat))
        if steps:
            steps[self._draw(len(steps))]()
        else:  # nothing else can happen: time passes
            waits = [seat for seat in self.seats if seat.finish is None]
            waits[self._draw(len(waits))].feed(DeadlinePassed())

    def _resolve(self, seat: Seat) -> None:
        assert seat.other is not None
        outcome = seat.other.outcome(seat.meeting.pairing.meeting_id)
        if outcome.is_committed or seat.other.finish is not None:
            seat.feed(Resolved(outcome))

    # ---- failures ----

    def cut(self, seat: Seat) -> None:
        """The stream breaks: each side loses a random part of the frames in transit, and gets PartnerGone."""
        if self._is_cut:
            return
        self._is_cut = True
        for end in self.seats:
            end.line_is_cut = True
            while end.incoming and self._draw(3) == 0:
                end.incoming.pop()
            while end.incoming:
                end.deliver()
        for end in self.seats:
            end.feed(PartnerGone())

    def deadline(self, seat: Seat) -> None:
        self.is_unannounced |= seat.state is MeetingState.IN_DOUBT
        seat.feed(DeadlinePassed())

    def stop(self, seat: Seat) -> None:
        seat.feed(Stopped("leaving", RefusalCode.LEAVING))

    def lose_trainer(self, seat: Seat) -> None:
        seat.trainer_is_there = False
        seat.waiting = type(seat.waiting)(event for event in seat.waiting if not isinstance(event, TrainerAnswered))
        seat.feed(TrainerGone())

    def fill_disk(self, seat: Seat) -> None:
        seat.disk_is_full = True


def troubles(*names: str) -> st.SearchStrategy[list[Trouble]]:
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 1), st.integers(0, 45)), max_size=4)


USUAL = ("cut", "deadline", "stop", "fill_disk")


@settings(max_examples=160)
@given(st.data(), st.sampled_from([PLAIN, SKETCHED]), troubles(*USUAL))
def test_both_sides_apply_or_neither_does(data: st.DataObject, fragment: int, trouble: list[Trouble]) -> None:
    chance = Chance(Table(fragment), lambda number: data.draw(st.integers(0, number - 1)))
    chance.run(trouble)
    initiator, responder = chance.seats
    applied = [seat.trainer.applied for seat in chance.seats]
    assert all(len(meetings) <= 1 for meetings in applied)
    assert applied[0] == applied[1] or (chance.is_unannounced and not applied[1])
    for seat in chance.seats:
        assert (seat.over is MeetingOutcome.COMPLETED) == bool(seat.trainer.applied)
        assert seat.num_drops == (not seat.trainer.applied), "a fragment stays locked, or a meeting that counts was dropped"
    assert bool(initiator.journal) == bool(applied[0])
    assert not responder.journal or initiator.journal


@settings(max_examples=80)
@given(st.data(), st.sampled_from([PLAIN, SKETCHED]), troubles(*USUAL, "lose_trainer"))
def test_with_lost_trainers_each_side_still_ends_whole(data: st.DataObject, fragment: int, trouble: list[Trouble]) -> None:
    chance = Chance(Table(fragment), lambda number: data.draw(st.integers(0, number - 1)))
    chance.run(trouble)
    for seat in chance.seats:
        assert len(seat.trainer.applied) <= 1
        assert seat.num_drops <= 1
        assert seat.num_drops == 1 or seat.over is MeetingOutcome.COMPLETED
    if not any(seat.trainer.applied for seat in chance.seats):
        assert not any(seat.over is MeetingOutcome.COMPLETED for seat in chance.seats)


@settings(max_examples=80)
@given(st.data(), st.sampled_from([PLAIN, SKETCHED]))
def test_a_meeting_counts_for_one_side_only_if_the_decision_could_not_be_delivered(data: st.DataObject, fragment: int) -> None:
    """The initiator dies for good after a random event, so that no Resolve is answered."""
    table = Table(fragment)
    chance = Chance(table, lambda number: data.draw(st.integers(0, number - 1)))
    initiator, responder = chance.seats
    for _ in range(data.draw(st.integers(0, 60))):
        if initiator.finish is None or responder.finish is None:
            chance.one_step()
    while responder.incoming and data.draw(st.booleans()):
        responder.deliver()
    responder.incoming.clear()
    responder.other = None
    if responder.finish is None:
        responder.feed(PartnerGone())
    while responder.waiting:
        responder.feed(responder.waiting.popleft())
    if responder.finish is None:
        responder.feed(DeadlinePassed())
    assert responder.finish is not None
    assert not responder.trainer.applied or initiator.journal, "the responder cannot count what the initiator did not decide"
