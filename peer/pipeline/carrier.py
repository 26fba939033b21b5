"""All hops of one holder as a state machine: events in, commands out; no I/O, no clock, no tensors.

Each side of a hop knows its neighbour only. Who breaks off is replaced by the side that sent to it, from bytes that this side still has: a
hop that is lost or declined above goes to another lane, MOST_TRIES times in all; then it is declined, and no stage below tries it again.
A holder adds the gradient of a micro-batch at most once. Across stages nothing is exactly once: if a path breaks, higher stages may have
added what lower ones have not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from gossamer.peer.link.messages import Begin, Declined, Forward, Forwarded, HopFile, HopReply, Returned, Unlike, hop_file
from gossamer.peer.pipeline import commands, events
from gossamer.peer.pipeline.commands import Command, HopOutcome
from gossamer.peer.pipeline.doubling import MOST_ANSWERS, Doubling
from gossamer.peer.pipeline.hop import AT_TRAINER, Away, Hop, HopSource, HopState, arriving_parts
from gossamer.peer.pipeline.lane import DownLane, Incoming, UpLane, typical_step
from gossamer.peer.pipeline.routing import Capacity, compare
from gossamer.protocol.errors import BadMessage, PeerMisbehaved
from gossamer.protocol.limits import MICRO_BATCH_BYTES, WINDOW
from gossamer.protocol.messages.messages import Chunk, HopAnswer, HopForward, HopNotice, Message, NoticeKind, Part
from gossamer.protocol.messages.terms import StageTerms
from gossamer.protocol.newest import keep_newest

MOST_TRIES = 3  # of one hop, at one stage
NAMES_KEPT = WINDOW  # micro-batches that were added here: as many as may be under way
NOBODY_ABOVE_S = 5.0  # without a lane to the next stage, hops and lanes of lower holders are kept for so long
MOST_DELAYS = 2 * MOST_TRIES - 1  # of one try, for each stage above: one while each of its tries lasts, and one between two


class InvalidHopEvent(AssertionError):
    """An event that cannot happen: our own bug."""


class Carrier:
    """The hops and lanes of one holder.

    Feed `handle` every event in order, and carry out the commands that it returns, in order, before the next event. `next_s` is when to
    call it with TimePassed. Not thread-safe; holds no resources. `numbers` gives each hop a number that no earlier node has used.
    """

    def __init__(self, stage: StageTerms, rng: random.Random, numbers: Iterator[int]) -> None:
        self.stage = stage
        self.hops: dict[int, Hop] = {}  # that are not over, the oldest first
        self.up: dict[int, UpLane] = {}
        self.down: dict[int, DownLane] = {}
        self.global_step = 0  # this peer's, for its neighbours
        self.may_begin = False  # at stage 0: own trainer trains
        self.free_bytes: float = math.inf  # of the payload folder
        self.num_late = 0  # answers that did not come in time
        self.capacity = Capacity(min(WINDOW, stage.most_hops))
        self.doubling = Doubling(rng, num_above=stage.num_above)
        self._rng = rng
        self._numbers = numbers
        self._added: dict[bytes, None] = {}  # names, the newest last
        self._lost: dict[int, bytes] = {}  # hops that are over, whose request to the trainer is open: the name that it may add, or nothing
        self._num_gathered = 0  # at stage 0: micro-batches in the gradient of own trainer's next step
        self._is_stopping = False
        self._nobody_above_since_s: float | None = None
        self._now_s = -math.inf
        self._commands: list[Command] = []

    @property
    def is_quiet(self) -> bool:
        """Whether no hop is under way."""
        return not self.hops

    @property
    def is_complete(self) -> bool:
        """Whether a hop that arrives here can reach the last stage, as far as this holder sees."""
        return self.stage.is_last or bool(self.down)

    @property
    def window(self) -> int:
        """Return what to grant on one more lane from the lower stage."""
        return self.capacity.share(len(self.up) + 1)

    @property
    def next_s(self) -> float:
        """Return when TimePassed is due; infinite while nothing waits for time."""
        times = [hop.next_s for hop in self.hops.values()]
        times += [lane.overdue_s() for lane in self.up.values()]
        if any(hop.state is HopState.READY for hop in self.hops.values()) or self.may_begin:
            times += [lane.rests_until_s for lane in self.down.values() if lane.rests_until_s > self._now_s]
        if self._nobody_above_since_s is not None:
            times.append(self._nobody_above_since_s + NOBODY_ABOVE_S)
        return min(times, default=math.inf)

    def handle(self, event: events.Event, now_s: float) -> list[Command]:
        """Take in one event and return what must be done now, in order. A partner's fault closes its lane. `now_s`: a monotonic clock."""
        self._now_s = now_s
        match event:
            case events.LaneOpened(UpLane() as lane):
                self.up[lane.number] = lane
            case events.LaneOpened(DownLane() as lane):
                self.down[lane.number] = lane
                compare(self.down.values())
                self._nobody_above_since_s = None
            case events.LaneSaid(number, message):
                self._hear(number, message)
            case events.LaneGone(number):
                self._lose_lane(number)
            case events.TrainerReplied(reply):
                self._take_reply(reply)
            case events.HopLost(number):
                self._lose_trainer(number)
            case events.FileLost(number):
                self.may_begin = False  # until the node says so: the next one has no better luck now
                if (hop := self.hops.get(number)) is not None:
                    self._give_up(hop, "its files cannot be kept, or are gone")
            case events.HopSent(number):
                if (hop := self.hops.get(number)) is not None and hop.state is HopState.ANSWERING:
                    self._end(hop, HopOutcome.ANSWERED)
            case events.TimePassed():
                self._look_at_time()
            case events.HopsStopped(is_final):
                self._stop(is_final=is_final)
        self._send_ready()
        self._begin()
        done, self._commands = self._commands, []
        return done

    def _do(self, command: Command) -> None:
        self._commands.append(command)

    def _hear(self, number: int, message: Message) -> None:
        lane = self.up.get(number) or self.down.get(number)
        try:
            match lane, message:
                case None, _:
                    return
                case UpLane(), HopForward():
                    self._take_hop(lane, message)
                case DownLane(), HopAnswer():
                    self._take_answer(lane, message)
                case ((UpLane() | DownLane()), Chunk()):
                    self._take_chunk(lane, message)
                case UpLane(), HopNotice(notice=NoticeKind.WITHDRAWN):
                    self._withdraw_by_partner(lane, message.number)
                case DownLane(), HopNotice(notice=(NoticeKind.DECLINED | NoticeKind.KNOWN) as notice):
                    self._take_decline(lane, message.number, is_known=notice is NoticeKind.KNOWN)
                case DownLane(), HopNotice(notice=NoticeKind.DELAYED):
                    self._allow_longer(lane, message.number)
                case _:
                    raise BadMessage(f"a {type(message).__name__} out of turn")
        except PeerMisbehaved as error:
            self._do(commands.CloseLane(number, str(error), error))
            self._lose_lane(number)

    # ------------------------------------------------------------------ from the lower stage

    def _take_hop(self, lane: UpLane, forward: HopForward) -> None:
        lane.accept(forward.number)
        lane.active_s, lane.global_step = self._now_s, forward.global_step
        self._do(commands.HearClock(lane.number, forward.global_step))
        number, source = next(self._numbers), HopSource(lane, forward.number)
        hop = self.hops[number] = Hop(number, forward.micro_batch, source, HopState.ARRIVING, measure=forward.measure)
        lane.unanswered[forward.number] = number
        lane.incoming = Incoming(forward.number, arriving_parts(number, self.stage), number, self._now_s)
        if reason := self._why_not(hop):
            self._end(hop, HopOutcome.DECLINED, reason)

    def _why_not(self, hop: Hop) -> str:
        """Return why a hop that arrives is not carried out; empty if it is."""
        if self._is_stopping:
            return "leaving"
        under_way = (other.name for other in self.hops.values() if other is not hop)
        hop.is_known = hop.name in self._added or hop.name in under_way
        if hop.is_known or hop.name in self._lost.values():  # of these own trainer may add some: the lower stage asks again
            return "this micro-batch is here already"
        if self.free_bytes < self.stage.files_bytes:
            return "the payload folder has too little room"
        return "" if self.is_complete else "nobody holds the next stage"

    def _withdraw_by_partner(self, lane: UpLane, number: int) -> None:
        if lane.incoming is not None and lane.incoming.number == number:
            lane.incoming = None
        if (hop := lane.unanswered.get(number)) is not None:
            self._end(self.hops[hop], HopOutcome.WITHDRAWN)

    def _take_chunk(self, lane: UpLane | DownLane, chunk: Chunk) -> None:
        incoming = lane.incoming
        if incoming is None:
            raise BadMessage("a chunk that no hop expects")
        file = incoming.take(chunk, self._now_s)
        if incoming.is_complete:
            lane.incoming = None
        hop = None if incoming.hop is None else self.hops[incoming.hop]
        if hop is None:
            return
        self._do(commands.StoreChunk(hop.number, file, chunk.data, is_first=chunk.offset == 0))
        if incoming.is_complete and isinstance(lane, UpLane):
            hop.state = HopState.QUEUED
            lower_step = typical_step(self.up.values(), self.doubling.groups)
            self._do(commands.AskForHop(Forward(hop.number, hop.name.hex(), hop.measure, lower_step, self.doubling.source(hop))))
        elif incoming.is_complete:
            self._go_back(hop)

    # ------------------------------------------------------------------ own trainer

    def _take_reply(self, reply: HopReply) -> None:
        if reply.hop in self._lost:
            self._forget_lost(reply.hop, is_added=isinstance(reply, Returned))
            return
        hop = self.hops[reply.hop]
        if isinstance(reply, Forwarded | Returned):
            self.global_step, self._num_gathered = max(self.global_step, reply.global_step), reply.num_gathered
        if isinstance(reply, Returned) and reply.opposed and hop.sent_by is not None:
            self._do(commands.SourceOpposed(hop.sent_by, reply.opposed))
        match hop.state, reply:
            case HopState.QUEUED, Forwarded() if not self.stage.is_last:
                hop.state, hop.own_steps = HopState.READY, reply.own_steps
                hop.measure |= hop.source is None and reply.measure
            case HopState.QUEUED, Returned(loss=loss) if self.stage.is_last:
                hop.loss = loss
                self._answer(hop)
            case HopState.BACKWARD, Returned(loss=loss, odd=odd, evidence=evidence):
                hop.loss = loss
                if hop.copies:
                    self._do(self.doubling.learn(hop.answered, odd, evidence, hop.sent_by))
                    self._end_copies(hop)
                self._answer(hop)
            case HopState.BACKWARD, Unlike(evidence=evidence):
                self._ask_one_more(hop, evidence)
            case ((HopState.QUEUED | HopState.BACKWARD), Declined(reason=reason)):
                self.may_begin &= hop.state is HopState.BACKWARD or hop.source is not None  # else until the node says so, as in FileLost
                hop.state = HopState.READY  # no request is open any more
                self._give_up(hop, reason)
            case _:
                raise InvalidHopEvent(f"{reply} in {hop.state.name}")

    def _lose_trainer(self, number: int) -> None:
        """Give a hop up whose gradient the trainer may have added; begin no other before the node says so."""
        self.may_begin = False
        if (hop := self.hops.get(number)) is not None:
            if hop.state not in AT_TRAINER:
                raise InvalidHopEvent(f"no request is open in {hop.state.name}")
            self._give_up(hop, "the trainer went away")
        self._forget_lost(number, is_added=True)

    def _forget_lost(self, number: int, *, is_added: bool) -> None:
        """Note that the request of a hop that is over is closed; the trainer may have written a file after the hop's end."""
        name = self._lost.pop(number)
        if is_added:
            self._note_added(name)
        self._do(commands.RemoveHop(number))

    def _note_added(self, name: bytes) -> None:
        if name:
            keep_newest(self._added, name, None, NAMES_KEPT)

    def _answer(self, hop: Hop) -> None:
        """Send the gradient to the lower stage; at stage 0 the hop is over."""
        self._note_added(hop.addable(self.stage))
        hop.state = HopState.ANSWERING
        if hop.source is None:
            self._end(hop, HopOutcome.MEASURED if hop.measure else HopOutcome.TRAINED)
            return
        assert hop.loss is not None, "only an answer, or the last stage, brings a hop here"
        lane, number = hop.source.lane, hop.source.number
        self.capacity.note_answer(sum(other.state in (HopState.READY, *AT_TRAINER) for other in self.hops.values()))
        window = lane.grant(self.capacity.share(sum(other.is_active(self._now_s) for other in self.up.values())))
        lane.num_answering += 1
        hop.unread_s = self._now_s + lane.answer_patience_s(self.stage.value_bytes)
        gradient = (Part.GRADIENT, hop_file(hop.number, HopFile.OWN_BACKWARD), self.stage.value_bytes)
        answer = HopAnswer(number, hop.loss, window, self.global_step)
        self._do(commands.SendHop(lane.number, hop.number, answer, () if hop.measure else (gradient,)))

    # ------------------------------------------------------------------ to the next stage

    def _begin(self) -> None:
        """At stage 0, have own trainer begin as many hops as the lanes have credit for, two batches at most.

        One of the batch after next waits for the trainer's step, as its gradient would be two steps late.
        """
        if not self.stage.is_first or self._is_stopping or not self.may_begin:
            return
        credit = self.doubling.credit(self.down.values(), self._now_s)
        num_waiting = sum(hop.state in (HopState.QUEUED, HopState.READY) for hop in self.hops.values())
        num_to_add = self._num_gathered + sum(hop.copy_of is None and not hop.measure for hop in self.hops.values())
        for _ in range(min(credit - num_waiting, self.capacity.most - len(self.hops), self.stage.most_hops - num_to_add)):
            number = next(self._numbers)
            hop = self.hops[number] = Hop(number, self._rng.randbytes(MICRO_BATCH_BYTES), None, HopState.QUEUED)
            self._do(commands.AskForHop(Begin(hop.number, hop.name.hex())))

    def _send_ready(self) -> None:
        """Send the hops whose output is there, the oldest first, as far as lanes have credit."""
        for hop in [hop for hop in self.hops.values() if hop.state is HopState.READY]:
            if not self.doubling.without_copies(hop, self.down.values()):
                self._end_copies(hop)
            for lane in self.doubling.choose(hop, self.down.values(), self._now_s):
                self._send(hop if hop.away is None else self._copied(hop), lane)

    def _send(self, hop: Hop, lane: DownLane) -> None:
        hop.state, hop.tries, original = HopState.AWAY, hop.tries + 1, hop.original
        original.tried.add(lane.number)
        hop.away, hop.asked = Away(lane, lane.send(hop.number), self._now_s), self.doubling.asked(lane.partner)
        if original.source is not None:
            hop.away.notice_s = self._now_s + lane.notice_s
        forward = HopForward(hop.away.number, hop.name, hop.measure, self.global_step)
        self._do(commands.SendHop(lane.number, hop.number, forward, original.parts(self.stage)))

    def _take_answer(self, lane: DownLane, answer: HopAnswer) -> None:
        number, measured = lane.take_answer(answer.number, answer.window)
        self._do(commands.HearClock(lane.number, answer.global_step))
        hop = None if number is None else self.hops[number]
        if hop is not None:
            hop.state, hop.loss, measured = HopState.RETURNING, answer.loss, hop.measure
        if measured:
            if hop is not None:
                self._go_back(hop)
            return
        file = "" if hop is None else hop_file(hop.number, HopFile.PARTNER_BACKWARD)
        lane.incoming = Incoming(answer.number, ((Part.GRADIENT, file, self.stage.value_bytes),), number, self._now_s)

    def _go_back(self, hop: Hop) -> None:
        """Go on with a hop whose answer is complete."""
        assert hop.away is not None and hop.loss is not None
        hop.away.lane.note_answer(self._now_s - hop.away.sent_s, self._now_s)
        compare(self.down.values())
        hop.away, hop.state = None, HopState.BACK
        if hop.measure and hop.source is not None:
            self._answer(hop)
            return
        self._compute_if_back(hop.original)

    def _compute_if_back(self, hop: Hop) -> None:
        """Have the trainer compute backward once the answers to a hop and its copies are here, and may be used."""
        if not hop.are_all_back:
            return
        if self.doubling.may_use(hop, self.down.values()):
            hop.state = HopState.BACKWARD
            self._do(commands.AskForHop(hop.backward(self.doubling.source(hop))))
        elif not self._ask_another(hop):
            self._try_again(hop, "its holder is in doubt, and no other one has answered")

    def _copied(self, hop: Hop) -> Hop:
        copy = hop.copied(next(self._numbers), self._rng.randbytes(MICRO_BATCH_BYTES))
        self.hops[copy.number] = copy
        return copy

    def _ask_another(self, hop: Hop) -> bool:
        """Send a copy of a hop that is answered to one more group; return whether a lane that was not tried has credit."""
        fresh = [lane for lane in self.down.values() if lane.number not in hop.tried]
        lane = self.doubling.other_lane(list(hop.answered.values()), fresh, (), self._now_s)
        if lane is not None:
            self._send(self._copied(hop), lane)
            self._delay(hop)
        return lane is not None

    def _drop_copy(self, copy: Hop) -> None:
        """Go on without a copy that was not answered."""
        hop = copy.original
        hop.copies.remove(copy)
        self._end(copy, HopOutcome.WITHDRAWN)
        self._compute_if_back(hop)

    def _end_copies(self, hop: Hop) -> None:
        for copy in hop.copies:
            self._end(copy, HopOutcome.WITHDRAWN)
        hop.copies.clear()

    def _ask_one_more(self, hop: Hop, evidence: str) -> None:
        """Let a third group decide between unlike answers; without one, give the hop up."""
        hop.state = HopState.BACK
        partners = tuple(one.partner for one in hop.answered.values())
        if len(partners) >= MOST_ANSWERS or not self._ask_another(hop):
            self._do(commands.AnswersCompared(partners, evidence=evidence))
            self._give_up(hop, "holders of the next stage answer it in unlike ways")

    def _take_decline(self, lane: DownLane, number: int, *, is_known: bool) -> None:
        """Try a declined hop again, except where it is known to every holder that could be asked: there no try helps."""
        declined = lane.take_decline(number, self._now_s)
        if declined is None:
            return
        hop = self.hops[declined]
        if is_known and hop.is_fresh and self.stage.num_above == 1:  # holders between us and a liar are not to blame
            raise BadMessage(f"hop {number} known, which nobody else has been sent")
        if is_known and all(other in hop.tried for other in self.down):
            hop.is_known, hop.away = True, None
            self._give_up(hop, "the next stage has this micro-batch already")
        else:
            self._try_again(hop, "declined by the next stage")

    def _allow_longer(self, lane: DownLane, number: int) -> None:
        """Wait longer for a hop that is tried again above, and have the lower stage wait too; not for ever."""
        hop = self.hops.get(lane.unanswered.get(number, -1))
        if hop is None or hop.away is None or hop.away.delays >= MOST_DELAYS * self.stage.num_above:
            return
        hop.away.delays += 1
        self._delay(hop)

    def _delay(self, hop: Hop) -> None:
        source, is_told = hop.original.source, hop.copy_of is not None and hop.copy_of.away is not None
        if source is not None and not is_told:
            self._do(commands.SendNotice(source.lane.number, HopNotice(source.number, NoticeKind.DELAYED)))

    def _try_again(self, hop: Hop, reason: str) -> None:
        """Send a hop to another holder, or give it up."""
        hop.away, hop.state, hop.loss = None, HopState.READY, None
        if hop.copy_of is not None:
            self._drop_copy(hop)
        elif hop.tries >= MOST_TRIES or (self._is_stopping and hop.source is None):  # one that leaves waits for no other answer
            self._give_up(hop, reason)
        else:
            self._delay(hop)

    def _stop(self, *, is_final: bool) -> None:
        """Begin nothing, and end what has not left stage 0."""
        self.may_begin = False
        self._is_stopping |= is_final
        for hop in [hop for hop in self.hops.values() if hop.source is None and hop.state in (HopState.QUEUED, HopState.READY)]:
            self._end(hop, HopOutcome.WITHDRAWN)

    def _give_up(self, hop: Hop, reason: str) -> None:
        if hop.copy_of is not None:
            self._drop_copy(hop)
        else:
            self._end(hop, HopOutcome.PASSED_OVER if hop.source is None else HopOutcome.DECLINED, reason)

    def _end(self, hop: Hop, outcome: HopOutcome, reason: str = "") -> None:
        """End a hop and its copies: release their lanes, their trainer and their files."""
        self._end_copies(hop)
        if hop.away is not None:
            self._withdraw(hop, hop.away)
        if hop.state in AT_TRAINER:
            self._lost[hop.number] = hop.addable(self.stage)
        if hop.source is not None:
            self._release(hop, hop.source, outcome)
        hop.state = HopState.OVER
        del self.hops[hop.number]
        self._do(commands.RemoveHop(hop.number))
        if hop.copy_of is None:
            self._do(commands.HopOver(hop.number, outcome, hop.tries, hop.loss, reason))

    def _withdraw(self, hop: Hop, away: Away) -> None:
        hop.away = None
        away.lane.withdraw(away.number, measure=hop.measure)
        if away.lane.number in self.down:
            self._do(commands.SendNotice(away.lane.number, HopNotice(away.number, NoticeKind.WITHDRAWN)))

    def _release(self, hop: Hop, source: HopSource, outcome: HopOutcome) -> None:
        lane = source.lane
        lane.release(source.number, is_answering=hop.state is HopState.ANSWERING, is_answered=outcome is HopOutcome.ANSWERED)
        if lane.incoming is not None and lane.incoming.hop == hop.number:
            lane.incoming.hop = None  # the rest of the bytes still comes
        if outcome is HopOutcome.DECLINED and lane.number in self.up:
            kind = NoticeKind.KNOWN if hop.is_known else NoticeKind.DECLINED
            self._do(commands.SendNotice(lane.number, HopNotice(source.number, kind)))

    def _lose_lane(self, number: int) -> None:
        """Forget a lane: hops that came from it are not wanted any more, hops that went to it are tried again."""
        up, down = self.up.pop(number, None), self.down.pop(number, None)
        for hop in list(self.hops.values()):
            if hop.source is not None and hop.source.lane is up:
                self._end(hop, HopOutcome.WITHDRAWN)
            elif hop.away is not None and hop.away.lane is down:
                self._try_again(hop, "the lane to the next stage has ended")
        compare(self.down.values())
        if down is not None and not self.down:
            self._nobody_above_since_s = self._now_s

    def _look_at_time(self) -> None:
        for hop in list(self.hops.values()):
            if hop.away is not None and hop.away.overdue_s <= self._now_s:
                self._lose_overdue(hop, hop.away)
            elif hop.away is not None and hop.away.notice_s <= self._now_s:
                hop.away.notice_s = self._now_s + hop.away.lane.notice_s
                self._delay(hop)
            elif hop.source is not None and hop.state is HopState.ANSWERING and hop.unread_s <= self._now_s:
                self._close_silent(hop.source.lane.number, hop.source.lane.answer_patience_s(self.stage.value_bytes))
        for lane in [lane for lane in self.up.values() if lane.overdue_s() <= self._now_s]:
            assert lane.incoming is not None
            self._close_silent(lane.number, self._now_s - lane.incoming.at_s)
        since_s = self._nobody_above_since_s
        if since_s is not None and self._now_s >= since_s + NOBODY_ABOVE_S:
            self._nobody_above_since_s = None
            for number in list(self.up):
                self._do(commands.CloseLane(number, "nobody holds the next stage"))
                self._lose_lane(number)

    def _lose_overdue(self, hop: Hop, away: Away) -> None:
        """Send an overdue hop elsewhere; close its lane unless another answer has come since the hop was sent."""
        self.num_late += 1
        if away.lane.active_s <= away.sent_s:
            self._close_silent(away.lane.number, self._now_s - away.sent_s)
            return
        away.lane.rest(self._now_s)
        self._withdraw(hop, away)
        self._try_again(hop, "no answer in time")

    def _close_silent(self, number: int, silent_s: float) -> None:
        self._do(commands.CloseLane(number, f"no answer for {silent_s:.0f} s", silent_s=silent_s))
        self._lose_lane(number)
