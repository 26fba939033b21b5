"""Doubled micro-batches: which hops are, what becomes of their answers, and what a partner whose answers are odd loses."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from gossamer.peer.link.messages import Backward, Forwarded, HopFile, Returned, Unlike, hop_file
from gossamer.peer.pipeline import commands, doubling, events
from gossamer.peer.pipeline.carrier import Carrier
from gossamer.peer.pipeline.commands import AnswersCompared, Command, HopOutcome, SendHop
from gossamer.peer.pipeline.doubling import CLEARED, EVERY, MOST_ODD, Doubling
from gossamer.peer.pipeline.hop import HopState
from gossamer.peer.pipeline.lane import DownLane, UpLane
from gossamer.protocol.identity import Identity, PeerId
from gossamer.protocol.messages.messages import Chunk, HopAnswer, HopForward, HopNotice, Message, NoticeKind, Part
from gossamer.protocol.messages.terms import StageTerms
from tests.peer.pipeline.carriers import World

VALUES, TOKENS = 40, 12
BELOW = 9  # the lane from the stage below


def peer(number: int) -> PeerId:
    return Identity(bytes([number]) * 32).peer_id


class Sender:
    """A carrier with lanes to holders of the next stage, each of a group of its own, whose every hop is doubled."""

    def __init__(self, num_lanes: int, stage: int = 0, count: int = 2, *, doubled: bool = True, seed: int = 1) -> None:
        terms = StageTerms(stage, count, TOKENS, VALUES, in_batch=4)
        self.carrier = Carrier(terms, random.Random(seed), itertools.count(100))
        self.now_s = 1000.0
        for number in range(1, num_lanes + 1):
            self.carrier.doubling.groups[peer(number)] = f"group {number}"
            self.open(number)
        if doubled:
            for number in range(1, num_lanes + 1):
                self.doubt(number)
        if stage:
            self.take(events.LaneOpened(UpLane(BELOW, peer(BELOW), 2)))

    def doubt(self, number: int) -> None:
        """Have one odd answer of a partner."""
        doubling = self.carrier.doubling
        doubling.learn({1: doubling.asked(peer(number))}, 1, "odd", None)

    def take(self, event: events.Event) -> list[Command]:
        return self.carrier.handle(event, self.now_s)

    def say(self, lane: int, *messages: Message) -> list[Command]:
        return [command for message in messages for command in self.take(events.LaneSaid(lane, message))]

    def open(self, number: int) -> None:
        self.take(events.LaneOpened(DownLane.opened(number, peer(number), 8, self.carrier.stage)))

    def start(self) -> list[Command]:
        """Begin as many hops as the lanes have credit for."""
        self.carrier.may_begin = True
        done = self.take(events.TimePassed())
        self.carrier.may_begin = False
        return done

    def receive(self, number: int) -> int:
        """Take a hop from the stage below; return its number here."""
        self.say(
            BELOW,
            HopForward(number, number.to_bytes(16, "big"), False, 5),
            Chunk(Part.TOKENS, 0, bytes(TOKENS)),
            Chunk(Part.ACTIVATIONS, 0, bytes(VALUES)),
        )
        return next(reversed(self.carrier.hops))

    def begin(self) -> int:
        """Begin one hop at the first stage; return its number."""
        done = self.start()
        hop, *others = [command.request.hop for command in done if isinstance(command, commands.AskForHop)]
        for other in others:
            self.take(events.HopLost(other))
        return hop

    def backward(self, hop: int, loss: float = 2.5, copies: tuple[tuple[int, float], ...] = ()) -> Backward:
        """Return the request for the backward pass of a hop that was begun here."""
        return Backward(hop, self.carrier.hops[hop].name.hex(), False, "", 0, loss, copies)

    def forwarded(self, hop: int) -> list[SendHop]:
        return sent(self.take(events.TrainerReplied(Forwarded(hop))))

    def answer(self, to: SendHop, loss: float = 2.5) -> list[Command]:
        return self.say(to.lane, HopAnswer(to.message.number, loss, 8, 7), Chunk(Part.GRADIENT, 0, bytes(VALUES)))


def sent(done: list[Command]) -> list[SendHop]:
    return [command for command in done if isinstance(command, SendHop) and isinstance(command.message, HopForward)]


def asked(done: list[Command]) -> list[object]:
    return [command.request for command in done if isinstance(command, commands.AskForHop)]


def compared(done: list[Command]) -> list[AnswersCompared]:
    return [command for command in done if isinstance(command, AnswersCompared)]


def over(done: list[Command]) -> list[HopOutcome]:
    return [command.outcome for command in done if isinstance(command, commands.HopOver)]


def test_a_copy_is_an_ordinary_hop_with_the_same_bytes_under_another_name() -> None:
    sender = Sender(2)
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    assert first.files == copy.files and first.lane != copy.lane
    assert isinstance(first.message, HopForward) and isinstance(copy.message, HopForward)
    assert first.message.micro_batch != copy.message.micro_batch
    assert asked(sender.answer(copy, 2.0)) == []
    done = sender.answer(first, 3.0)
    assert asked(done) == [sender.backward(hop, 3.0, ((copy.hop, 2.0),))]
    assert hop_file(copy.hop, HopFile.PARTNER_BACKWARD) != hop_file(hop, HopFile.PARTNER_BACKWARD)
    done = sender.take(events.TrainerReplied(Returned(hop, 2.5)))
    assert compared(done) == [AnswersCompared((peer(first.lane), peer(copy.lane)))]
    assert over(done) == [HopOutcome.TRAINED], "it counts once"
    assert {command.hop for command in done if isinstance(command, commands.RemoveHop)} == {hop, copy.hop}
    assert sender.carrier.is_quiet


def test_one_hop_in_many_is_doubled_and_none_that_measures() -> None:
    draws = Doubling(random.Random(3))
    share = sum(draws.is_due(peer(1)) for _ in range(40_000)) / 40_000
    assert share == pytest.approx(1 / EVERY, rel=0.2)
    sender = Sender(2)
    hop = sender.begin()
    assert len(sent(sender.take(events.TrainerReplied(Forwarded(hop, measure=True))))) == 1


def test_a_copy_goes_to_another_sybil_group_or_nowhere() -> None:
    for groups in ({1: "a", 2: "a"}, {1: "a"}, {}):
        sender = Sender(2)
        sender.carrier.doubling.groups = {peer(number): name for number, name in groups.items()}
        sender.doubt(1)
        hop = sender.begin()
        assert len(sender.forwarded(hop)) == 1


def test_a_third_holder_decides_and_the_odd_one_is_named() -> None:
    sender = Sender(3)
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    sender.answer(first), sender.answer(copy)
    (third,) = sent(sender.take(events.TrainerReplied(Unlike(hop, "cosine -1"))))
    assert third.lane not in (first.lane, copy.lane) and third.files == first.files
    assert asked(sender.answer(third)) == [sender.backward(hop, 2.5, ((copy.hop, 2.5), (third.hop, 2.5)))]
    done = sender.take(events.TrainerReplied(Returned(hop, 2.5, odd=copy.hop, evidence="cosine -1")))
    (found,) = compared(done)
    assert (found.odd, found.num_odd, found.evidence) == (peer(copy.lane), 2, "cosine -1")
    assert over(done) == [HopOutcome.TRAINED] and sender.carrier.is_quiet


def test_the_loss_that_goes_on_is_not_that_of_the_odd_answer() -> None:
    sender = Sender(3, stage=1, count=3)
    sender.say(BELOW, HopForward(1, b"n" * 16, False, 5), Chunk(Part.TOKENS, 0, bytes(TOKENS)), Chunk(Part.ACTIVATIONS, 0, bytes(VALUES)))
    first, copy = sender.forwarded(100)
    sender.answer(first, 900.0), sender.answer(copy, 2.0)
    (back,) = [
        command for command in sender.take(events.TrainerReplied(Returned(100, 2.0, odd=100))) if isinstance(command, commands.SendHop)
    ]
    assert isinstance(back.message, HopAnswer) and back.message.loss == 2.0


@pytest.mark.parametrize("stage", [0, 1])
def test_unlike_answers_that_nobody_decides_are_not_used(stage: int) -> None:
    sender = Sender(2, stage, stage + 2)
    if stage:
        sender.say(
            BELOW, HopForward(1, b"n" * 16, False, 5), Chunk(Part.TOKENS, 0, bytes(TOKENS)), Chunk(Part.ACTIVATIONS, 0, bytes(VALUES))
        )
    hop = 100 if stage else sender.begin()
    first, copy = sender.forwarded(hop)
    sender.answer(first), sender.answer(copy)
    done = sender.take(events.TrainerReplied(Unlike(hop, "cosine 0.1")))
    assert compared(done) == [AnswersCompared((peer(first.lane), peer(copy.lane)), evidence="cosine 0.1")]
    assert over(done) == [HopOutcome.DECLINED if stage else HopOutcome.PASSED_OVER] and sender.carrier.is_quiet


def test_the_third_holder_is_asked_once() -> None:
    sender = Sender(3)
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    sender.answer(first), sender.answer(copy)
    (third,) = sent(sender.take(events.TrainerReplied(Unlike(hop, "cosine -1"))))
    done = sender.say(third.lane, HopNotice(third.message.number, NoticeKind.DECLINED))
    assert asked(done) == [sender.backward(hop, 2.5, ((copy.hop, 2.5),))]
    sender.now_s += 100.0
    assert over(sender.take(events.TrainerReplied(Unlike(hop, "cosine -1")))) == [HopOutcome.PASSED_OVER]


@pytest.mark.parametrize("how", ["declined", "lane gone", "overdue", "its file is lost"])
def test_a_copy_that_is_not_answered_is_not_waited_for(how: str) -> None:
    sender = Sender(2, doubled=False)
    sender.carrier.doubling._is_owed = True
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    sender.answer(first)
    assert sender.carrier.hops[hop].state is HopState.BACK
    match how:
        case "declined":
            done = sender.say(copy.lane, HopNotice(copy.message.number, NoticeKind.DECLINED))
        case "lane gone":
            done = sender.take(events.LaneGone(copy.lane))
        case "overdue":
            sender.now_s = sender.carrier.next_s
            done = sender.take(events.TimePassed())
        case _:
            done = sender.take(events.FileLost(copy.hop))
    assert asked(done) == [sender.backward(hop)]
    assert over(sender.take(events.TrainerReplied(Returned(hop, 2.5)))) == [HopOutcome.TRAINED]
    assert sender.carrier.is_quiet


def test_a_hop_that_is_lost_goes_elsewhere_and_its_copy_stays() -> None:
    sender = Sender(3)
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    (again,) = sent(sender.take(events.LaneGone(first.lane)))
    assert again.hop == hop and again.lane not in (first.lane, copy.lane)
    sender.answer(copy)
    assert asked(sender.answer(again)) == [sender.backward(hop, 2.5, ((copy.hop, 2.5),))]


def test_a_hop_that_is_withdrawn_takes_its_copies_with_it() -> None:
    sender = Sender(2, stage=1, count=3)
    sender.say(BELOW, HopForward(1, b"n" * 16, False, 5), Chunk(Part.TOKENS, 0, bytes(TOKENS)), Chunk(Part.ACTIVATIONS, 0, bytes(VALUES)))
    first, copy = sender.forwarded(100)
    done = sender.say(BELOW, HopNotice(1, NoticeKind.WITHDRAWN))
    notices = {(command.lane, command.message.notice) for command in done if isinstance(command, commands.SendNotice)}
    assert notices == {(first.lane, NoticeKind.WITHDRAWN), (copy.lane, NoticeKind.WITHDRAWN)} and sender.carrier.is_quiet


def test_three_odd_answers_and_a_partner_rests() -> None:
    doubts = Doubling(random.Random(1), {peer(number): str(number) for number in range(3)})
    answered = {number + 1: doubts.asked(peer(number)) for number in range(3)}
    found = [doubts.learn(answered, 1, "odd", None) for _ in range(MOST_ODD)]
    assert [(one.num_odd, one.must_rest) for one in found] == [(1, False), (2, False), (3, True)]
    doubts.forgive(peer(0))
    assert doubts.is_due(peer(0)), "it stays in doubt"
    assert doubts.learn(answered, 1, "odd", None).num_odd == 1


def test_a_partner_rests_later_where_more_stages_answer() -> None:
    """An honest one passes on what any of them has answered."""
    doubts = Doubling(random.Random(1), {peer(number): str(number) for number in range(3)}, num_above=2)
    answered = {number + 1: doubts.asked(peer(number)) for number in range(3)}
    found = [doubts.learn(answered, 1, "odd", None).must_rest for _ in range(2 * MOST_ODD)]
    assert found == [False] * (2 * MOST_ODD - 1) + [True]
    assert doubts.is_due(peer(0)), "it is in doubt from its first odd answer on"


def test_like_answers_make_up_for_odd_ones() -> None:
    """A holder that passes a quarter of its hops on to a dishonest one does not rest for it."""
    doubts = Doubling(random.Random(1), {peer(number): str(number) for number in range(2)})
    answered = {1: doubts.asked(peer(0)), 2: doubts.asked(peer(1))}
    for _ in range(6):
        assert not doubts.learn(answered, 1, "odd", None).must_rest
        for _ in range(3):
            doubts.learn(answered, None, "", None)
    for _ in range(CLEARED - 3):
        doubts.learn(answered, None, "", None)
    assert not doubts._doubts, "after enough of them it is in doubt no more"


def test_odd_answers_to_the_hops_of_one_lower_group_rest_nobody() -> None:
    """A lower holder can craft hops on which honest answers differ, and send them again and again, under two keys too."""
    below = {peer(5): "crafts", peer(6): "crafts", peer(7): "honest"}
    doubts = Doubling(random.Random(1), {peer(number): str(number) for number in range(3)} | below)
    answered = {number + 1: doubts.asked(peer(number)) for number in range(3)}
    assert not any(doubts.learn(answered, 1, "odd", peer(5 + n % 2)).must_rest for n in range(4 * MOST_ODD))
    assert doubts.is_due(peer(0)), "it is in doubt nevertheless"
    assert [doubts.learn(answered, 1, "odd", peer(7)).must_rest for _ in range(MOST_ODD)] == [False, False, True]


def test_like_answers_to_one_source_make_up_for_nothing_of_another() -> None:
    """A liar and a lower holder that work together cannot keep the liar from its rest."""
    doubts = Doubling(random.Random(1), {peer(number): str(number) for number in range(8)})
    answered = {number + 1: doubts.asked(peer(number)) for number in range(3)}
    found = []
    for _ in range(MOST_ODD):
        found += [doubts.learn(answered, 1, "odd", peer(source)).must_rest for source in (5, 6)]
        for _ in range(CLEARED - 1):
            doubts.learn(answered, None, "", peer(7))
    assert found == [False] * (2 * MOST_ODD - 1) + [True]


@pytest.mark.parametrize("stage", [0, 1])
def test_the_source_of_a_hop_counts(stage: int) -> None:
    sender = Sender(2, stage, stage + 2)
    found = []
    for number in range(1, 2 * MOST_ODD):
        sender.now_s += 100.0
        hop = sender.receive(number) if stage else sender.begin()
        copies = sender.forwarded(hop)
        odd = next(copy.hop for copy in copies if copy.lane == 1)
        for copy in copies:
            done = sender.answer(copy)
        assert asked(done)
        done = sender.take(events.TrainerReplied(Returned(hop, 2.5, odd=odd, evidence="cosine -1")))
        found += [one.must_rest for one in compared(done)]
        sender.take(events.HopSent(hop))
    assert any(found) is (stage == 0)


def test_a_partner_that_ends_its_lane_before_the_comparison_is_in_doubt() -> None:
    sender = Sender(3, doubled=False)
    sender.carrier.doubling._is_owed = True
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    sender.answer(first), sender.answer(copy)
    sender.take(events.LaneGone(first.lane))
    group = sender.carrier.doubling.groups.pop(peer(first.lane))  # the node groups the partners that have a lane
    (third,) = sent(sender.take(events.TrainerReplied(Unlike(hop, "cosine -1"))))
    sender.answer(third)
    sender.take(events.TrainerReplied(Returned(hop, 2.5, odd=hop, evidence="cosine -1")))
    sender.carrier.doubling.groups[peer(first.lane)] = group
    sender.open(first.lane)
    assert sender.carrier.doubling.is_due(peer(first.lane))


def test_a_group_in_doubt_gets_no_hop_while_nobody_has_credit_for_the_copy() -> None:
    sender = Sender(2, doubled=False)
    sender.doubt(1)
    sender.carrier.down[2].rests_until_s = sender.now_s + 5.0
    assert not asked(sender.start()), "none is begun that could not be sent"
    sender.carrier.down[2].rests_until_s = sender.now_s
    hop = sender.begin()
    sender.carrier.down[2].rests_until_s = sender.now_s + 5.0
    assert not sender.forwarded(hop)
    sender.now_s += 5.0
    assert {one.lane for one in sent(sender.take(events.TimePassed()))} >= {2}


def test_a_retry_at_a_group_in_doubt_has_a_copy_too() -> None:
    sender = Sender(3, doubled=False)
    sender.doubt(1), sender.doubt(2), sender.doubt(3)
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    sender.say(copy.lane, HopNotice(copy.message.number, NoticeKind.DECLINED))
    sender.now_s += 100.0
    again = sent(sender.say(first.lane, HopNotice(first.message.number, NoticeKind.DECLINED)))
    assert len(again) == 2 and again[0].hop == hop and first.lane not in [one.lane for one in again]


def test_a_new_partner_whose_group_is_not_known_yet_may_be_in_doubt() -> None:
    for seed in range(20):
        sender = Sender(3, doubled=False, seed=seed)
        sender.doubt(1)
        del sender.carrier.doubling.groups[peer(3)]
        hops = [sender.forwarded(sender.begin()) for _ in range(2)]  # as many as the lane without doubts has credit for
        assert all(2 in [one.lane for one in sends] and 3 not in [one.lane for one in sends] for sends in hops)


def test_an_answer_of_a_group_that_came_into_doubt_meanwhile_is_compared_first() -> None:
    sender = Sender(2, doubled=False)
    hop = sender.begin()
    (first,) = sender.forwarded(hop)
    sender.doubt(first.lane)
    (copy,) = sent(sender.answer(first))
    assert copy.lane != first.lane and copy.files == first.files
    assert asked(sender.answer(copy)) == [sender.backward(hop, 2.5, ((copy.hop, 2.5),))]


def test_an_answer_in_doubt_that_nobody_can_be_compared_with_now_is_not_used() -> None:
    sender = Sender(2, doubled=False)
    hop = sender.begin()
    (first,) = sender.forwarded(hop)
    sender.doubt(first.lane)
    sender.carrier.down[3 - first.lane].rests_until_s = sender.now_s + 5.0
    done = sender.answer(first)
    assert not asked(done)
    sender.now_s += 5.0
    again = sent(sender.take(events.TimePassed()))[0]
    file = hop_file(hop, HopFile.PARTNER_BACKWARD)
    assert commands.StoreChunk(hop, file, bytes(VALUES), is_first=True) in sender.answer(again), "in place of the other one's"


def test_a_drawn_copy_waits_for_a_lane() -> None:
    sender = Sender(2, doubled=False)
    sender.carrier.doubling._is_owed = True
    sender.carrier.down[2].rests_until_s = sender.now_s + 5.0
    assert len(sender.forwarded(sender.begin())) == 1
    sender.now_s += 5.0
    assert len(sender.forwarded(sender.begin())) == 2
    assert len(sender.forwarded(sender.begin())) == 1


def test_a_hop_that_is_tried_again_does_not_meet_its_own_copy() -> None:
    sender = Sender(2)
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    assert not sent(sender.say(first.lane, HopNotice(first.message.number, NoticeKind.DECLINED)))
    sender.now_s += 2.0
    (again,) = sent(sender.take(events.TimePassed()))
    assert (again.lane, again.hop) == (first.lane, hop)
    sender.answer(copy)
    assert asked(sender.answer(again)) == [sender.backward(hop, 2.5, ((copy.hop, 2.5),))]


def test_a_hop_whose_copy_has_the_last_group_goes_on_without_the_copy() -> None:
    sender = Sender(2)
    hop = sender.begin()
    first, copy = sender.forwarded(hop)
    (again,) = sent(sender.take(events.LaneGone(first.lane)))
    assert (again.lane, again.hop) == (copy.lane, hop)
    assert asked(sender.answer(again)) == [sender.backward(hop)]


def test_a_new_key_of_the_same_group_is_in_doubt_too() -> None:
    doubts = Doubling(random.Random(1), {peer(1): "invite", peer(2): "other"})
    doubts.learn({1: doubts.asked(peer(1)), 2: doubts.asked(peer(2))}, 1, "odd", None)
    doubts.groups = {peer(3): "invite"}
    assert doubts.is_due(peer(3))


def test_a_declined_hop_makes_room_for_another_one() -> None:
    """A driver that keeps what was passed over begins none at last."""
    sender = Sender(1, doubled=False)
    hop = sender.begin()
    (first,) = sender.forwarded(hop)
    for _ in range(3):
        done = sender.say(first.lane, HopNotice(first.message.number, NoticeKind.DECLINED))
        sender.now_s += 100.0
        if again := sent(sender.take(events.TimePassed())):
            (first,) = again
    assert over(done) == [HopOutcome.PASSED_OVER] and sender.carrier.is_quiet


@pytest.mark.parametrize("seed", range(30))
def test_faults_at_any_event_of_doubled_hops(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills, cuts, declines, unlike and odd answers: each holder adds a name once at most, and a world at rest keeps no hop and no file."""
    monkeypatch.setattr(doubling, "EVERY", 2)
    world = World(3, 3, seed)
    rng = random.Random(f"doubled {seed}")
    for holder in world.holders:
        holder.unlike, holder.odd, holder.declines = 0.3, 0.3, 0.02
    for _ in range(6):
        victim = rng.choice(world.holders)
        wires = list(victim.wires.values())
        fault = rng.choice(
            [partial(world.kill, victim), partial(world.kill_trainer, victim), *(partial(world.cut, wire) for wire in wires)]
        )
        world.run_until(world.now_s + 4.0, fault if victim.is_alive else None, world.num_events + rng.randint(1, 400))
    assert sum(holder.num_doubled for holder in world.holders) > 20
    world.run_until_trained(30.0)
    for holder in world.holders:
        holder.take(events.HopsStopped())
    world.run_until(world.now_s + 300.0)
    for holder in world.holders:
        assert holder.carrier.is_quiet and not holder.files and not holder.faults
