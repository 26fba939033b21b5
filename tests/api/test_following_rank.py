"""The place of a rank that follows rank 0, without processes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.channel import News
from gossamer.ranks import FollowingSwarm


class FirstRank:
    """The channel to a rank 0 that has begun a run."""

    def __init__(self, is_alone: bool) -> None:
        self.is_alone = is_alone

    def next(self) -> News:
        return News(has_failed=False, is_closed=False, is_over=False, global_step=7, since_join=3)

    def share(self, text: str = "") -> str:
        return json.dumps(["/home/of/rank/0", 100, self.is_alone])


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_rank_knows_of_the_run_what_rank_0_knows(is_alone: bool) -> None:
    own: Any = SimpleNamespace(ranks=FirstRank(is_alone), num_cleared=0)
    swarm = FollowingSwarm(own)
    assert (swarm.clock.steps, swarm.clock.total_steps, swarm.clock.since_join) == (7, 100, 3)
    assert not swarm.over and swarm.is_alone == is_alone
    assert 0.0 < swarm.rate(1.0) <= 1.0
