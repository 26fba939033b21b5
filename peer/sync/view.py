"""What a peer knows when it decides whether it needs other weights (peer/sync/decision.py)."""

from __future__ import annotations

from dataclasses import dataclass


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
