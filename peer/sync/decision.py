"""Decide when another peer's weights are wanted: one pure function over a frozen view. peer/sync/state_sync.py observes and acts.

Global steps only say where to look; the trainer judges every state by the loss on its own held-out text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from gossamer.peer.link.messages import FollowClock, Start, StepBack
from gossamer.protocol.errors import BadMessage, GossamerError
from gossamer.protocol.messages.messages import Contents

START_SHARE = 10  # of the allowed gap: others no further than a tenth of it have hardly begun, so the initial weights are near enough
STEP_BACK_S = 60.0  # of refusals, far ahead of the others: they would have begun to catch up if they could
APART_S = 5.0  # without a lane to a neighbouring stage, and far from the others: it is no short fault of a line
UNSERVED_S = 60.0  # far behind the other stages, without a source of own stage that gives a piece: our weights are the best there are
ALONE_S = 300.0  # far ahead of the other stages: a holder that is behind us has followed by then, if it could


@dataclass(frozen=True, slots=True)
class SyncView:
    """What this peer knows of itself and of the others at one moment. `*_steps` are global steps."""

    state_bytes: int
    total_steps: int  # of the run
    gap_steps: int  # the most that two partners may be apart
    own_global_step: int
    typical_steps: int  # lower median of all Sybil groups and ours
    others_steps: int  # lower median of all Sybil groups; 0: none is known

    is_waiting: bool = False  # the trainer has not begun, and waits for Start or a state
    has_start: bool = False  # it has the run's initial weights
    is_founder: bool = False
    is_staged: bool = False  # we hold one stage of the model: the others here are those that hold it too
    stages_steps: int = 0  # lower median of the holders of other stages; 0: none is known
    apart_s: float = 0.0  # for how long a neighbouring stage has carried no hops with us
    unserved_s: float = 0.0  # of that time, since a source last gave a piece of a state
    others_have_begun: bool = False  # half of those that announce themselves
    are_steps_fresh: bool = False  # others were just asked for their global steps, in place of what they announced

    has_result: bool = False  # half of the partners are at the end of the run, and one of them has a result
    has_stale: bool = False  # some fragments are too old to meet about
    has_partners: bool = False  # peers that we have met are there: their statements alone count
    refused_s: float = 0.0  # for how long most Sybil groups have been there and refused us for our global step; 0: they do not
    giving_s: float = 0.0  # how long a partner that takes our state now may need for it; 0: none takes it
    is_in_company: bool = False  # a meeting has just completed, and no one with a vote has refused us since
    is_refused: bool = False  # refused in a row, by most Sybil groups, because the global steps are too far apart
    is_far: bool = False  # likewise, counting only those whose signed global steps are too far apart
    is_gated: bool = False  # stopped in a row by the merge gate, with most Sybil groups
    is_back: bool = False  # from a pause or another absence
    left_behind_steps: int = 0  # lower median of the partners that an absence may have put us too far behind; 0: there are none
    unpaused_steps: int = 0  # where our own rate would have brought us without the absence, and a quarter of the steps since we left on top


class NoUse(GossamerError):
    """The state of a source would not help us; the source did nothing wrong."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which state is of use."""

    state_bytes: int
    earliest_step: int
    latest_step: int  # a state that is further than those of all others would end our training early
    total_steps: int
    typical_steps: int = field(default=0, compare=False)  # where those are that it is to meet; 0: unknown
    takes_clock: bool = field(default=True, compare=False)  # the global step alone is taken over from a state with a higher loss than ours

    def check(self, header: Contents) -> None:
        """Raise BadMessage for a state that cannot exist, NoUse for one of another time, before any of its bytes arrive."""
        header.need_size(self.state_bytes)
        self.check_global_step(header)

    def check_global_step(self, header: Contents) -> None:
        """Raise as `check`, for the global step alone."""
        if header.global_step > self.total_steps:
            raise BadMessage(f"a clock of {header.global_step} steps in a run of {self.total_steps}")
        if header.global_step < self.earliest_step:
            raise NoUse(f"its clock shows {header.global_step} steps, others are at {self.earliest_step} or more")
        if header.global_step > self.latest_step:
            raise NoUse(f"its clock shows {header.global_step} steps, others are at {self.latest_step} or less")


class Act(Enum):
    """A decision that needs no more words."""

    ASK_CLOCKS = auto()  # then decide again: announced global steps are seconds old, and nothing is done on them alone
    SYNC_FRAGMENTS = auto()
    TAKE_RESULT = auto()


Decision = Start | StepBack | FollowClock | Wanted | Act


def decide(view: SyncView) -> Decision | None:
    """Return what to do next. `Wanted`: transfer such a state, and have the trainer judge it. None: train on with our own weights.

    To begin, a founder starts from the initial weights, unless half of the others have begun without it. Any other peer that has them
    starts from them while the others have hardly begun. Everyone else takes a state from others.
    """
    if view.is_waiting:
        return _decide_beginning(view)
    if view.has_result:
        return Act.TAKE_RESULT
    if _is_apart(view):
        return _decide_apart(view)
    if view.has_stale:
        return Act.SYNC_FRAGMENTS
    target = wanted(view)
    if target is None and not view.is_refused and not view.is_back:
        return None
    if not view.are_steps_fresh:
        return Act.ASK_CLOCKS
    if target is not None:
        return target
    # Far from the others for long, with no state to want, is far ahead: set the global step to where the others can meet us. Those that
    # come back from an absence catch up with us instead: the time before does not count. In a staged run the other stages are where we are.
    is_ahead = view.has_partners and view.is_far and view.refused_s > STEP_BACK_S + view.giving_s and not view.is_staged
    return StepBack(view.others_steps + view.gap_steps * 3 // 4) if is_ahead else None


def wanted(view: SyncView) -> Wanted | None:
    """Return which state would be of more use than our own weights; None when ours are good enough.

    One that trains only ever wants a state that is further than its own: when it is behind the typical global step and no meeting
    completes; when it is refused for its global step, which must be too far from the signed ones, and is not ahead; when it is gated; when
    partners went on while it was away, even if others that were away too keep it company; when the other stages carry no hops with it.
    """
    own, gap = view.own_global_step, view.gap_steps
    if view.is_waiting:  # without a known global step, any state: the address in the invite has announced none yet
        return _near_step(view, view.others_steps) if view.others_steps else _between_steps(view, 0, view.total_steps)
    if _is_apart(view) and own < view.stages_steps:
        return _near_step(view, view.stages_steps, own + 1)
    if view.is_back and view.left_behind_steps:
        # Perhaps one partner alone says so: with worse weights than ours it brings our global step no further than our own rate explains.
        takes_clock = view.left_behind_steps <= view.unpaused_steps
        return replace(_near_step(view, view.left_behind_steps, own + 1), takes_clock=takes_clock)
    if view.typical_steps - own > gap and not view.is_in_company:
        return _near_step(view, view.typical_steps, own + 1)
    if view.is_far:
        return _near_step(view, view.others_steps, own + gap + 1) if own - view.others_steps <= gap else None
    return _near_step(view, view.typical_steps, own + 1) if view.is_gated else None


def fragment_to_sync(view: SyncView, earliest_step: int = 0) -> Wanted:
    """Return what a source of fragments must be like: at about the typical global step, and not behind `earliest_step`."""
    return _near_step(view, view.typical_steps, earliest_step)


def _is_apart(view: SyncView) -> bool:
    """Return whether the other stages carry no hops with us because their global steps are too far from ours."""
    return view.apart_s >= APART_S and view.stages_steps > 0 and abs(view.own_global_step - view.stages_steps) > view.gap_steps


def _decide_apart(view: SyncView) -> Decision | None:
    """Decide: one that is behind takes a state of its stage; where nobody gives one, it goes on with its own at the others' step."""
    if view.own_global_step > view.stages_steps:
        return StepBack(view.stages_steps) if view.apart_s >= ALONE_S else None
    if view.unserved_s < UNSERVED_S:
        return wanted(view)
    return FollowClock(min(view.stages_steps, view.total_steps - 1), is_unlimited=True)


def _decide_beginning(view: SyncView) -> Decision | None:
    if view.has_start and view.is_founder and not view.others_have_begun:
        return Start()
    if not view.are_steps_fresh:
        return Act.ASK_CLOCKS
    if view.has_start and view.others_steps <= view.gap_steps // START_SHARE:
        return Start()
    return wanted(view)


def _near_step(view: SyncView, global_step: int, earliest_steps: int = 0) -> Wanted:
    earliest_steps, latest_steps = max(earliest_steps, global_step - view.gap_steps), min(view.total_steps, global_step + view.gap_steps)
    return replace(_between_steps(view, max(0, earliest_steps), latest_steps), typical_steps=global_step)


def _between_steps(view: SyncView, earliest_steps: int, latest_steps: int) -> Wanted:
    return Wanted(view.state_bytes, earliest_steps, latest_steps, view.total_steps)
