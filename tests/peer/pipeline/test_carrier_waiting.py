"""How long a carrier waits for a hop, and how many it takes at once."""

from __future__ import annotations

from gossamer.peer.link.messages import Declined, Forwarded, HopReply, Returned
from gossamer.peer.pipeline import commands, events
from gossamer.peer.pipeline.commands import Command
from gossamer.peer.pipeline.hop import HopState
from gossamer.peer.pipeline.lane import FIRST_PATIENCE_S, LEAST_PATIENCE_S, UpLane
from gossamer.protocol.messages.messages import HopAnswer, HopForward, NoticeKind
from tests.peer.pipeline.test_carrier import (
    HIGH,
    LOW,
    NAME,
    Middle,
    answer,
    chunks_of_forward,
    notices,
)
from tests.protocol.samples import ALICE


def test_a_holder_that_waits_for_a_stranger_above_tells_the_lower_stage_in_time() -> None:
    """A lower holder that knows this one as quick waits for five seconds, and as long again after each notice."""
    middle = Middle()
    middle.leave(middle.arrive())
    began_s = patience_ends_s = middle.now_s
    patience_ends_s += LEAST_PATIENCE_S
    while middle.carrier.down:
        done = middle.pass_time()
        assert middle.now_s < patience_ends_s
        patience_ends_s += LEAST_PATIENCE_S * notices(done).count((LOW, 1, NoticeKind.DELAYED))
    assert middle.now_s - began_s >= FIRST_PATIENCE_S


def test_an_overdue_hop_costs_its_lane_only_where_no_other_is_answered() -> None:
    middle = Middle()
    first, second = (middle.arrive(number, bytes([number]) * 16) for number in (1, 2))
    sent = [middle.leave(hop).number for hop in (first, second)]
    middle.now_s += 1.0
    middle.say(HIGH, *answer(sent[0]))
    closed: list[Command] = []
    while middle.carrier.hops[second].state is HopState.AWAY:
        done = middle.pass_time()
        closed += [command for command in done if isinstance(command, commands.CloseLane)]
    assert (HIGH, sent[1], NoticeKind.WITHDRAWN) in notices(done) and (LOW, 2, NoticeKind.DELAYED) in notices(done)
    assert not closed and not middle.carrier.down[HIGH].credit(middle.now_s), "the lane rests"
    while middle.carrier.down:  # the same hop again, and no other answer
        closed += [command for command in middle.pass_time() if isinstance(command, commands.CloseLane)]
    assert [command.lane for command in closed if isinstance(command, commands.CloseLane)] == [HIGH]


def test_a_micro_batch_whose_lane_has_broken_comes_again_once_the_trainer_has_let_it_go() -> None:
    last = Middle(stage=2)
    hop = last.arrive()
    last.take(events.LaneGone(LOW))
    last.take(events.LaneOpened(UpLane(LOW, ALICE.peer_id, 2)))
    done = last.say(LOW, HopForward(1, NAME, False, 0), *chunks_of_forward())
    assert notices(done) == [(LOW, 1, NoticeKind.DECLINED)], "not KNOWN, which would make the lower stage give it up"
    last.take(events.TrainerReplied(Declined(hop, "its files are gone")))
    last.arrive(2)


def test_a_starving_trainer_is_granted_more_and_a_full_one_less() -> None:
    last = Middle(stage=2)
    for number in range(1, 4):
        hop = last.arrive(number, bytes([number]) * 16)
        (sent,) = last.take(events.TrainerReplied(Returned(hop, 2.0)))
        assert isinstance(sent, commands.SendHop) and isinstance(sent.message, HopAnswer)
        assert sent.message.window == 2 + number
        last.take(events.HopSent(hop))
    hops = [last.arrive(number, bytes([number]) * 16) for number in range(4, 9)]
    (sent,) = last.take(events.TrainerReplied(Returned(hops[0], 2.0)))
    assert isinstance(sent, commands.SendHop) and isinstance(sent.message, HopAnswer) and sent.message.window == 4


def test_a_driver_has_at_most_two_batches_on_their_way() -> None:
    driver = Middle(stage=0)
    driver.carrier.down[HIGH].window = driver.carrier.down[HIGH].answers = 100
    driver.carrier.may_begin = True
    driver.take(events.TimePassed())
    assert len(driver.carrier.hops) == 8


def test_a_driver_begins_no_micro_batch_of_the_batch_after_next_before_its_step() -> None:
    """A micro-batch that is back makes no room before the step. A partner that keeps a whole batch does not stop the driver."""
    driver = Middle(stage=0)
    driver.carrier.down[HIGH].window = driver.carrier.down[HIGH].answers = 100
    driver.carrier.may_begin = True
    driver.take(events.TimePassed())
    sent = {hop: driver.leave(hop).number for hop in list(driver.carrier.hops)}
    kept, hops = list(sent)[:4], list(sent)[4:]

    def begun_after(hop: int, reply: HopReply) -> int:
        assert driver.say(HIGH, *answer(sent[hop], window=100))[-1] == commands.AskForHop(driver.carrier.hops[hop].backward(""))
        return sum(isinstance(command, commands.AskForHop) for command in driver.take(events.TrainerReplied(reply)))

    for gathered, hop in enumerate(hops[:3], 1):
        assert begun_after(hop, Returned(hop, 2.5, num_gathered=gathered)) == 0
    assert begun_after(hops[3], Returned(hops[3], 2.5)) == 4, "the batch is whole, and the trainer steps first"
    assert begun_after(kept[0], Returned(kept[0], 2.5, num_gathered=1)) == 0
    assert begun_after(kept[1], Declined(kept[1], "too late")) == 1
    done = driver.take(events.TrainerReplied(Forwarded(max(driver.carrier.hops), measure=True, num_gathered=1)))
    assert sum(isinstance(command, commands.AskForHop) for command in done) == 1, "held-out text is no part of a batch"
    assert begun_after(kept[2], Returned(kept[2], 2.5, num_gathered=2)) == 0
