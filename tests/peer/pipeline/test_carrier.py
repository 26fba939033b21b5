"""A carrier beside scripted neighbours: what a hostile one may not do, and what happens to a hop before its answer."""

from __future__ import annotations

import itertools
import random

import pytest

from gossamer.peer.link.messages import Backward, Declined, Forward, Forwarded, HopFile, Returned, hop_file
from gossamer.peer.pipeline import commands, events
from gossamer.peer.pipeline.carrier import MOST_DELAYS, MOST_TRIES, NOBODY_ABOVE_S, Carrier
from gossamer.peer.pipeline.commands import Command, HopOutcome
from gossamer.peer.pipeline.hop import HopState
from gossamer.peer.pipeline.lane import FIRST_PATIENCE_S, DownLane, UpLane
from gossamer.protocol.errors import BadMessage
from gossamer.protocol.limits import WINDOW
from gossamer.protocol.messages.messages import Chunk, HopAnswer, HopForward, HopNotice, Message, NoticeKind, Part
from gossamer.protocol.messages.terms import StageTerms
from tests.protocol.samples import ALICE, BOB

TOKENS, VALUES = 12, 40
LOW, HIGH = 1, 2  # lanes
STEPS = 3  # own ones of the trainer
NAME = b"n" * 16


class Middle:
    """The carrier of a holder of stage 1 of 3 with a lane down from stage 0 and one up to stage 2, and its clock."""

    def __init__(self, stage: int = 1, count: int = 3, in_batch: int = 4) -> None:
        terms = StageTerms(stage, count, TOKENS, VALUES, in_batch)
        self.carrier = Carrier(terms, random.Random(1), itertools.count(100))
        self.now_s = 1000.0
        if stage < count - 1:
            self.take(events.LaneOpened(DownLane.opened(HIGH, BOB.peer_id, 2, terms)))
        if stage:
            self.take(events.LaneOpened(UpLane(LOW, ALICE.peer_id, 2)))

    def take(self, event: events.Event) -> list[Command]:
        return self.carrier.handle(event, self.now_s)

    def say(self, lane: int, *messages: Message) -> list[Command]:
        return [command for message in messages for command in self.take(events.LaneSaid(lane, message))]

    def arrive(self, number: int = 1, name: bytes = NAME, *, measure: bool = False) -> int:
        """Have a hop arrive; return our number of it."""
        done = self.say(LOW, HopForward(number, name, measure, 5), *chunks_of_forward())
        (asked,) = [command.request for command in done if isinstance(command, commands.AskForHop)]
        assert isinstance(asked, Forward)
        return asked.hop

    def leave(self, hop: int) -> HopForward:
        """Have the trainer compute it; return what goes to the next stage."""
        (sent,) = [
            command
            for command in self.take(events.TrainerReplied(Forwarded(hop, own_steps=STEPS)))
            if isinstance(command, commands.SendHop)
        ]
        assert isinstance(sent.message, HopForward) and sent.lane == HIGH
        return sent.message

    def pass_time(self) -> list[Command]:
        assert self.carrier.next_s < float("inf")
        self.now_s = max(self.now_s, self.carrier.next_s)
        return self.take(events.TimePassed())


def chunks_of_forward() -> list[Message]:
    return [Chunk(Part.TOKENS, 0, bytes(TOKENS)), Chunk(Part.ACTIVATIONS, 0, bytes(30)), Chunk(Part.ACTIVATIONS, 30, bytes(VALUES - 30))]


def answer(number: int, window: int = 2) -> list[Message]:
    return [HopAnswer(number, 2.5, window, 7), Chunk(Part.GRADIENT, 0, bytes(VALUES))]


def backward(hop: int) -> Backward:
    return Backward(hop, NAME.hex(), False, "", STEPS, 2.5)


def notices(done: list[Command]) -> list[tuple[int, int, NoticeKind]]:
    return [(command.lane, command.message.number, command.message.notice) for command in done if isinstance(command, commands.SendNotice)]


def outcomes(done: list[Command]) -> list[HopOutcome]:
    return [command.outcome for command in done if isinstance(command, commands.HopOver)]


def fault(done: list[Command]) -> str:
    """Return what a lane was closed for; the carrier has forgotten it."""
    (closed,) = [command for command in done if isinstance(command, commands.CloseLane)]
    assert isinstance(closed.fault, BadMessage)
    return closed.reason


def test_a_hop_goes_up_and_its_gradient_comes_down() -> None:
    middle = Middle()
    hop = middle.arrive(4)
    sent = middle.leave(hop)
    assert (sent.micro_batch, sent.measure) == (NAME, False)
    done = middle.say(HIGH, *answer(sent.number))
    assert commands.StoreChunk(hop, hop_file(hop, HopFile.PARTNER_BACKWARD), bytes(VALUES), is_first=True) in done
    assert done[-1] == commands.AskForHop(backward(hop))
    (back,) = middle.take(events.TrainerReplied(Returned(hop, 2.5)))
    assert isinstance(back, commands.SendHop) and back.lane == LOW
    assert isinstance(back.message, HopAnswer) and (back.message.number, back.message.loss) == (4, 2.5)
    assert back.files == ((Part.GRADIENT, hop_file(hop, HopFile.OWN_BACKWARD), VALUES),)
    done = middle.take(events.HopSent(hop))
    assert commands.RemoveHop(hop) in done and outcomes(done) == [HopOutcome.ANSWERED]
    assert middle.carrier.is_quiet


def test_a_hop_that_measures_comes_back_without_the_trainer_and_without_bytes() -> None:
    middle = Middle()
    sent = middle.leave(middle.arrive(measure=True))
    assert sent.measure
    done = middle.say(HIGH, HopAnswer(sent.number, 2.25, 2, 7))
    (back,) = [command for command in done if isinstance(command, commands.SendHop)]
    assert isinstance(back.message, HopAnswer) and back.message.loss == 2.25 and back.files == ()


def test_both_sides_tell_their_clocks() -> None:
    middle = Middle()
    middle.carrier.global_step = 33
    heard = [command for command in middle.say(LOW, HopForward(1, NAME, False, 5)) if isinstance(command, commands.HearClock)]
    assert heard == [commands.HearClock(LOW, 5)]
    middle.say(LOW, *chunks_of_forward())
    assert middle.leave(100).global_step == 33


WRONG_FROM_BELOW: dict[str, list[Message]] = {
    "a chunk that no hop expects": [Chunk(Part.TOKENS, 0, b"x")],
    "expected tokens at 0": [HopForward(1, NAME, False, 0), Chunk(Part.ACTIVATIONS, 0, b"x")],
    "expected tokens at 2": [HopForward(1, NAME, False, 0), Chunk(Part.TOKENS, 0, b"xy"), Chunk(Part.TOKENS, 3, b"x")],
    "a chunk of tokens at 0": [HopForward(1, NAME, False, 0), Chunk(Part.TOKENS, 0, bytes(TOKENS + 1))],
    "a chunk of activations at 30": [HopForward(1, NAME, False, 0), *chunks_of_forward()[:2], Chunk(Part.ACTIVATIONS, 30, bytes(11))],
    "before the bytes of hop 1": [HopForward(1, NAME, False, 0), HopForward(2, b"m" * 16, False, 0)],
    "hop 1 after hop 1": [HopForward(1, NAME, False, 0), *chunks_of_forward(), HopForward(1, b"m" * 16, False, 0)],
    "beyond the window of 2": [
        *(message for number in (1, 2) for message in (HopForward(number, bytes([number]) * 16, False, 0), *chunks_of_forward())),
        HopForward(3, NAME, False, 0),
    ],
    "a HopAnswer out of turn": [HopAnswer(1, 1.0, 1, 0)],
    "a HopNotice out of turn": [HopNotice(1, NoticeKind.DECLINED)],
}
WRONG_FROM_ABOVE: dict[str, list[Message]] = {
    "waits for none": answer(2),
    "a window without a hop": answer(1, window=0),
    "a chunk of gradient at 0": [HopAnswer(1, 1.0, 1, 0), Chunk(Part.GRADIENT, 0, bytes(VALUES + 1))],
    "expected gradient at 0": [HopAnswer(1, 1.0, 1, 0), Chunk(Part.ACTIVATIONS, 0, bytes(VALUES))],
    "before the bytes of the answer": [HopAnswer(1, 1.0, 1, 0), HopAnswer(1, 1.0, 1, 0)],
    "a chunk that no hop expects": [*answer(1), Chunk(Part.GRADIENT, 0, b"x")],
    "which was not sent": [HopNotice(2, NoticeKind.DECLINED)],
    "a HopForward out of turn": [HopForward(1, NAME, False, 0)],
    "a HopNotice out of turn": [HopNotice(1, NoticeKind.WITHDRAWN)],
}


@pytest.mark.parametrize("reason", WRONG_FROM_BELOW)
def test_a_lower_holder_that_breaks_the_rules_loses_its_lane_and_its_hops(reason: str) -> None:
    middle = Middle()
    done = middle.say(LOW, *WRONG_FROM_BELOW[reason])
    assert reason in fault(done)
    assert not middle.carrier.up
    for hop in (100, 101):
        middle.take(events.TrainerReplied(Declined(hop, "lost"))) if hop in middle.carrier._lost else None
    assert middle.carrier.is_quiet
    assert middle.say(LOW, HopForward(9, NAME, False, 0)) == [], "nothing more is read from it"


@pytest.mark.parametrize("reason", WRONG_FROM_ABOVE)
def test_a_higher_holder_that_breaks_the_rules_loses_its_lane_and_the_hop_is_kept(reason: str) -> None:
    middle = Middle()
    hop = middle.arrive()
    middle.leave(hop)
    done = middle.say(HIGH, *WRONG_FROM_ABOVE[reason])
    assert reason in fault(done)
    assert not middle.carrier.down
    if reason != "a chunk that no hop expects":  # by then the gradient is complete
        assert middle.carrier.hops[hop].state is HopState.READY
        assert (LOW, 1, NoticeKind.DELAYED) in notices(done)


def test_a_hop_that_is_declined_above_goes_to_another_holder_at_once() -> None:
    middle = Middle()
    middle.take(events.LaneOpened(DownLane.opened(3, ALICE.peer_id, 2, middle.carrier.stage)))
    hop = middle.arrive()
    (sent,) = [command for command in middle.take(events.TrainerReplied(Forwarded(hop))) if isinstance(command, commands.SendHop)]
    done = middle.say(sent.lane, HopNotice(sent.message.number, NoticeKind.DECLINED))
    assert notices(done) == [(LOW, 1, NoticeKind.DELAYED)]
    (again,) = [command for command in done if isinstance(command, commands.SendHop)]
    assert again.lane == 5 - sent.lane and again.files == sent.files, "the same bytes"


def test_after_three_tries_a_hop_is_declined_and_no_stage_below_tries_again() -> None:
    middle = Middle()
    hop = middle.arrive()
    sent = middle.leave(hop)
    for number in range(1, MOST_TRIES):
        assert sent.number == number
        assert notices(middle.say(HIGH, HopNotice(number, NoticeKind.DECLINED))) == [(LOW, 1, NoticeKind.DELAYED)]
        (again,) = [command for command in middle.pass_time() if isinstance(command, commands.SendHop)]
        assert isinstance(again.message, HopForward)
        sent = again.message
    done = middle.say(HIGH, HopNotice(MOST_TRIES, NoticeKind.DECLINED))
    assert notices(done) == [(LOW, 1, NoticeKind.DECLINED)] and outcomes(done) == [HopOutcome.DECLINED]
    assert commands.RemoveHop(hop) in done and middle.carrier.is_quiet


def test_a_lane_that_declines_rests_a_little_longer_each_time() -> None:
    middle = Middle()
    sent = middle.leave(middle.arrive())
    middle.say(HIGH, HopNotice(sent.number, NoticeKind.DECLINED))
    assert middle.carrier.next_s == middle.now_s + 1.0
    middle.pass_time()
    middle.say(HIGH, HopNotice(2, NoticeKind.DECLINED))
    assert middle.carrier.next_s == middle.now_s + 2.0


def test_a_silent_holder_loses_its_lane_and_what_it_was_waited_for_is_known() -> None:
    middle = Middle()
    middle.leave(middle.arrive())
    while middle.carrier.down:
        done = middle.pass_time()
    (closed,) = [command for command in done if isinstance(command, commands.CloseLane)]
    assert closed.fault is None and FIRST_PATIENCE_S <= closed.silent_s < FIRST_PATIENCE_S + 1
    assert not middle.carrier.down and middle.carrier.hops[100].state is HopState.READY


def test_a_holder_that_is_only_slow_gets_longer_the_next_time() -> None:
    stage = StageTerms(0, 3, TOKENS, VALUES, 4)
    first, again = (DownLane.opened(1, BOB.peer_id, 2, stage, waited_s) for waited_s in (0.0, 30.0))
    assert again.patience_s == first.patience_s + 30.0, "not without end"
    first.note_answer(20.0, 0.0)
    assert first.patience_s == 60.0, "from its first answer on, by its answers"
    first.note_answer(2000.0, 0.0)
    assert first.patience_s == again.patience_s


def test_patience_follows_the_usual_answer_and_a_delay_lengthens_it() -> None:
    middle = Middle(stage=0)
    middle.carrier.may_begin = True
    middle.take(events.TimePassed())
    first, second = middle.carrier.hops
    for hop in (first, second):
        middle.take(events.TrainerReplied(Forwarded(hop)))
    middle.now_s += 4.0
    middle.say(HIGH, *answer(1))
    lane = middle.carrier.down[HIGH]
    assert lane.usual_s == 4.0 and lane.patience_s == 12.0
    assert middle.carrier.next_s == middle.now_s - 4.0 + 12.0
    for number in range(1, MOST_DELAYS * 2 + 2):
        middle.say(HIGH, HopNotice(2, NoticeKind.DELAYED))
        assert middle.carrier.next_s == middle.now_s - 4.0 + 12.0 * (1 + min(number, MOST_DELAYS * 2)), "not for ever"


def test_a_lower_holder_that_withdraws_a_hop_frees_all_of_it() -> None:
    middle = Middle()
    hop = middle.arrive()
    middle.leave(hop)
    done = middle.say(LOW, HopNotice(1, NoticeKind.WITHDRAWN))
    assert notices(done) == [(HIGH, 1, NoticeKind.WITHDRAWN)] and outcomes(done) == [HopOutcome.WITHDRAWN]
    assert middle.carrier.is_quiet
    assert middle.say(HIGH, *answer(1)) == [commands.HearClock(HIGH, 7)], "an answer that crossed the notice is read and dropped"
    assert middle.say(LOW, HopNotice(1, NoticeKind.WITHDRAWN)) == []


def test_a_hop_may_be_withdrawn_in_the_middle_of_its_bytes() -> None:
    middle = Middle()
    middle.say(LOW, HopForward(1, NAME, False, 0), chunks_of_forward()[0], HopNotice(1, NoticeKind.WITHDRAWN))
    assert middle.carrier.is_quiet
    middle.arrive(2)


def test_a_hop_may_be_withdrawn_in_the_middle_of_its_answer() -> None:
    middle = Middle()
    hop = middle.arrive()
    middle.leave(hop)
    middle.say(HIGH, HopAnswer(1, 2.5, 2, 7), Chunk(Part.GRADIENT, 0, bytes(10)))
    middle.say(LOW, HopNotice(1, NoticeKind.WITHDRAWN))
    assert middle.say(HIGH, Chunk(Part.GRADIENT, 10, bytes(VALUES - 10))) == []
    assert middle.carrier.down[HIGH].incoming is None


def test_the_late_reply_about_a_hop_that_is_withdrawn_leaves_no_file() -> None:
    middle = Middle()
    hop = middle.arrive()
    assert commands.RemoveHop(hop) in middle.say(LOW, HopNotice(1, NoticeKind.WITHDRAWN))
    assert middle.take(events.TrainerReplied(Forwarded(hop))) == [commands.RemoveHop(hop)]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_micro_batch_that_was_added_or_is_under_way_is_declined(is_over: bool) -> None:
    last = Middle(stage=2)
    hop = last.arrive()
    if is_over:
        last.take(events.TrainerReplied(Returned(hop, 2.0)))
        last.take(events.HopSent(hop))
    done = last.say(LOW, HopForward(2, NAME, False, 0))
    assert notices(done) == [(LOW, 2, NoticeKind.KNOWN)]
    assert not [command for command in last.say(LOW, *chunks_of_forward()) if isinstance(command, commands.StoreChunk)], (
        "its bytes are dropped"
    )


def test_a_micro_batch_that_the_trainer_may_have_added_is_declined() -> None:
    last = Middle(stage=2)
    hop = last.arrive()
    assert notices(last.take(events.HopLost(hop))) == [(LOW, 1, NoticeKind.DECLINED)]
    assert notices(last.say(LOW, HopForward(2, NAME, False, 0))) == [(LOW, 2, NoticeKind.KNOWN)]


def test_a_micro_batch_that_is_known_above_is_given_up_at_once_and_the_lane_rests() -> None:
    middle = Middle()
    sent = middle.leave(middle.arrive())
    done = middle.say(HIGH, HopNotice(sent.number, NoticeKind.KNOWN))
    assert notices(done) == [(LOW, 1, NoticeKind.KNOWN)] and outcomes(done) == [HopOutcome.DECLINED]
    assert not middle.carrier.down[HIGH].credit(middle.now_s), "a liar costs one micro-batch in a second at most"


def test_a_micro_batch_that_one_holder_knows_goes_to_one_that_was_not_asked() -> None:
    middle = Middle()
    hop = middle.arrive()
    sent = middle.leave(hop)
    middle.take(events.LaneOpened(DownLane.opened(3, ALICE.peer_id, 2, middle.carrier.stage)))
    done = middle.say(HIGH, HopNotice(sent.number, NoticeKind.KNOWN))
    (again,) = [command for command in done if isinstance(command, commands.SendHop)]
    assert again.lane == 3 and notices(done) == [(LOW, 1, NoticeKind.DELAYED)]


def test_held_out_text_may_come_again() -> None:
    last = Middle(stage=2)
    hop = last.arrive(measure=True)
    (sent,) = last.take(events.TrainerReplied(Returned(hop, 2.0)))
    assert isinstance(sent, commands.SendHop) and sent.files == ()
    last.take(events.HopSent(hop))
    last.arrive(2, measure=True)


def test_without_a_next_stage_hops_are_declined_and_lower_holders_soon_look_elsewhere() -> None:
    middle = Middle()
    hop = middle.arrive()
    middle.leave(hop)
    middle.take(events.LaneGone(HIGH))
    assert notices(middle.say(LOW, HopForward(2, b"m" * 16, False, 0), *chunks_of_forward())) == [(LOW, 2, NoticeKind.DECLINED)]
    assert middle.carrier.next_s == middle.now_s + NOBODY_ABOVE_S
    done = middle.pass_time()
    assert commands.CloseLane(LOW, "nobody holds the next stage") in done and middle.carrier.is_quiet


def test_a_driver_keeps_its_hops_until_the_next_stage_is_back() -> None:
    driver = Middle(stage=0)
    driver.carrier.may_begin = True
    driver.take(events.TimePassed())
    first, second = driver.carrier.hops
    driver.take(events.TrainerReplied(Forwarded(first)))
    driver.take(events.LaneGone(HIGH))
    driver.take(events.TrainerReplied(Forwarded(second)))
    driver.pass_time()
    assert [hop.state for hop in driver.carrier.hops.values()] == [HopState.READY] * 2
    done = driver.take(events.LaneOpened(DownLane.opened(3, BOB.peer_id, 2, driver.carrier.stage)))
    assert [command.hop for command in done if isinstance(command, commands.SendHop)] == [first, second]


def test_a_holder_that_stops_answers_what_is_under_way_and_takes_nothing_new() -> None:
    middle = Middle()
    hop = middle.arrive()
    middle.take(events.HopsStopped())
    assert notices(middle.say(LOW, HopForward(2, b"m" * 16, False, 0), *chunks_of_forward())) == [(LOW, 2, NoticeKind.DECLINED)]
    sent = middle.leave(hop)
    assert middle.say(HIGH, *answer(sent.number))[-1] == commands.AskForHop(backward(hop))


def test_a_file_that_the_trainer_has_lost_ends_the_hop_on_both_sides() -> None:
    middle = Middle()
    hop = middle.arrive()
    middle.leave(hop)
    assert notices(middle.take(events.FileLost(hop))) == [(HIGH, 1, NoticeKind.WITHDRAWN), (LOW, 1, NoticeKind.DECLINED)]


def test_a_file_that_cannot_be_kept_ends_the_hop_and_its_open_request_still_gets_a_reply() -> None:
    middle = Middle()
    hop = middle.arrive()  # the request has gone to the trainer, and the last chunk has found no room
    done = middle.take(events.FileLost(hop))
    assert commands.RemoveHop(hop) in done and notices(done) == [(LOW, 1, NoticeKind.DECLINED)]
    assert middle.take(events.TrainerReplied(Declined(hop, "no such file"))) == [commands.RemoveHop(hop)]
    assert middle.take(events.FileLost(hop)) == [], "a hop that is over"


def test_a_hop_is_declined_where_the_payload_folder_has_no_room_for_it() -> None:
    middle = Middle()
    middle.carrier.free_bytes = TOKENS + 4 * VALUES - 1
    assert notices(middle.say(LOW, HopForward(1, NAME, False, 0), *chunks_of_forward())) == [(LOW, 1, NoticeKind.DECLINED)]
    middle.carrier.free_bytes += 1
    middle.arrive(2)


def test_a_driver_whose_trainer_cannot_begin_a_micro_batch_begins_no_other_before_its_node_says_so() -> None:
    """Each takes a window of its text, and with a full payload folder none goes on."""
    first = Middle(stage=0)
    first.carrier.may_begin = True
    asked = [command.request.hop for command in first.take(events.TimePassed()) if isinstance(command, commands.AskForHop)]
    assert len(asked) == 2, "as many as the lane takes"
    done = [command for hop in asked for command in first.take(events.TrainerReplied(Declined(hop, "No space left on device")))]
    assert outcomes(done) == [HopOutcome.PASSED_OVER] * 2
    assert not any(isinstance(command, commands.AskForHop) for command in done)
    first.carrier.may_begin = True
    assert any(isinstance(command, commands.AskForHop) for command in first.take(events.TimePassed()))


def test_a_holder_of_many_small_micro_batches_grants_no_more_than_a_message_may_hold() -> None:
    last = Middle(stage=1, count=2, in_batch=WINDOW)
    for number in range(1, WINDOW + 10):
        hop = last.arrive(number, number.to_bytes(16, "big"))
        last.take(events.TrainerReplied(Returned(hop, 2.0)))
        last.take(events.HopSent(hop))
    assert last.carrier.capacity.share(1) == WINDOW
    done = last.say(LOW, HopForward(WINDOW + 10, (11).to_bytes(16, "big"), False, 0))
    assert notices(done) == [(LOW, WINDOW + 10, NoticeKind.KNOWN)], "as many names are remembered as may be under way"


def answering(last: Middle, numbers: range) -> list[int]:
    """Have hops arrive at the last stage and leave it as answers that nobody reads; return our numbers of them."""
    hops = []
    for number in numbers:
        hops.append(last.arrive(number, bytes([number]) * 16))
        last.take(events.TrainerReplied(Returned(hops[-1], 2.0)))
    return hops


def test_an_answer_that_is_not_read_holds_its_credit() -> None:
    last = Middle(stage=2)
    last.carrier.capacity.most = 2
    answering(last, range(1, 4))  # the third: the last byte of one answer may have arrived before we know that it has left
    assert "beyond the window of 2" in fault(last.say(LOW, HopForward(4, NAME, False, 0)))
    assert last.carrier.is_quiet


def test_credit_is_free_when_the_answer_has_left() -> None:
    last = Middle(stage=2)
    last.carrier.capacity.most = 2
    for number in range(1, 20):
        (hop,) = answering(last, range(number, number + 1))
        last.take(events.HopSent(hop))


def test_a_lower_holder_that_reads_no_answer_loses_its_lane() -> None:
    last = Middle(stage=2)
    answering(last, range(1, 3))
    done = last.pass_time()
    (closed,) = [command for command in done if isinstance(command, commands.CloseLane)]
    assert closed.lane == LOW and closed.silent_s >= FIRST_PATIENCE_S and last.carrier.is_quiet


def begun(driver: Middle) -> HopForward:
    """Have a driver begin a hop; return what goes to the next stage."""
    driver.carrier.may_begin = True
    driver.take(events.TimePassed())
    return driver.leave(next(iter(driver.carrier.hops)))


def test_who_knows_a_micro_batch_that_was_sent_to_nobody_else_loses_its_lane() -> None:
    driver = Middle(stage=0, count=2)
    sent = begun(driver)
    assert "known" in fault(driver.say(HIGH, HopNotice(sent.number, NoticeKind.KNOWN)))
    assert not driver.carrier.down
    assert all(hop.state in (HopState.READY, HopState.QUEUED) for hop in driver.carrier.hops.values())


def test_a_holder_that_passes_a_lie_on_is_not_to_blame_but_its_lane_rests() -> None:
    driver = Middle(stage=0, count=3)
    sent = begun(driver)
    assert outcomes(driver.say(HIGH, HopNotice(sent.number, NoticeKind.KNOWN))) == [HopOutcome.PASSED_OVER]
    assert not driver.carrier.down[HIGH].credit(driver.now_s) and driver.carrier.down[HIGH].credit(driver.now_s + 1.0)


def test_a_lane_earns_its_window_by_answers() -> None:
    lane = DownLane.opened(1, BOB.peer_id, 1024, StageTerms(0, 2, TOKENS, VALUES, 4))
    assert lane.credit(0.0) == 2
    lane.note_answer(1.0, 0.0)
    assert lane.credit(0.0) == 3


def test_a_silent_stranger_is_waited_for_about_as_long_as_its_neighbours_need() -> None:
    middle = Middle()
    first = middle.leave(middle.arrive())
    middle.now_s += 2.0
    middle.say(HIGH, *answer(first.number))
    middle.take(events.LaneOpened(DownLane.opened(3, ALICE.peer_id, 1024, middle.carrier.stage, waited_s=300.0)))
    assert middle.carrier.down[3].patience_s == 20.0 and middle.carrier.down[HIGH].patience_s == 6.0
