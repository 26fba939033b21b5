"""Keep this peer's weights in step with the swarm: observe, decide (peer/sync/decision.py), act.

Refusals and gated meetings count only in a row, and only with most Sybil groups, so nobody can force weights on us. Whatever made us ask, a
source must sign a global step near those of most others (`Wanted`). Peers that we have not met send us no step back, and end no run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from gossamer.peer.link import messages
from gossamer.peer.link.socket import LinkLost, NodeEnd
from gossamer.peer.machine.events import Event, ProcessReported, StepsGivenUp, StepsLost
from gossamer.peer.meeting.commands import Finish
from gossamer.peer.meeting.interface import MeetingOutcome
from gossamer.peer.swarm.lifecycle import Lifecycle, LifecycleState
from gossamer.peer.swarm.membership import Membership
from gossamer.peer.swarm.presence import Presence
from gossamer.peer.swarm.sybil_groups import SybilGroups
from gossamer.peer.sync.decision import START_SHARE, STEP_BACK_S, Act, SyncView, Wanted, decide, fragment_to_sync, wanted
from gossamer.peer.sync.fragment_sync import FragmentSync
from gossamer.peer.sync.result_agreement import ResultAgreement
from gossamer.peer.sync.state_transfer import StateTransfer
from gossamer.protocol.errors import RefusalCode, SwarmUnreachable
from gossamer.protocol.identity import PeerId
from gossamer.protocol.limits import SLOWEST_BYTES_PER_S
from gossamer.protocol.messages.messages import RunPhase
from gossamer.protocol.tasks import cancel, loop_s

LOOK_S = 10.0  # between two decisions
FIRST_LOOK_S = 3.0  # for the directory to show a founder that its run goes on already
FOUND_S = 300.0  # in which no claimed holder of our stage gives a piece of it, until we begin from the initial weights
START_S = 60.0  # for the trainer to begin after Start
COMPANY_S = 0.5  # between two looks at whether there are enough peers to begin with
OUTCAST = 6  # meetings in a row that we began and that failed for our global step, or for the gate, without a completed one
REMEMBERED = 64  # of those meetings
MANY = 3  # partners of a Sybil group at least, or all within reach, that they were with
PACE = 4  # no partner is believed to be so many times as fast as before
MEASURED_S = STEP_BACK_S / 2  # of training tell our own rate, and a partner that went on alone has not set its global step back by then
MISSED_SHARE = 1.25  # of what our own rate gives since we left: partners that went on may be a little faster than we are
BACK_S = 120.0  # after an absence, to look for partners that went on without us
OLD_SHARE = 10  # of the allowed gap: a meeting of weights so far apart would take the newer ones back by half of that
MATES_S = 10.0  # after a restart, for the mates to tell their global steps: they may start at the same time
UNSYNCED_S = 60.0  # in which no peer within reach gives a newer fragment, until stale ones are met about as they are
COMPANY_KEPT_S = 20.0  # after a completed meeting, no announced global step makes us doubt that we are in step with the others


@dataclass(frozen=True, slots=True)
class ReturnPoint:
    """Where this peer was when it first trained after an absence."""

    global_step: int
    own_steps: int
    at_s: float  # loop time


@dataclass(slots=True)
class StateSync:
    """Have the trainer begin, and keep it in step with the others.

    `has_start`: the run's initial weights are here. `away_s`: how long this peer was away, before it was started or in its last pause.
    In a staged run, `apart_s` returns for how long a neighbouring stage has had no lane with us. `copy` is where the weights of our stage
    lie if this peer has moved here, `may_move_back` whether there is a stage to go back to, and `move_back` goes, for this reason.
    """

    membership: Membership
    lifecycle: Lifecycle
    presence: Presence
    groups: SybilGroups
    transfer: StateTransfer
    fragments: FragmentSync
    agreement: ResultAgreement
    link: NodeEnd
    emit: Callable[[Event], None]
    _: KW_ONLY
    is_founder: bool
    has_start: bool
    wait_for_peers: int
    away_s: float = 0.0
    apart_s: Callable[[], float] = lambda: 0.0
    copy: Path | None = None
    move_back: Callable[[str], None] = lambda reason: None
    may_move_back: Callable[[], bool] = lambda: False
    _is_unserved: bool = False  # the claimed holders of our stage gave nothing for FOUND_S, or too slowly
    _waiting_s: float | None = None  # since when the trainer waits for them; loop time
    _back_s: float = -math.inf  # when it came back; loop time
    _left_s: float | None = None  # when its last pause began
    _steps_per_s: float = 0.0  # own ones, before that pause
    _returned: ReturnPoint | None = None  # when we first trained after we came back
    _refused_s: dict[PeerId, float] = field(default_factory=dict)  # when each of them first did so, of those that were there ever since
    _too_far: deque[PeerId] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # who refused us since the last completed meeting
    _gated: deque[PeerId] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # likewise: partners whose gate, or at ours
    _met_s: float = -math.inf  # when the last meeting completed
    _own_steps: int = 0  # at the last look while training
    _least_step: int | None = None  # of weights that are of use, while those of a checkpoint of a stage are brought up to date
    _unsynced_s: float | None = None  # since when no peer within reach has given a newer fragment; loop time
    _began: tuple[int, float] | None = None  # our global step when we first looked while training, and that loop time

    def on_meeting(self, partner: PeerId, finish: Finish, *, initiated: bool) -> None:
        """Take in how a meeting ended. A peer that calls us only to refuse us proves nothing about our weights."""
        if finish.outcome is MeetingOutcome.COMPLETED:
            self._met_s = loop_s()
            self._forget_refusals()
        elif not initiated:
            return
        elif finish.refusal is RefusalCode.STEP_TOO_FAR:
            self._too_far.append(partner)
            self._refused_s.setdefault(partner, loop_s())
        elif finish.outcome is MeetingOutcome.GATED or finish.refusal is RefusalCode.GATE:
            self._gated.append(partner)

    async def run(self) -> None:
        """Decide and act until cancelled. Raises as `StateTransfer.take_over` when a trainer that waits for weights cannot get any."""
        self._come_back()
        try:
            await self._look_for_ever()
        finally:
            self._left_s = loop_s()
            self._steps_per_s = self._pace() or self._steps_per_s

    def _come_back(self) -> None:
        """Note when we are here, and how long we were away."""
        self._back_s = loop_s()
        if self._left_s is not None:
            before_s = self.away_s if self._returned is None else 0.0  # it has not trained since the absence before
            self.away_s = before_s + self._back_s - self._left_s
        self._returned = self._waiting_s = self._unsynced_s = None
        self._is_unserved = False
        self._forget_refusals()

    async def _look_for_ever(self) -> None:
        lifecycle = self.lifecycle
        while True:
            await lifecycle.until(lambda: lifecycle.state is not LifecycleState.UNKNOWN)
            if lifecycle.state is LifecycleState.WAITING:
                while (seen := len(self.groups.book.everybody(loop_s()))) < self.wait_for_peers:
                    self.emit(ProcessReported("waiting", f"waiting for peers: {seen} seen, {self.wait_for_peers} wanted"))
                    await asyncio.sleep(COMPANY_S)
                await self.presence.first_look(FIRST_LOOK_S)
                await self._begin()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(START_S):
                        await lifecycle.until(lambda: lifecycle.state is not LifecycleState.WAITING)
            elif lifecycle.may_meet and lifecycle.phase is RunPhase.TRAIN:
                self._waiting_s, self._is_unserved = None, False
                self._began = self._began or (lifecycle.global_step, loop_s())
                is_restored = self._is_restored() or (self._returned is None and self.away_s > 0.0)
                self._own_steps = lifecycle.own_steps
                self._returned = self._returned or ReturnPoint(lifecycle.global_step, lifecycle.own_steps, loop_s())
                if is_restored and self.groups.book.stage:
                    await self._compare_with_mates()
                await self._carry_out()
            elif lifecycle.phase is RunPhase.FINISH:
                self._least_step, lifecycle.stale = None, set()  # the last averaging is for all
            await self._wait()

    async def _wait(self) -> None:
        """Wait for the next decision: a moment where there is something to do."""
        until_s = loop_s() + LOOK_S
        while loop_s() < until_s:
            await asyncio.sleep(COMPANY_S)
            self._forget_absent()
            is_waiting = self.lifecycle.state is LifecycleState.WAITING
            if is_waiting or self.lifecycle.stale or self._is_restored() or self._is_ending():
                return
            self._own_steps = self.lifecycle.own_steps

    def _is_restored(self) -> bool:
        """Return whether the trainer has gone back to a checkpoint since the last look."""
        return self.lifecycle.own_steps < self._own_steps

    async def _compare_with_mates(self) -> None:
        """Have the weights of a stage synced before any meeting, if they are a checkpoint's and a mate that we have met has newer ones.

        A meeting would take the newer ones back, and no loss of its own tells a stage which ones are better. Until the mates have told
        their global steps, no fragment is met about.
        """
        lifecycle, gap_steps, is_old = self.lifecycle, self.membership.terms.max_clock_gap_steps, False
        if lifecycle.stale:
            return
        own_step = lifecycle.global_step
        least_step = own_step + gap_steps // OLD_SHARE
        lifecycle.stale = set(range(len(self.membership.terms.fragments)))
        try:
            await self.presence.first_look(FIRST_LOOK_S)
            steps = await self.transfer.sources.steps_of_partners(MATES_S)
            is_old = any(least_step <= step <= own_step + gap_steps for step in steps)
        finally:
            self._least_step = least_step if is_old else None
            lifecycle.stale = lifecycle.stale if is_old else set()

    async def _sync_fragments(self) -> None:
        """Bring stale fragments up to date. They are met about as they are where no peer gives newer ones: all others may be stale too.

        Restored weights of a stage are, even where no mate is within reach.
        """
        least_step, stale = self._least_step, set(self.lifecycle.stale)
        self._unsynced_s = loop_s() if self._unsynced_s is None else self._unsynced_s
        await self.fragments.run(lambda header: fragment_to_sync(self.view(), least_step or 0).check_global_step(header))
        if self.lifecycle.stale != stale or not (least_step is not None or self.groups.book.reachable(loop_s())):
            self._unsynced_s = loop_s()
        elif loop_s() - self._unsynced_s >= UNSYNCED_S:
            self.lifecycle.stale = set()
        if not self.lifecycle.stale:
            self._least_step = self._unsynced_s = None

    async def _begin(self) -> None:
        """Have a trainer that waits begin. Raises as `_carry_out`.

        In a staged run, a claim to hold our stage is no holder: if nobody gives its weights for FOUND_S, or some too slowly, we begin from
        the initial ones while the run is new. A peer that has moved to our stage has a copy on the disk, or goes back.
        """
        target = wanted(self.view()) if self.groups.book.stage else None
        if target is not None and self.copy is not None and self.copy.exists():
            try:
                refusal = await self.transfer.adopt_copy(self.copy, lambda: wanted(self.view()) or target)
            except LinkLost:  # the copy is there for the next trainer
                return
            if refusal is None:  # the others carry hops with us at their step, however old our weights are
                steps = min(self.view().stages_steps, self.membership.total_steps - 1)
                self.link.notify(messages.FollowClock(steps, is_unlimited=True))
            else:
                self.move_back(str(refusal))
            return
        if not (self.groups.book.stage and (self.has_start or self.may_move_back())):
            await self._carry_out()
            return
        waiting_s = self._waiting_s = self._waiting_s or loop_s()
        work = asyncio.create_task(self._carry_out())
        try:
            while not work.done() and not self._is_unserved:
                await asyncio.wait({work}, timeout=COMPANY_S)
                self._is_unserved = self._waits_in_vain(waiting_s) and self.lifecycle.state is LifecycleState.WAITING
            if work.done():
                await work
        except SwarmUnreachable as error:  # a claimed holder may be on its way back
            self.emit(ProcessReported("joining", f"no weights yet: {error}"))
        finally:
            await cancel(work)
        if self._is_unserved and self.may_move_back() and not self._founds_stage:
            self.move_back(f"nobody has given them in {(loop_s() - waiting_s) / 60:.0f} min")
        elif self._is_unserved:
            await self._carry_out()

    def _waits_in_vain(self, waiting_s: float) -> bool:
        """Return whether nobody gives a piece of our stage, or all give them more slowly than the slowest line carries a state.

        `waiting_s`: since when the trainer waits; loop time.
        """
        most_s = self.membership.terms.state_bytes / SLOWEST_BYTES_PER_S
        return loop_s() - max(waiting_s, self.transfer.served_s) >= FOUND_S or loop_s() - waiting_s >= FOUND_S + most_s

    async def _carry_out(self) -> None:
        """Do what is to be done now. A trainer that waits is not left before it has weights."""
        is_waiting = self.lifecycle.state is LifecycleState.WAITING
        found = await self.agreement.find() if not is_waiting and self._is_ending() else {}
        decision = decide(self.view(has_result=bool(found)))
        if decision is Act.ASK_CLOCKS:
            await (self.transfer.learn_global_steps() if is_waiting else self.transfer.ask_global_steps())
            decision = decide(self.view(are_steps_fresh=True))
        match decision:
            case messages.Start():
                self.link.notify(decision)
            case Act.TAKE_RESULT:
                await self.agreement.take(found)
            case Act.SYNC_FRAGMENTS:
                await self._sync_fragments()
            case Wanted() if is_waiting:
                await self.transfer.take_over(lambda: wanted(self.view()) or decision)
            case Wanted():
                if await self.transfer.ask_everybody(lambda: wanted(self.view()) or decision) is None:
                    self._reset_refusals()
            case messages.StepBack(global_step):
                self.link.notify(decision)
                self.emit(StepsGivenUp(self.lifecycle.global_step, global_step))
                self._reset_refusals()
            case messages.FollowClock(global_step):
                self.emit(StepsLost(self.lifecycle.global_step, global_step))
                self.link.notify(decision)
                self.emit(ProcessReported("joining", f"kept our own weights at step {global_step}: nobody gives newer ones of this stage"))
                self._reset_refusals()

    def view(self, *, has_result: bool = False, are_steps_fresh: bool = False) -> SyncView:
        """Return what is known at this moment."""
        lifecycle, own_global_step = self.lifecycle, self.lifecycle.global_step
        is_waiting, since_met_s = lifecycle.state is LifecycleState.WAITING, loop_s() - self._met_s
        voters = self.groups.voters(loop_s())
        far = [partner for partner in self._too_far if self._is_far(partner)]
        is_given = any(entry.has_met and self.agreement.own.takes_state(entry.peer_id) for entry in voters)
        return SyncView(
            state_bytes=self.membership.terms.state_bytes,
            total_steps=self.membership.total_steps,
            gap_steps=self.membership.terms.max_clock_gap_steps,
            own_global_step=own_global_step,
            typical_steps=self.groups.typical_global_step(loop_s(), self.membership.total_steps, own_global_step),
            others_steps=self.groups.typical_global_step(loop_s(), self.membership.total_steps),
            is_waiting=is_waiting,
            has_start=self.has_start,
            is_founder=self._founds_stage if self.groups.book.stage else self.is_founder,
            is_staged=self.groups.book.stage > 0,
            stages_steps=self.groups.typical_of_other_stages(loop_s(), self.membership.total_steps) if self.groups.book.stage else 0,
            apart_s=self.apart_s(),
            unserved_s=min(self.apart_s(), loop_s() - self.transfer.served_s),
            others_have_begun=is_waiting and not self._is_unserved and self.groups.half_agree(voters, lambda entry: entry.global_step > 0),
            are_steps_fresh=are_steps_fresh,
            has_result=has_result,
            has_stale=bool(lifecycle.stale),
            has_partners=any(entry.has_met for entry in voters),
            refused_s=self._refused_for_s(far),
            giving_s=self.membership.terms.state_bytes / SLOWEST_BYTES_PER_S if is_given else 0.0,
            is_in_company=since_met_s < COMPANY_KEPT_S and not self._voters() & {*self._too_far, *self._gated},
            is_refused=self._is_outcast(self._too_far),
            is_far=self._is_outcast(far),
            is_gated=self._is_outcast(self._gated),
            is_back=not is_waiting and self.away_s > 0.0 and loop_s() - self._back_s < BACK_S,
            left_behind_steps=self._left_behind_steps(),
            unpaused_steps=self._unpaused_steps(),
        )

    @property
    def _founds_stage(self) -> bool:
        """Whether this peer begins its stage of a staged run: nobody has trained it, and of those about to hold it we come first.

        Once the other stages are under way nobody begins a stage anew, nor does its founder: the weights would be random beside theirs.
        """
        book, now_s, own = self.groups.book, loop_s(), self.membership.identity.peer_id
        run_steps = statistics.median_low([entry.global_step for entry in book.everybody(now_s)] or [0])
        others = book.claimed(book.stage, now_s)
        is_new = run_steps <= self.membership.terms.max_clock_gap_steps // START_SHARE
        is_first = not any(entry.global_step > 0 for entry in others) and all(own < entry.peer_id for entry in others)
        return is_new and (self.is_founder or self._is_unserved or is_first)

    def _left_behind_steps(self) -> int:
        """Return where the partners are that went on while we were away; 0 where there are none.

        One that claims to be further than PACE times our own rate allows is not believed: a single one may be all that went on.
        """
        own, gap_steps = self.lifecycle.global_step, self.membership.terms.max_clock_gap_steps
        most_steps = own + gap_steps + PACE * self._usual_pace() * (self.away_s + loop_s() - self._back_s)
        latest_steps = self.membership.total_steps - gap_steps  # later ones are `_is_ending`'s
        return self.groups.typical_beyond(loop_s(), own + gap_steps + 1, min(latest_steps, int(most_steps)))

    def _unpaused_steps(self) -> int:
        """Return where our own rate would have brought us without our last absence, and a quarter of the steps since we left on top."""
        returned = self._returned or ReturnPoint(self.lifecycle.global_step, self.lifecycle.own_steps, loop_s())
        return returned.global_step + int(MISSED_SHARE * self._usual_pace() * (self.away_s + loop_s() - returned.at_s))

    def _usual_pace(self) -> float:
        """Return our own steps per second, before the last absence or since, whichever is more; 0 where neither is known."""
        return max(self._steps_per_s, self._pace())

    def _pace(self) -> float:
        """Return our own steps per second since we came back; 0 in the first MEASURED_S. Followed steps of partners do not count."""
        if self._returned is None or (trained_s := loop_s() - self._returned.at_s) < MEASURED_S:
            return 0.0
        return max(0, self.lifecycle.own_steps - self._returned.own_steps) / trained_s

    def _is_ending(self) -> bool:
        """Return whether half of our partners are at the end of the run, as they may be: then there is a result, or soon will be."""
        says = self.groups.half_agree(self.groups.partners(loop_s()), lambda entry: entry.finished and not entry.failures, own=False)
        return says and self._may_be_over()

    def _may_be_over(self) -> bool:
        """Return whether partners can be at the end: since we last met one they have been at most PACE times as fast as until then.

        Partners of a meeting are at most the allowed gap apart, so they may have come from behind us, and be ahead of us.
        """
        own_global_step, gap_steps = self.lifecycle.global_step, self.membership.terms.max_clock_gap_steps
        began_steps, began_s = self._began or (own_global_step, loop_s())
        steps_per_s = (own_global_step - began_steps + 2 * gap_steps) / max(1.0, loop_s() - began_s)
        since_s = loop_s() - max(began_s, self._met_s)
        return self.membership.total_steps - own_global_step <= gap_steps + PACE * steps_per_s * since_s

    def _is_outcast(self, by: Collection[PeerId]) -> bool:
        if len(by) < OUTCAST:
            return False
        voters = self._voters()
        by = [partner for partner in by if partner in voters]
        return len(by) >= OUTCAST and self.groups.half_list(self.groups.voters(loop_s()), set(by), MANY)

    def _refused_for_s(self, by: Collection[PeerId]) -> float:
        """Return for how long enough of these peers, which refused us, have been there and refused us; 0 if they are too few."""
        for since_s in sorted({self._refused_s[partner] for partner in by}):
            if self._is_outcast([partner for partner in by if self._refused_s[partner] <= since_s]):
                return loop_s() - since_s
        return 0.0

    def _forget_absent(self) -> None:
        """Forget what peers refused that are away now: until they have caught up after their return, they refuse whoever went on."""
        here = self._voters()
        self._too_far = deque((partner for partner in self._too_far if partner in here), REMEMBERED)
        self._refused_s = {partner: since_s for partner, since_s in self._refused_s.items() if partner in here}

    def _voters(self) -> set[PeerId]:
        """Return the peers whose refusals count: strangers do not where there are partners."""
        return {entry.peer_id for entry in self.groups.voters(loop_s()) if not entry.failures}

    def _is_far(self, partner: PeerId) -> bool:
        entry = self.groups.book.get(partner)
        return entry.has_global_step and abs(entry.global_step - self.lifecycle.global_step) > self.membership.terms.max_clock_gap_steps

    def _forget_refusals(self) -> None:
        self._too_far.clear()
        self._gated.clear()
        self._refused_s.clear()

    def _reset_refusals(self) -> None:
        """Forget all refusals, ours and those in the book: they were about weights, or a global step, that are gone."""
        self._forget_refusals()
        self.groups.book.forget_refusals()
