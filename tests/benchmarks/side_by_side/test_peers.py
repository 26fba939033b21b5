from __future__ import annotations

from pathlib import Path

from benchmarks.side_by_side.peers import Follower
from gossamer.peer.machine.events import MeetingDone, StateChanged, StateTransferred, StepDone, to_line


def test_a_log_is_followed_while_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    follower = Follower(file)
    follower.follow()
    assert (follower.state, follower.own_steps) == ("starting", 0)
    step = to_line(StepDone(7, 7, 3584, 2.5, 0.01, 512.0, 1.0, 0.1, 1.0, 0.1))
    file.write_bytes(to_line(StateChanged("training", "", ts=100.0)) + step[:20])
    follower.follow()
    assert (follower.state, follower.began, follower.own_steps) == ("training", 100.0, 0)
    with file.open("ab") as log:
        log.write(step[20:] + to_line(StateChanged("training", "x", ts=101.0)) + to_line(StateChanged("done", "", ts=102.0)))
    follower.follow()
    assert (follower.own_steps, follower.began, follower.over, follower.is_over) == (7, 100.0, 102.0, True)


def test_meetings_are_counted_by_outcome(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "events.jsonl")
    for outcome, reason in (("completed", ""), ("gated", "46.4 away"), ("gated", "9 away"), ("completed", ""), ("busy", "in another")):
        follower.apply(to_line(MeetingDone("12D3KooPeer", 0, outcome, reason, "direct", 1, 1, 0.5)))
    follower.apply(to_line(StateTransferred(("12D3KooPeer",), 5, 100, 100, 1.0)))
    assert (follower.meetings, follower.transfers) == ({"completed": 2, "gated": 2, "busy": 1}, 1)
    assert follower.reasons == {"gated: # away": 2}
