"""The peers of the pictures are told by events that a real peer could have told, in the states that the page must show."""

from __future__ import annotations

from functools import reduce

import pytest

from benchmarks.pictures.scenes import SCENES
from gossamer.cli.figures import sentence
from gossamer.peer.machine.states import STATES
from gossamer.peer.machine.status import Status, apply

NOW_S = 1_790_000_000.0


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_is_a_peer_with_a_reason_and_a_way_out(name: str) -> None:
    status = reduce(apply, SCENES[name](NOW_S), Status())
    assert status.state in STATES
    assert status.reason and status.way_out
    assert sentence(status.to_json(), NOW_S).startswith(f"{status.state} for ")
    assert bool(status.history.points) == (name != "joining")
